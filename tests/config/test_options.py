"""The dataclasses of a run: a wrong value is named with its section; config.yaml holds plain values."""

import json
from math import inf, nan

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
    TrainConfig,
    as_dict,
    from_dict,
)

WRONG = [
    (BatchConfig, "size", 1, "batch.size=1 is not possible; try batch.size=1024"),
    (BatchConfig, "micro", 0, "batch.micro=0"),
    (BatchConfig, "reference", 0, "batch.reference=0 is not possible; try batch.reference=1024"),
    (DataConfig, "workers", -1, "data.workers=-1"),
    (DataConfig, "window", 0, "data.window=0"),
    (DataConfig, "max_bad", 1.0, "data.max_bad=1.0"),
    (DataConfig, "timeout", inf, "data.timeout=inf"),
    (OptimOptions, "lr", -1.0, "optim.lr=-1.0 is not possible; try optim.lr=0.001"),
    (OptimOptions, "lr", nan, "optim.lr=nan"),
    (OptimOptions, "weight_decay", -0.1, "optim.weight_decay=-0.1"),
    (OptimOptions, "betas", (0.9, 1.0), r"optim.betas=\(0.9, 1.0\) is not possible; try optim.betas=\[0.9"),
    (OptimOptions, "eps", 0.0, "optim.eps=0.0"),
    (OptimOptions, "momentum", 1.0, "optim.momentum=1.0 is not possible; try optim.momentum=0.9"),
    (OptimOptions, "warmup", -1, "optim.warmup=-1"),
    (OptimOptions, "min_lr", -1e-9, "optim.min_lr=-1e-09"),
    (OptimOptions, "clip", 0.0, "optim.clip=0.0 is not possible; try optim.clip=1.0"),
    (EvaluateConfig, "every_epochs", 0.0, "evaluate.every_epochs=0.0"),
    (CheckpointConfig, "every_minutes", 0.0, "checkpoint.every_minutes=0.0"),
    (CheckpointConfig, "every_steps", 0, "checkpoint.every_steps=0"),
    (CheckpointConfig, "keep", 0, "checkpoint.keep=0"),
    (LogConfig, "every_steps", 0, "log.every_steps=0"),
    (TrainConfig, "epochs", 0.0, "epochs=0.0 is not possible; try epochs=30"),
    (TrainConfig, "epochs", inf, "epochs=inf"),
    (TrainConfig, "seed", -1, "seed=-1"),
    (TrainConfig, "algorithm", "fastclip-v4", "algorithm='fastclip-v4' is unknown. Did you mean fastclip-v"),
    (TrainConfig, "optimizer", "adam", "optimizer='adam' is unknown. Did you mean adamw"),
    (TrainConfig, "algorithms", {"sogclip": LossOptions()}, "'sogclip' is unknown. Did you mean sogclr"),
    (TrainConfig, "optimizers", {"adamv": OptimOptions()}, "'adamv' is unknown. Did you mean adamw"),
]


@pytest.mark.parametrize(("section", "field", "value", "message"), WRONG)
def test_a_value_out_of_range_is_named_with_its_section_and_a_value_that_works(
    section, field, value, message
):
    with pytest.raises(ValueError, match=message):
        section(**{field: value})


@pytest.mark.parametrize(("section", "field", "value", "message"), WRONG)
def test_the_value_that_the_error_proposes_does_work(section, field, value, message):
    with pytest.raises(ValueError, match=message) as error:
        section(**{field: value})
    if "; try " in str(error.value):
        proposed = str(error.value).rpartition("=")[2].rstrip(".")
        section(**{field: eval(proposed)})


def test_the_borders_are_allowed():
    BatchConfig(size=2, micro=1, reference=1)
    DataConfig(workers=0, window=1, max_bad=0.0, timeout=0)
    OptimOptions(lr=0.0, weight_decay=0.0, betas=(0.0, 0.0), momentum=0.0, warmup=0, min_lr=0.0)
    TrainConfig(epochs=0.01, seed=2**63 - 1)


def test_a_config_is_read_again_from_what_was_written():
    config = TrainConfig(
        model=ModelConfig(name="RN50"),
        data=DataConfig(augment={"scale": [0.5, 1.0]}),
        optimizers={"adamw": OptimOptions(betas=(0.9, 0.98))},
        algorithms={"fastclip-v2": LossOptions(rho=0.0, tau_betas=(0.9, 0.99))},
    )
    assert from_dict(json.loads(json.dumps(as_dict(config)))) == config


@pytest.mark.parametrize("values", [{"batch": {"sizes": 4}}, {"turbo": 1}, {"loss": 3}])
def test_what_another_version_wrote_and_this_one_does_not_know_is_named(values):
    with pytest.raises(ValueError, match=r"sizes|turbo|3"):
        from_dict(values)


def test_rates_scale_with_the_batch_only_against_a_reference():
    assert TrainConfig(batch=BatchConfig(size=4096)).scale == 1
    assert TrainConfig(batch=BatchConfig(size=4096, reference=1024)).scale == 4
    assert TrainConfig(batch=BatchConfig(size=256, reference=1024)).scale == 0.25


def test_the_written_values_are_plain_and_without_what_was_left_out():
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


def test_a_best_measure_without_anything_to_evaluate_is_refused():
    with pytest.raises(ValueError, match=r"evaluate\.best='acc1' has no effect"):
        EvaluateConfig(best="acc1")
    assert EvaluateConfig(best="acc1", tasks="tasks").best == "acc1"
