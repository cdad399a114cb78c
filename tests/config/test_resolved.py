"""Rows and options become settings; options without effect are refused; a resumed run is the same run."""

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
    PatchDropout,
    TrainConfig,
    as_dict,
)
from fastclip.config.parse import parse, recipe_names
from fastclip.config.resolved import Difference, as_continued, differences, resolve, resolve_again
from fastclip.errors import OptionError
from fastclip.objective.algorithms import ALGORITHMS, RHO_SHARE

recipe = cache(lambda name: parse(["--config", name]))


def scenes(**changed):
    return replace(recipe("scenes"), **changed)


def loss_row(whole):
    """The written values of the chosen algorithm."""
    return whole.written["algorithms"][whole.algorithm]


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_recipe_resolves_with_every_algorithm_and_optimizer(name, algorithm):
    for optimizer in OPTIMIZERS:
        config = replace(recipe(name), algorithm=algorithm, optimizer=optimizer)
        whole = resolve(config)
        assert resolve_again(json.loads(json.dumps(whole.written))) == whole  # complete
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
    assert (s.tau, s.tau_lr, s.gamma, s.gamma_decay_epochs) == (0.07, 2e-4, 0.2, 15)
    assert s.rho == RHO_SHARE * log(whole.batch.size - 1)
    assert loss_row(whole)["rho_share"] == RHO_SHARE  # written, so that a later default changes nothing
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
    ("algorithm", "loss"),
    [
        ("fastclip-v1", {"rho": 3.0}),
        ("fastclip-v1", {"tau_lr": 1e-3}),
        ("fastclip-v0", {"rho": 3.0}),
        ("fastclip-v3", {"tau_betas": (0.9, 0.9)}),
        ("sogclr", {"rho_share": 0.5}),
        ("sogclr", {"gamma_decay_epochs": 3}),
        ("mbcl", {"gamma": 0.5}),
        ("mbcl", {"gamma_schedule": "cosine"}),
        ("mbcl", {"epsilon": 1e-14}),
        ("mbcl", {"epsilon": 1e-6}),
        ("openclip", {"gamma": 0.2}),
        ("openclip", {"tau_lr": 1e-3}),
        ("openclip", {"wire_dtype": "float16"}),
        ("openclip", {"epsilon": 1e-14}),
        ("siglip", {"tau_min": 0.02}),
        ("siglip", {"tile_mib": 64}),
        ("siglip", {"estimator": "paper"}),
        ("fastclip-v2", {"estimator": "released"}),
    ],
)
def test_an_option_without_effect_on_the_algorithm_is_refused(algorithm, loss):
    with pytest.raises(OptionError) as caught:
        resolve(scenes(algorithm=algorithm, loss=LossOptions(**loss)))
    ((option, value),) = loss.items()
    assert (caught.value.option, caught.value.value) == (f"loss.{option}", value)
    assert algorithm in caught.value.rule


@pytest.mark.parametrize(
    ("optimizer", "optim", "others"),
    [
        ("sgd", {"betas": (0.9, 0.98)}, "adamw, lamb, lion"),
        ("sgd", {"eps": 1e-8}, "adamw, lamb"),
        ("lion", {"eps": 1e-8}, "adamw, lamb"),
        ("lion", {"momentum": 0.9}, "sgd"),
        ("adamw", {"momentum": 0.9}, "sgd"),
        ("lamb", {"momentum": 0.9}, "sgd"),
    ],
)
def test_an_option_without_effect_on_the_optimizer_is_refused(optimizer, optim, others):
    with pytest.raises(OptionError) as caught:
        resolve(scenes(optimizer=optimizer, optim=OptimOptions(**optim)))
    ((option, value),) = optim.items()
    assert (caught.value.option, caught.value.value) == (f"optim.{option}", value)
    assert optimizer in caught.value.rule
    assert caught.value.rule.endswith(others)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gamma", 2.0),
        ("tau", 2.0),
        ("rho", -1.0),
        ("tau_lr", -1.0),
        ("gamma_decay_epochs", 0),
        ("epsilon", -1.0),
    ],
)
def test_a_loss_value_out_of_range_is_named_with_its_section(option, value):
    with pytest.raises(OptionError) as caught:
        resolve(scenes(loss=LossOptions(**{option: value})))
    assert (caught.value.option, caught.value.value) == (f"loss.{option}", value)


@pytest.mark.parametrize("algorithm", ["isogclr", "fastclip-v2", "fastclip-v3"])
def test_rho_share_is_a_share_of_the_batch_and_follows_it(algorithm):
    for size in (64, 128, 2048):
        config = scenes(algorithm=algorithm, batch=BatchConfig(size=size), loss=LossOptions(rho_share=0.5))
        assert resolve(config).loss.rho == pytest.approx(0.5 * log(size - 1), rel=1e-15)
    whole = resolve(scenes(algorithm=algorithm))  # by rule
    assert "rho" not in loss_row(whole)
    assert loss_row(whole)["rho_share"] == RHO_SHARE
    later = resolve_again(whole.written | {"batch": {"size": 16}})
    assert later.loss.rho == pytest.approx(RHO_SHARE * log(15))


@pytest.mark.parametrize("name", ["cc3m-medium", "cc12m-large", "laion-xlarge", "emoji"])
def test_gamma_by_rule_has_a_length_of_its_own_in_every_recipe_and_in_config_yaml(name):
    whole = resolve(replace(recipe(name), epochs=24, loss=LossOptions(gamma="auto")))
    assert (whole.loss.gamma_decay_epochs, round(whole.loss.gamma, 2)) == (24, 0.42)
    assert "gamma_decay_epochs" not in loss_row(whole)
    longer = resolve_again(whole.written | {"epochs": 40})
    assert (longer.loss.gamma_decay_epochs, round(longer.loss.gamma, 2)) == (40, 0.29)


def test_rho_wins_over_the_rows_rho_share_and_rho_share_over_the_rows_rho():
    whole = resolve(scenes(loss=LossOptions(rho=3.0)))
    assert loss_row(whole)["rho"] == whole.loss.rho == 3.0
    assert "rho_share" not in loss_row(whole)
    whole = resolve(replace(recipe("cc3m-medium"), loss=LossOptions(rho_share=0.5)))
    assert "rho" not in loss_row(whole)
    assert whole.loss.rho == pytest.approx(0.5 * log(1023))


@pytest.mark.parametrize(("epochs", "half"), [(20, 10), (8, 4), (1, 1), (0.5, 1), (33, 16)])
def test_the_cosine_of_gamma_takes_half_of_the_epochs_by_default(epochs, half):
    whole = resolve(scenes(epochs=epochs))
    assert whole.loss.gamma_decay_epochs == loss_row(whole)["gamma_decay_epochs"] == half
    given = scenes(epochs=epochs, loss=LossOptions(gamma_decay_epochs=7))
    assert resolve(given).loss.gamma_decay_epochs == 7


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
    """The config as a checkpoint stores it."""
    return resolve_again(json.loads(json.dumps(resolve(config).written)))


def test_the_same_config_has_no_differences():
    for name in recipe_names():
        for algorithm in ALGORITHMS:
            config = replace(recipe(name), algorithm=algorithm)
            assert differences(saved(config), resolve(config)) == []


def test_options_that_affect_no_number_may_change():
    before = scenes()
    after = scenes(
        out="runs/moved",
        resume="never",
        timeout=60,
        log=replace(before.log, every_steps=1, tensorboard=True, wandb="clip"),
        checkpoint=replace(before.checkpoint, every_minutes=1.0, every_steps=5, keep=9),
        evaluate=replace(
            before.evaluate, pairs="other.tar", tasks="tasks", every_epochs=3.0, best="image_to_text_recall@1"
        ),
        data=replace(
            before.data,
            train="/elsewhere",
            workers=7,
            keep_decoded=False,
            max_bad=0.5,
            timeout=9,
            formats=["avif"],
        ),
        batch=replace(before.batch, micro=16),
        model=replace(before.model, compile=True, gradient_checkpointing=True),
        algorithms={**before.algorithms, "fastclip-v1": LossOptions(tau=0.5)},  # not the chosen row
        optimizers={"adamw": before.optimizers["adamw"]},
    )
    assert differences(saved(before), resolve(after)) == []
    assert differences(saved(after), resolve(before)) == []
    auto = replace(after, batch=replace(before.batch, micro="auto"))
    assert differences(saved(auto), resolve(before)) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"epochs": 40.0}, [("epochs", 5.0, 40.0), ("loss.gamma_decay_epochs", 2, 20)]),
        ({"batch": BatchConfig(size=128, reference=64)}, [("batch.size", 64, 128)]),
        ({"batch": BatchConfig(size=64)}, [("batch.reference", 64, None)]),
        ({"algorithm": "fastclip-v1"}, [("algorithm", "fastclip-v3", "fastclip-v1")]),
        ({"optimizer": "sgd"}, [("optimizer", "adamw", "sgd")]),
        ({"optim": OptimOptions(lr=2e-3)}, [("optim.lr", 1e-3, 2e-3)]),
        ({"optim": OptimOptions(clip=1.0)}, [("optim.clip", None, 1.0)]),
        ({"loss": LossOptions(tau=0.05)}, [("loss.tau", 0.1, 0.05)]),
        ({"loss": LossOptions(rho=2.0)}, [("loss.rho", None, 2.0), ("loss.rho_share", RHO_SHARE, None)]),
        ({"model": ModelConfig(name="vit-emoji")}, [("model.name", "vit-scenes", "vit-emoji")]),
        ({"model": ModelConfig(name="vit-scenes", freeze="image")}, [("model.freeze", "none", "image")]),
        (
            {"model": ModelConfig(name="vit-scenes", patch_dropout=PatchDropout(0.5, until=0.9))},
            [("model.patch_dropout.share", 0.0, 0.5), ("model.patch_dropout.until", 1.0, 0.9)],
        ),
        ({"model": ModelConfig(name="vit-scenes", ema=0.99)}, [("model.ema", None, 0.99)]),
        ({"seed": 1}, [("seed", 0, 1)]),
        ({"precision": "bfloat16"}, [("precision", "float32", "bfloat16")]),
    ],
)
def test_every_difference_that_affects_numbers_is_named(changed, expected):
    assert differences(saved(scenes()), resolve(scenes(**changed))) == expected


def scheduled(schedule, **changed):
    return scenes(optim=OptimOptions(schedule=schedule), **changed)


@pytest.mark.parametrize("before", ["constant", "wsd"])
@pytest.mark.parametrize("after", ["constant", "wsd"])
def test_a_constant_or_wsd_run_may_resume_with_other_epochs_and_keeps_its_derived_values(before, after):
    loss = LossOptions(gamma="auto")
    first = saved(scheduled(before, loss=loss))
    longer = resolve(scheduled(after, epochs=40.0, loss=loss))
    assert differences(first, longer) == []
    continued = as_continued(longer, first)
    assert (continued.epochs, continued.planned_epochs) == (40.0, 5.0)
    assert continued.loss == first.loss != longer.loss
    again = resolve_again(json.loads(json.dumps(continued.written)))
    assert again == continued
    assert differences(again, longer) == differences(first, continued) == []
    assert as_continued(longer, again) == continued
    planned = scheduled(after, epochs=40.0, planned_epochs=6.0, loss=loss)
    assert differences(first, resolve(planned)) == [("planned_epochs", 5.0, 6.0)]


def test_a_run_of_the_same_length_is_continued_as_it_is():
    config = resolve(scheduled("constant"))
    assert as_continued(config, saved(scheduled("constant"))) is config
    assert "planned_epochs" not in config.written


@pytest.mark.parametrize(("before", "after"), [("cosine", "wsd"), ("constant", "cosine"), (None, "constant")])
def test_a_cosine_is_another_run(before, after):
    differ = differences(saved(scheduled(before)), resolve(scheduled(after, epochs=40.0)))
    assert differ[0] == ("epochs", 5.0, 40.0)
    assert ("optim.schedule", before or "cosine", after) in differ


def test_runs_before_schedules_had_names_are_cosines():
    written = resolve(scenes()).written
    assert written["optimizers"]["adamw"].pop("schedule") == "cosine"
    assert differences(resolve_again(written), resolve(scheduled("cosine"))) == []


def test_the_decay_of_wsd_is_a_fifth_and_written():
    whole = resolve(scheduled("wsd"))
    assert whole.optim.decay_share == whole.written["optimizers"]["adamw"]["decay_share"] == 0.2
    given = resolve(scenes(optim=OptimOptions(schedule="wsd", decay_share=0.1, min_lr=1e-5)))
    assert (given.optim.schedule, given.optim.decay_share, given.optim.min_lr) == ("wsd", 0.1, 1e-5)


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ("optim.decay_share", {"optim": OptimOptions(decay_share=0.1)}),
        ("optim.decay_share", {"optim": OptimOptions(schedule="constant", decay_share=0.1)}),
        ("optim.min_lr", {"optim": OptimOptions(schedule="constant", min_lr=1e-5)}),
        ("planned_epochs", {"planned_epochs": 3.0}),
    ],
)
def test_an_option_without_effect_on_the_schedule_is_refused(option, changed):
    with pytest.raises(OptionError) as caught:
        resolve(scenes(**changed))
    assert caught.value.option == option
    assert "wsd" in caught.value.rule


def test_a_difference_reads_as_the_saved_value_and_the_new_one():
    clip, epochs = Difference("optim.clip", None, 1.0), Difference("epochs", 30, 40)
    assert str(epochs) == "epochs: 30 in the run, 40 now"
    assert str(clip) == "optim.clip: not set in the run, 1.0 now"


def test_the_encoding_belongs_to_the_run_and_is_utf_8_in_runs_before_the_option():
    """A fingerprint covers a tar's captions as bytes: how they are read must be compared as well."""
    data = replace(recipe("scenes").data, encoding="latin-1")
    assert differences(saved(scenes()), resolve(scenes(data=data))) == [("data.encoding", "utf-8", "latin-1")]
    written = as_dict(scenes())
    del written["data"]["encoding"]
    assert differences(resolve_again(written), resolve(scenes())) == []


def test_augmentation_and_order_belong_to_the_run():
    data = replace(recipe("scenes").data, augment={"scale": [0.5, 1.0]}, shuffle="blocks", decoder="exact")
    assert differences(saved(scenes()), resolve(scenes(data=data))) == [
        ("data.augment.scale", [0.8, 1.0], [0.5, 1.0]),
        ("data.decoder", "fast", "exact"),
        ("data.shuffle", "full", "blocks"),
    ]


@pytest.mark.parametrize(
    "broken", [{"algorithms": None}, {"batch": {"size": "64"}}, {"optim": {"betas": None}}]
)
def test_damaged_settings_raise_a_value_error(broken):
    with pytest.raises(ValueError):  # noqa: PT011
        resolve_again(resolve(scenes()).written | broken)
