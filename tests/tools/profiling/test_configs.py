"""One command line for several algorithms."""

from dataclasses import replace

import pytest

from fastclip import ALGORITHMS
from fastclip.config.options import LossOptions
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.tools.profiling.configs import configs_for

OPTIONS = {
    "tau": 0.1,
    "tau_lr": 1e-3,
    "tau_min": 0.02,
    "tau_betas": (0.9, 0.99),
    "rho": 2.0,
    "rho_share": 0.5,
    "gamma": 0.7,
    "gamma_schedule": "cosine",
    "gamma_decay_epochs": 3,
    "epsilon": 1e-6,
    "estimator": "paper",
    "wire_dtype": "float16",
    "tile_mib": 64,
}


def config(**loss):
    return replace(parse(["--config=emoji"]), loss=LossOptions(**loss))


def is_refused(algorithm, option):
    try:
        resolve(replace(config(**{option: OPTIONS[option]}), algorithm=algorithm))
    except ValueError as error:
        return "has no effect" in str(error)
    return False


def test_the_options_are_all_there_are():
    assert OPTIONS.keys() == vars(LossOptions()).keys()


@pytest.mark.parametrize("option", OPTIONS)
def test_what_training_refuses_is_left_out_where_another_algorithm_takes_it(option):
    """Compared with what `fastclip train` says of each algorithm alone."""
    taken = next(name for name in ALGORITHMS if not is_refused(name, option))
    for algorithm in ALGORITHMS.keys() - {taken}:
        resolved, left_out = configs_for([algorithm, taken], config(**{option: OPTIONS[option]}))
        assert [one.algorithm for one in resolved] == [algorithm, taken]
        refused = is_refused(algorithm, option)
        assert left_out == [f"loss.{option}: no effect with {algorithm}, left out there."] * refused


def test_what_has_no_effect_at_all_is_refused():
    with pytest.raises(ValueError, match=r"loss.rho=2.0 has no effect with openclip"):
        configs_for(["openclip", "fastclip-v1"], config(rho=2.0))
