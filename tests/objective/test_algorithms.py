"""The table of algorithms and how options change a row."""

import pytest

from fastclip import ALGORITHMS
from fastclip.objective.algorithms import LossOptions, resolve


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


def test_defaults_are_the_papers_medium_setting():
    v3, v2, sogclr = resolve("fastclip-v3"), resolve("fastclip-v2"), resolve("sogclr")
    assert (v3.gamma, v3.gamma_decay_epochs, v3.tau, v3.tau_lr, v3.rho) == (0.2, 18, 0.07, 2e-4, 6.5)
    assert (v2.gamma, v2.tau, v2.tau_lr, v2.rho) == (0.2, 0.03, 1e-2, 7.0)
    assert (sogclr.gamma, sogclr.tau, sogclr.epsilon) == (0.6, 0.03, 1e-14)


def test_v3_with_a_constant_gamma_is_one_option_away():
    settings = resolve("fastclip-v3", LossOptions(gamma_schedule="constant"))
    assert settings.gamma == 0.6  # the paper's "v3 (Const. γ)"
    assert {settings.gamma_at(epoch) for epoch in range(40)} == {0.6}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fastclip", {}, "Did you mean fastclip-v"),
        ("fastclip-v3", {"gamma": 0.0}, r"gamma=0.0 is outside \(0, 1\]"),
        ("fastclip-v3", {"gamma": 1.2}, r"gamma=1.2 is outside \(0, 1\]"),
        ("fastclip-v3", {"gamma_schedule": "linear"}, "Choose 'constant' or 'cosine'"),
        ("fastclip-v3", {"gamma_decay_epochs": 0}, "at least 1"),
        ("fastclip-v3", {"tau": 0.005}, "0 < tau_min ≤ tau"),
        ("fastclip-v3", {"tau": 2.0}, "≤ 1.0"),
        ("fastclip-v3", {"rho": -1.0}, "rho=-1.0 must be finite"),
        ("fastclip-v3", {"tau_lr": float("nan")}, "tau_lr=nan must be finite"),
        ("fastclip-v3", {"epsilon": -1e-3}, "epsilon=-0.001"),
        ("fastclip-v3", {"estimator": "own"}, "Choose 'paper' or 'released'"),
        ("fastclip-v2", {"tau_betas": (0.9, 1.0)}, "two numbers in"),
        ("fastclip-v2", {"estimator": "released"}, "not defined for fastclip-v2"),
        ("mbcl", {"estimator": "released"}, "not defined for mbcl"),
        ("fastclip-v3", {"rho": 6.5, "rho_share": 0.6}, "rho=6.5 says the same thing as rho_share=0.6"),
        ("fastclip-v3", {"rho_share": -0.1}, "rho_share=-0.1 must be finite"),
        ("fastclip-v3", {"rho_share": float("nan")}, "rho_share=nan must be finite"),
        ("fastclip-v3", {"rho_share": 0.5}, "rho_share=0.5 needs the global batch"),
        ("fastclip-v3", {"tile_mib": 0}, "tile_mib=0 must be at least 1"),
    ],
)
def test_a_wrong_value_is_named_with_one_that_works(name, options, message):
    with pytest.raises(ValueError, match=message):
        resolve(name, LossOptions(**options))


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
def test_an_option_without_effect_is_an_error(name, option, value):
    with pytest.raises(ValueError, match=f"{option}=.* has no effect with {name}"):
        resolve(name, LossOptions(**{option: value}))
