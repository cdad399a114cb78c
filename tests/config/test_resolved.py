"""A config's rows become a run's values; what has no effect is refused; a resumed run is the same run."""

import json
from dataclasses import replace
from functools import cache
from math import log

import pytest

from fastclip.config.optimizers import OPTIMIZERS
from fastclip.config.options import (
    BatchConfig,
    LossOptions,
    ModelConfig,
    OptimOptions,
    TrainConfig,
    as_dict,
)
from fastclip.config.parse import parse, recipe_names
from fastclip.config.resolved import differences, resolve, resolve_again
from fastclip.objective.algorithms import ALGORITHMS

recipe = cache(lambda name: parse(["--config", name]))


def scenes(**changed):
    return replace(recipe("scenes"), **changed)


def loss_row(whole):
    """What is written down of the chosen algorithm."""
    return whole.written["algorithms"][whole.algorithm]


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_recipe_resolves_with_every_algorithm_and_optimizer(name, algorithm):
    for optimizer in OPTIMIZERS:
        config = replace(recipe(name), algorithm=algorithm, optimizer=optimizer)
        whole = resolve(config)
        assert resolve_again(json.loads(json.dumps(whole.written))) == whole  # written down whole
        assert "loss" not in whole.written
        assert "optim" not in whole.written
        assert ("betas" in whole.optim.options) == (optimizer != "sgd")
        assert whole.written["optimizers"][optimizer]["lr"] * config.scale == whole.optim.lr


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_other_rows_stay_as_they_were(algorithm):
    before, after = recipe("cc12m-large"), resolve(replace(recipe("cc12m-large"), algorithm=algorithm))
    others = {name: row for name, row in as_dict(before)["algorithms"].items() if name != algorithm}
    assert {name: after.written["algorithms"][name] for name in others} == others


def test_without_a_recipe_the_rows_are_fastclips_own():
    whole = resolve(TrainConfig())
    s = whole.loss
    assert (s.tau, s.tau_lr, s.rho, s.gamma, s.gamma_decay_epochs) == (0.07, 2e-4, 6.5, 0.2, 15)
    assert whole.optim.lr == 4e-4


def test_options_win_over_the_recipes_row_and_the_row_over_fastclips_own():
    loss, optim = LossOptions(tau=0.05, epsilon=1e-8), OptimOptions(lr=5e-4, clip=1.0)
    whole = resolve(scenes(loss=loss, optim=optim))
    s = whole.loss
    assert (s.tau, s.epsilon) == (0.05, 1e-8)  # the options'
    assert (s.tau_lr, s.gamma) == (1e-3, 0.2)  # the row's
    assert s.tau_min == 0.01  # fastclip's
    assert (whole.optim.lr, whole.optim.clip) == (5e-4, 1.0)
    assert whole.optim.options["betas"] == (0.9, 0.98)


@pytest.mark.parametrize(
    ("algorithm", "loss", "message"),
    [
        ("fastclip-v1", {"rho": 3.0}, "loss.rho=3.0 has no effect with fastclip-v1: its loss has no ρ"),
        ("fastclip-v1", {"tau_lr": 1e-3}, "loss.tau_lr=0.001 has no effect with fastclip-v1: its τ"),
        ("fastclip-v0", {"rho": 3.0}, "loss.rho=3.0 has no effect with fastclip-v0"),
        ("fastclip-v3", {"tau_betas": (0.9, 0.9)}, "loss.tau_betas=.* has no effect with fastclip-v3"),
        ("sogclr", {"rho_share": 0.5}, "loss.rho_share=0.5 has no effect with sogclr"),
        ("sogclr", {"gamma_decay_epochs": 3}, "loss.gamma_decay_epochs=3 has no effect with sogclr"),
        ("mbcl", {"gamma": 0.5}, "loss.gamma=0.5 has no effect with mbcl"),
        ("mbcl", {"gamma_schedule": "cosine"}, "loss.gamma_schedule='cosine' has no effect with mbcl"),
        ("mbcl", {"epsilon": 1e-14}, "loss.epsilon=1e-14 has no effect with mbcl"),
        ("mbcl", {"epsilon": 1e-6}, "loss.epsilon=1e-06 has no effect with mbcl"),
        ("openclip", {"gamma": 0.2}, "loss.gamma=0.2 has no effect with openclip: it is open_clip's own"),
        ("openclip", {"tau_lr": 1e-3}, "loss.tau_lr=0.001 has no effect with openclip"),
        ("openclip", {"wire_dtype": "float16"}, "loss.wire_dtype='float16' has no effect with openclip"),
        ("openclip", {"epsilon": 1e-14}, "loss.epsilon=1e-14 has no effect with openclip"),
        ("siglip", {"tau_min": 0.02}, "loss.tau_min=0.02 has no effect with siglip"),
        ("siglip", {"tile_mib": 64}, "loss.tile_mib=64 has no effect with siglip"),
        ("siglip", {"estimator": "paper"}, "loss.estimator='paper' has no effect with siglip"),
        ("fastclip-v2", {"estimator": "released"}, "loss.estimator='released' is not defined"),
    ],
)  # fmt: skip
def test_an_option_without_effect_on_the_algorithm_is_an_error(algorithm, loss, message):
    with pytest.raises(ValueError, match=message) as error:
        resolve(scenes(algorithm=algorithm, loss=LossOptions(**loss)))
    assert str(error.value).endswith("Leave it out.")


@pytest.mark.parametrize(
    ("optimizer", "optim", "message"),
    [
        ("sgd", {"betas": (0.9, 0.98)}, r"optim.betas=\(0.9, 0.98\) has no effect with sgd, only with adamw"),
        ("sgd", {"eps": 1e-8}, "optim.eps=1e-08 has no effect with sgd, only with adamw, lamb"),
        ("lion", {"eps": 1e-8}, "optim.eps=1e-08 has no effect with lion"),
        ("lion", {"momentum": 0.9}, "optim.momentum=0.9 has no effect with lion, only with sgd"),
        ("adamw", {"momentum": 0.9}, "optim.momentum=0.9 has no effect with adamw, only with sgd"),
        ("lamb", {"momentum": 0.9}, "optim.momentum=0.9 has no effect with lamb"),
    ],
)
def test_an_option_without_effect_on_the_optimizer_is_an_error(optimizer, optim, message):
    with pytest.raises(ValueError, match=message):
        resolve(scenes(optimizer=optimizer, optim=OptimOptions(**optim)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"gamma": 2.0}, r"loss.gamma=2.0 is outside \(0, 1\]"),
        ({"tau": 2.0}, "loss.tau=2.0 and tau_min=0.01 must satisfy"),
        ({"rho": -1.0}, "loss.rho=-1.0 must be"),
        ({"tau_lr": -1.0}, "loss.tau_lr=-1.0 must be"),
        ({"gamma_decay_epochs": 0}, "loss.gamma_decay_epochs=0 must be at least 1"),
        ({"epsilon": -1.0}, "loss.epsilon=-1.0 must be"),
    ],
)
def test_a_loss_value_out_of_range_is_named_with_its_section(loss, message):
    with pytest.raises(ValueError, match=message):
        resolve(scenes(loss=LossOptions(**loss)))


@pytest.mark.parametrize("algorithm", ["isogclr", "fastclip-v2", "fastclip-v3"])
def test_rho_share_is_a_share_of_the_batch_and_follows_it(algorithm):
    for size in (64, 128, 2048):
        config = scenes(algorithm=algorithm, batch=BatchConfig(size=size), loss=LossOptions(rho_share=0.5))
        assert resolve(config).loss.rho == pytest.approx(0.5 * log(size - 1), rel=1e-15)
    whole = resolve(scenes(algorithm=algorithm))  # 0.6 in the recipe
    assert "rho" not in loss_row(whole)
    assert loss_row(whole)["rho_share"] == 0.6
    later = resolve_again(whole.written | {"batch": {"size": 16}})
    assert later.loss.rho == pytest.approx(0.6 * log(15))


def test_rho_wins_over_the_rows_rho_share_and_rho_share_over_the_rows_rho():
    whole = resolve(scenes(loss=LossOptions(rho=3.0)))
    assert loss_row(whole)["rho"] == whole.loss.rho == 3.0
    assert "rho_share" not in loss_row(whole)
    whole = resolve(replace(recipe("cc3m-medium"), loss=LossOptions(rho_share=0.5)))
    assert "rho" not in loss_row(whole)
    assert whole.loss.rho == pytest.approx(0.5 * log(1023))


@pytest.mark.parametrize(("epochs", "half"), [(20, 10), (8, 4), (1, 1), (0.5, 1), (33, 16)])
def test_the_cosine_of_gamma_takes_half_of_the_epochs_unless_told(epochs, half):
    whole = resolve(scenes(epochs=epochs))
    assert whole.loss.gamma_decay_epochs == loss_row(whole)["gamma_decay_epochs"] == half
    told = scenes(epochs=epochs, loss=LossOptions(gamma_decay_epochs=7))
    assert resolve(told).loss.gamma_decay_epochs == 7


def test_a_changed_schedule_of_gamma_takes_its_own_default():
    whole = resolve(TrainConfig(loss=LossOptions(gamma_schedule="constant")))
    assert loss_row(whole)["gamma"] == 0.6
    assert "gamma_decay_epochs" not in loss_row(whole)


def test_a_rate_of_zero_keeps_the_temperature_where_it_is():
    whole = resolve(scenes(loss=LossOptions(tau_lr=0.0)))
    assert whole.loss.tau_lr == loss_row(whole)["tau_lr"] == 0


def test_the_rate_of_tau_scales_with_the_batch_and_is_written_unscaled():
    config = replace(recipe("cc3m-medium"), batch=BatchConfig(size=4096, reference=1024))
    whole = resolve(config)
    assert loss_row(whole)["tau_lr"] == 2e-4
    assert whole.loss.tau_lr == pytest.approx(4 * 2e-4)
    alone = replace(TrainConfig(), batch=BatchConfig(size=2048, reference=1024))  # fastclip's own row
    assert loss_row(resolve(alone))["tau_lr"] == 2e-4
    assert resolve(alone).loss.tau_lr == pytest.approx(4e-4)


def saved(config):
    """What a checkpoint holds of a config."""
    return resolve_again(json.loads(json.dumps(resolve(config).written)))


def test_the_same_config_has_no_differences():
    for name in recipe_names():
        for algorithm in ALGORITHMS:
            config = replace(recipe(name), algorithm=algorithm)
            assert differences(saved(config), resolve(config)) == []


def test_what_moves_no_number_may_change():
    before = scenes()
    after = scenes(
        out="runs/moved",
        resume="never",
        timeout=60,
        log=replace(before.log, every=1, tensorboard=True, wandb="clip"),
        checkpoint=replace(before.checkpoint, minutes=1.0, steps=5, keep=9),
        evaluate=replace(
            before.evaluate, pairs="other.tar", tasks="tasks", every=3.0, best="image_to_text_recall@1"
        ),
        data=replace(before.data, train="/elsewhere", workers=7, keep_decoded=False, max_bad=0.5, timeout=9),
        batch=replace(before.batch, micro=16),
        model=replace(before.model, compile=True, gradient_checkpointing=True),
        algorithms={**before.algorithms, "fastclip-v1": LossOptions(tau=0.5)},  # not the chosen row
        optimizers={"adamw": before.optimizers["adamw"]},
    )
    assert differences(saved(before), resolve(after)) == []
    assert differences(saved(after), resolve(before)) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epochs": 40.0}, ["epochs: 5.0 there, 40.0 here", "loss.gamma_decay_epochs: 2 there, 20 here"]),
        ({"batch": BatchConfig(size=128, reference=64)}, ["batch.size: 64 there, 128 here"]),
        ({"batch": BatchConfig(size=64)}, ["batch.reference: 64 there, not set here"]),
        ({"algorithm": "fastclip-v1"}, ["algorithm: 'fastclip-v3' there, 'fastclip-v1' here"]),
        ({"optimizer": "sgd"}, ["optimizer: 'adamw' there, 'sgd' here"]),
        ({"optim": OptimOptions(lr=2e-3)}, ["optim.lr: 0.001 there, 0.002 here"]),
        ({"optim": OptimOptions(clip=1.0)}, ["optim.clip: not set there, 1.0 here"]),
        ({"loss": LossOptions(tau=0.05)}, ["loss.tau: 0.1 there, 0.05 here"]),
        ({"loss": LossOptions(rho=2.0)},
         ["loss.rho: not set there, 2.0 here", "loss.rho_share: 0.6 there, not set here"]),
        ({"model": ModelConfig(name="vit-emoji")}, ["model.name: 'vit-scenes' there, 'vit-emoji' here"]),
        ({"model": ModelConfig(name="vit-scenes", freeze="image")},
         ["model.freeze: 'none' there, 'image' here"]),
        ({"seed": 1}, ["seed: 0 there, 1 here"]),
        ({"precision": "bfloat16"}, ["precision: 'float32' there, 'bfloat16' here"]),
    ],
)  # fmt: skip
def test_what_differs_is_said_in_words(changed, message):
    assert differences(saved(scenes()), resolve(scenes(**changed))) == message


def test_augmentation_and_order_belong_to_the_run():
    data = replace(recipe("scenes").data, augment={"scale": [0.5, 1.0]}, shuffle="blocks", decoder="exact")
    assert differences(saved(scenes()), resolve(scenes(data=data))) == [
        "data.augment.scale: [0.8, 1.0] there, [0.5, 1.0] here",
        "data.decoder: 'fast' there, 'exact' here",
        "data.shuffle: 'full' there, 'blocks' here",
    ]


@pytest.mark.parametrize(
    "broken", [{"algorithms": None}, {"batch": {"size": "64"}}, {"optim": {"betas": None}}]
)
def test_settings_that_were_damaged_are_a_value_error(broken):
    with pytest.raises(ValueError, match=r"wrong kind|holds"):
        resolve_again(resolve(scenes()).written | broken)
