"""Options out of range are refused by their full name; config.yaml holds plain values."""

import json
from math import inf, isnan, nan

import pytest

from fastclip.config.options import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    LossOptions,
    ModelConfig,
    OptimOptions,
    PatchDropout,
    TrainConfig,
    as_dict,
    from_dict,
    split_formats,
)
from fastclip.errors import OptionError

WRONG = [
    (BatchConfig, "batch.size", 1),
    (BatchConfig, "batch.micro", 0),
    (BatchConfig, "batch.micro", "often"),
    (BatchConfig, "batch.reference", 0),
    (DataConfig, "data.workers", -1),
    (DataConfig, "data.workers", "many"),
    (DataConfig, "data.window", 0),
    (DataConfig, "data.max_bad", 1.0),
    (DataConfig, "data.timeout", inf),
    (DataConfig, "data.timeout", nan),
    (OptimOptions, "optim.lr", -1.0),
    (OptimOptions, "optim.lr", nan),
    (OptimOptions, "optim.weight_decay", -0.1),
    (OptimOptions, "optim.betas", (0.9, 1.0)),
    (OptimOptions, "optim.eps", 0.0),
    (OptimOptions, "optim.momentum", 1.0),
    (OptimOptions, "optim.warmup", -1),
    (OptimOptions, "optim.min_lr", -1e-9),
    (OptimOptions, "optim.decay_share", 0.0),
    (OptimOptions, "optim.decay_share", 1.0),
    (ModelConfig, "model.ema", 0.0),
    (ModelConfig, "model.ema", 1.0),
    (OptimOptions, "optim.clip", 0.0),
    (PatchDropout, "model.patch_dropout.share", 1.0),
    (PatchDropout, "model.patch_dropout.share", -0.1),
    (PatchDropout, "model.patch_dropout.share", nan),
    (PatchDropout, "model.patch_dropout.until", 0.0),
    (PatchDropout, "model.patch_dropout.until", 1.1),
    (EvaluateConfig, "evaluate.every_epochs", 0.0),
    (CheckpointConfig, "checkpoint.every_minutes", 0.0),
    (CheckpointConfig, "checkpoint.every_steps", 0),
    (CheckpointConfig, "checkpoint.keep", 0),
    (LogConfig, "log.every_steps", 0),
    (TrainConfig, "epochs", 0.0),
    (TrainConfig, "epochs", inf),
    (TrainConfig, "planned_epochs", 0.0),
    (TrainConfig, "seed", -1),
    (TrainConfig, "timeout", 0.0),
]


@pytest.mark.parametrize(("section", "option", "value"), WRONG)
def test_a_value_out_of_range_is_refused_with_an_example_that_works(section, option, value):
    field = option.rpartition(".")[2]
    with pytest.raises(OptionError) as caught:
        section(**{field: value})
    error = caught.value
    assert error.option == option
    assert error.value == value or (isnan(value) and isnan(error.value))
    assert error.rule.startswith("must be ")
    example = error.example
    section(**{field: json.loads(example) if isinstance(example, str) else example})


@pytest.mark.parametrize(
    ("field", "value", "option", "name", "nearest"),
    [
        ("algorithm", "fastclip-v4", "algorithm", "fastclip-v4", "fastclip-v"),
        ("algorithms", {"sogclip": LossOptions()}, "algorithm", "sogclip", "sogclr"),
        ("optimizer", "adam", "optimizer", "adam", "adamw"),
        ("optimizers", {"adamv": OptimOptions()}, "optimizer", "adamv", "adamw"),
    ],
)
def test_an_unknown_name_gets_the_nearest_suggested(field, value, option, name, nearest):
    with pytest.raises(OptionError) as caught:
        TrainConfig(**{field: value})
    assert (caught.value.option, caught.value.value) == (option, name)
    assert nearest in caught.value.advice


@pytest.mark.parametrize(
    ("name", "nearest"), [("latin-l", "latin-1"), ("cp-1252", "cp1252"), ("base64", ""), ("", "")]
)
def test_an_unknown_encoding_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(OptionError) as caught:
        DataConfig(encoding=name)
    assert (caught.value.option, caught.value.value) == ("data.encoding", name)
    assert nearest in caught.value.advice
    DataConfig(encoding=caught.value.example)


@pytest.mark.parametrize("name", ["utf-8", "UTF8", "Latin1", "cp1252", "utf-16", "gb18030"])
def test_a_text_encoding_has_any_name_that_python_knows(name):
    assert DataConfig(encoding=name).encoding == name


@pytest.mark.parametrize(
    ("names", "formats"),
    [
        (None, ()),
        ([], ()),
        ("avif", ("avif",)),
        ("AVIF, ppm,avif", ("avif", "ppm")),
        (["jpeg2000"], ("jpeg2000",)),
    ],
)
def test_further_image_formats_are_a_list_or_separated_by_commas(names, formats):
    assert split_formats("data.formats", DataConfig(formats=names).formats) == formats


@pytest.mark.parametrize(("names", "name"), [("avi", "avi"), ("", ""), (["ppm", "eps"], "eps")])
def test_an_unknown_image_format_is_refused(names, name):
    with pytest.raises(OptionError) as caught:
        DataConfig(formats=names)
    assert (caught.value.option, caught.value.value) == ("data.formats", name)
    assert "avif" in str(caught.value)


def test_an_unknown_schedule_is_refused_with_those_that_exist():
    with pytest.raises(OptionError) as caught:
        OptimOptions(schedule="wsb")
    assert (caught.value.option, caught.value.value) == ("optim.schedule", "wsb")
    assert "wsd" in caught.value.advice


def test_boundary_values_are_allowed():
    BatchConfig(size=2, micro=1, reference=1)
    BatchConfig(micro="auto")
    DataConfig(workers="auto")
    DataConfig(workers=0, window=1, max_bad=0.0, timeout=0)
    OptimOptions(lr=0.0, weight_decay=0.0, betas=(0.0, 0.0), momentum=0.0, warmup=0, min_lr=0.0)
    TrainConfig(epochs=0.01, seed=2**63 - 1)
    PatchDropout(share=0.0, until=1.0)


def test_a_written_config_reads_back_equal():
    config = TrainConfig(
        model=ModelConfig(name="RN50", patch_dropout=PatchDropout(0.5, until=0.9)),
        data=DataConfig(augment={"scale": [0.5, 1.0]}),
        optimizers={"adamw": OptimOptions(betas=(0.9, 0.98))},
        algorithms={"fastclip-v2": LossOptions(rho=0.0, tau_betas=(0.9, 0.99))},
    )
    assert from_dict(json.loads(json.dumps(as_dict(config)))) == config


@pytest.mark.parametrize(
    ("values", "option", "value"),
    [
        ({"batch": {"sizes": 4}}, "batch.sizes", 4),
        ({"turbo": 1}, "turbo", 1),
        ({"loss": 3}, "loss", 3),
        ({"model": {"patch_dropout": {"from": 0.1}}}, "model.patch_dropout.from", 0.1),
        ({"algorithms": {"sogclr": {"speed": 2}}}, "algorithms.sogclr.speed", 2),
    ],
)
def test_an_option_of_another_version_is_named(values, option, value):
    with pytest.raises(OptionError) as caught:
        from_dict(values)
    assert (caught.value.option, caught.value.value) == (option, value)


def test_rates_scale_with_the_batch_only_against_a_reference():
    assert TrainConfig(batch=BatchConfig(size=4096)).scale == 1
    assert TrainConfig(batch=BatchConfig(size=4096, reference=1024)).scale == 4
    assert TrainConfig(batch=BatchConfig(size=256, reference=1024)).scale == 0.25


def test_written_values_are_plain_and_without_unset_ones():
    config = TrainConfig(
        model=ModelConfig(name="RN50"),
        data=DataConfig(augment={"scale": [0.5, 1.0]}),
        optimizers={"adamw": OptimOptions(betas=(0.9, 0.98))},
        algorithms={"openclip": LossOptions(), "fastclip-v3": LossOptions(rho=0.0)},
    )
    written = as_dict(config)
    assert written["data"]["augment"] == {"scale": [0.5, 1.0]}
    assert written["optimizers"] == {"adamw": {"betas": [0.9, 0.98]}}
    assert written["algorithms"] == {"fastclip-v3": {"rho": 0.0}}  # a zero is a value
    assert written["log"]["tensorboard"] is False
    assert "loss" not in written
    assert "out" not in written
    assert "pretrained" not in written["model"]


def test_patch_dropout_in_a_frozen_image_tower_is_refused():
    with pytest.raises(OptionError) as caught:
        ModelConfig(freeze="image", patch_dropout=PatchDropout(0.5))
    assert (caught.value.option, caught.value.value) == ("model.patch_dropout", 0.5)
    assert "model.freeze=image" in caught.value.rule
    ModelConfig(freeze="text", patch_dropout=PatchDropout(0.5))
    ModelConfig(freeze="image", patch_dropout=PatchDropout(0.0, until=0.9))


def test_a_best_metric_without_anything_to_evaluate_is_refused():
    with pytest.raises(OptionError) as caught:
        EvaluateConfig(best="acc1")
    assert (caught.value.option, caught.value.value) == ("evaluate.best", "acc1")
    assert EvaluateConfig(best="acc1", tasks="tasks").best == "acc1"
