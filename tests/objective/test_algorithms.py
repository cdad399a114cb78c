"""The table of algorithms and how options change a row."""

from math import inf, log

import pytest

from fastclip import ALGORITHMS
from fastclip.errors import OptionError
from fastclip.objective.algorithms import RHO_SHARE, LossOptions, resolve, written_options


def test_the_table_is_the_papers_table_1():
    table = {name: (row.loss, row.inner_schedule, row.temperature) for name, row in ALGORITHMS.items()}
    assert table == {
        "openclip": ("MBCL", None, "learnable"),
        "sogclr": ("GCL", "constant", "constant"),
        "isogclr": ("RGCL", "constant", "individual"),
        "fastclip-v0": ("GCL", "cosine", "learnable"),
        "fastclip-v1": ("GCL", "cosine", "constant"),
        "fastclip-v2": ("RGCL", "cosine", "individual"),
        "fastclip-v3": ("RGCL-g", "cosine", "learnable"),
        "scent": ("RGCL-g", "adaptive", "learnable"),
        "siglip": ("SigLIP", None, "learnable"),
        "mbcl": ("MBCL", None, "learnable"),
    }
    assert [name for name, row in ALGORITHMS.items() if not row.fcco] == ["openclip", "siglip", "mbcl"]
    assert [name for name, row in ALGORITHMS.items() if not row.tau_power] == [
        "openclip",
        "fastclip-v0",
        "siglip",
        "mbcl",
    ]


def test_defaults_are_the_papers_medium_setting_except_for_rho():
    v3, v2, sogclr = resolve("fastclip-v3"), resolve("fastclip-v2"), resolve("sogclr")
    assert (v3.gamma, v3.gamma_decay_epochs, v3.tau, v3.tau_lr) == (0.2, 18, 0.07, 2e-4)
    assert (v2.gamma, v2.tau, v2.tau_lr) == (0.2, 0.03, 1e-2)
    assert (sogclr.gamma, sogclr.tau, sogclr.epsilon) == (0.6, 0.03, 1e-14)


def test_v3_with_a_constant_gamma_is_one_option_away():
    settings = resolve("fastclip-v3", LossOptions(gamma_schedule="constant"))
    assert settings.gamma == 0.6  # the paper's "v3 (Const. γ)"
    assert {settings.gamma_at(epoch) for epoch in range(40)} == {0.6}


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("fastclip-v3", "gamma", 0.0),
        ("fastclip-v3", "gamma", 1.2),
        ("fastclip-v3", "gamma_schedule", "linear"),
        ("fastclip-v3", "gamma_decay_epochs", 0),
        ("fastclip-v3", "tau", 0.005),
        ("fastclip-v3", "tau", 2.0),
        ("fastclip-v3", "tau_min", 0.0),
        ("fastclip-v3", "tau_min", NAN),
        ("fastclip-v3", "rho", -1.0),
        ("fastclip-v3", "tau_lr", NAN),
        ("fastclip-v3", "epsilon", -1e-3),
        ("fastclip-v3", "estimator", "own"),
        ("fastclip-v2", "tau_betas", (0.9, 1.0)),
        ("fastclip-v2", "estimator", "released"),
        ("mbcl", "estimator", "released"),
        ("fastclip-v3", "rho_share", -0.1),
        ("fastclip-v3", "rho_share", NAN),
        ("fastclip-v3", "estimator", "released"),  # without its rho
        ("fastclip-v3", "tile_mib", 0),
    ],
)
def test_an_invalid_value_is_refused(name, option, value):
    with pytest.raises(OptionError) as caught:
        resolve(name, LossOptions(**{option: value}))
    assert caught.value.option == option
    assert caught.value.value == pytest.approx(value, nan_ok=True)


def test_an_unknown_algorithm_gets_the_choices_and_a_suggestion():
    with pytest.raises(OptionError) as caught:
        resolve("fastclip")
    assert (caught.value.option, caught.value.value) == ("algorithm", "fastclip")
    assert all(name in caught.value.rule for name in ALGORITHMS)
    assert "fastclip-v" in caught.value.advice


def test_tau_below_tau_min_names_the_bound():
    with pytest.raises(OptionError) as caught:
        resolve("fastclip-v3", LossOptions(tau=0.05, tau_min=0.1))
    assert (caught.value.option, caught.value.value, caught.value.example) == ("tau", 0.05, 0.1)


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.robust])
def test_rho_follows_the_batch_by_rule(name):
    unbound = resolve(name)
    assert (unbound.rho, unbound.rho_share) == (None, RHO_SHARE)
    for batch in (2, 64, 5120):
        rho = resolve(name, batch=batch).rho
        assert rho == unbound.rho_for(batch) == pytest.approx(RHO_SHARE * log(batch - 1))
    given = resolve(name, LossOptions(rho=2.0), batch=64)
    assert (given.rho, given.rho_share, given.rho_for(8)) == (2.0, None, 2.0)


@pytest.mark.parametrize(
    ("epochs", "gamma", "length"),
    [
        (1, 1.0, 1),
        (7, 1.0, 7),
        (10, 0.784, 10),
        (20, 0.474, 20),
        (24, 0.415, 24),
        (33, 0.329, 33),
        (8.5, 0.882, 9),
    ],
)
def test_gamma_by_rule_follows_the_length_of_the_run(epochs, gamma, length):
    """min(1, 4.177·E^−0.7265), with a cosine over all epochs."""
    settings = resolve("fastclip-v3", LossOptions(gamma="auto"), epochs=epochs)
    assert settings.gamma == pytest.approx(gamma, abs=1e-3)
    assert settings.gamma_decay_epochs == length
    assert settings.gamma_at(0) == 1
    assert settings.gamma_at(length) == settings.gamma


@pytest.mark.parametrize(
    ("name", "options", "epochs"),
    [
        ("fastclip-v3", {"gamma_schedule": "constant"}, 20),
        ("sogclr", {}, 20),
        ("scent", {}, 20),
        ("fastclip-v3", {}, None),
    ],
)
def test_gamma_by_rule_needs_a_cosine_and_the_epochs(name, options, epochs):
    with pytest.raises(OptionError) as caught:
        resolve(name, LossOptions(gamma="auto", **options), epochs=epochs)
    assert (caught.value.option, caught.value.value) == ("gamma", "auto")
    assert name != "scent" or "gamma_schedule" not in caught.value.advice


@pytest.mark.parametrize("epochs", [0, -3, inf, NAN])
def test_impossible_epochs_are_refused(epochs):
    with pytest.raises(OptionError) as caught:
        resolve("fastclip-v3", LossOptions(gamma="auto"), epochs=epochs)
    assert caught.value.option == "epochs"


def test_the_released_estimator_takes_a_share_that_was_given():
    settings = resolve("fastclip-v3", LossOptions(estimator="released", rho_share=0.3), batch=64)
    assert settings.rho == pytest.approx(0.3 * log(63))


def test_without_a_radius_rho_is_zero():
    assert {resolve(name).rho for name, row in ALGORITHMS.items() if not row.robust} == {0.0}


def test_rho_and_rho_share_exclude_each_other():
    with pytest.raises(OptionError) as caught:
        resolve("fastclip-v3", LossOptions(rho=6.5, rho_share=0.6), batch=64)
    assert (caught.value.option, caught.value.value) == ("rho", 6.5)
    assert "rho_share=0.6" in caught.value.rule


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("mbcl", "gamma", 0.5),
        ("mbcl", "gamma_schedule", "cosine"),
        ("mbcl", "epsilon", 1e-6),
        ("sogclr", "gamma_decay_epochs", 3),
        ("fastclip-v1", "tau_lr", 1e-3),
        ("fastclip-v1", "rho", 6.5),
        ("fastclip-v0", "rho", 6.5),
        ("fastclip-v3", "tau_betas", (0.9, 0.99)),
    ],
)
def test_an_option_without_effect_is_refused(name, option, value):
    with pytest.raises(OptionError) as caught:
        resolve(name, LossOptions(**{option: value}))
    assert (caught.value.option, caught.value.value) == (option, value)
    assert name in caught.value.rule


def test_tile_mib_is_written_only_if_it_was_given():
    for options, expected in ((LossOptions(), None), (LossOptions(tile_mib=64), 64)):
        settings = resolve("fastclip-v3", options)
        assert settings.tile_mib == (expected or 256)
        assert written_options(settings, options).tile_mib == expected
