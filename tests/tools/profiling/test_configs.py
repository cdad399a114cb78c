"""One command line for several algorithms."""

from dataclasses import replace

import pytest

from fastclip import ALGORITHMS
from fastclip.config.options import LossOptions
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.errors import OptionError
from fastclip.tools.profiling.configs import configs_for, dropped_notes

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
    "negatives": "distinct",
    "estimator": "paper",
    "wire_dtype": "float16",
    "tile_mib": 64,
}


def config(**loss):
    return replace(parse(["--config=emoji"]), loss=LossOptions(**loss))


def is_refused(algorithm, option):
    try:
        resolve(replace(config(**{option: OPTIONS[option]}), algorithm=algorithm))
    except OptionError as error:
        return error.option == f"loss.{option}"
    return False


def test_all_options_of_the_loss_are_tested():
    assert OPTIONS.keys() == vars(LossOptions()).keys()


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_train_refuses_are_dropped_where_another_algorithm_takes_them(option):
    """Compared with `fastclip train` for each algorithm alone."""
    taken = next(name for name in ALGORITHMS if not is_refused(name, option))
    for algorithm in ALGORITHMS.keys() - {taken}:
        resolved, dropped = configs_for([algorithm, taken], config(**{option: OPTIONS[option]}))
        assert [one.algorithm for one in resolved] == [algorithm, taken]
        assert dropped == ({algorithm: [f"loss.{option}"]} if is_refused(algorithm, option) else {})


def test_a_note_names_the_dropped_options_and_the_algorithm():
    (note,) = dropped_notes({"openclip": ["loss.rho", "loss.gamma"]})
    assert all(name in note for name in ("openclip", "loss.rho", "loss.gamma"))


def test_an_option_without_effect_on_any_algorithm_is_refused():
    with pytest.raises(OptionError) as caught:
        configs_for(["openclip", "fastclip-v1"], config(rho=2.0))
    assert (caught.value.option, caught.value.value) == ("loss.rho", 2.0)
    assert "openclip" in caught.value.rule
