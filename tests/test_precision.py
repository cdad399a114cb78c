"""Every part of fastclip computes in the precision that was asked for; torch's switches stay readable."""

import os

import pytest
import torch

from fastclip.config.options import BatchConfig, ModelConfig, TrainConfig
from fastclip.config.parse import parse
from fastclip.config.resolved import differences, resolve
from fastclip.distributed.world import World
from fastclip.errors import OptionError
from fastclip.evaluation.features import Encoder
from fastclip.model import build_model
from fastclip.precision import check_precision, computing_in, float32_products, set_kernels, set_precision
from fastclip.run.load import Model
from fastclip.training import build as build_module
from fastclip.training import compiling

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_backends = torch.backends
SWITCHES = (_backends.cuda.matmul, _backends.cudnn.conv, _backends.cudnn.rnn, _backends.mkldnn.matmul)


@pytest.fixture(autouse=True)
def _restored():
    """torch's defaults, before and after each test."""

    def reset():
        torch.set_float32_matmul_precision("highest")
        _backends.cudnn.allow_tf32 = True
        for switch, value in zip(SWITCHES, ("none", "tf32", "tf32", "none"), strict=True):
            switch.fp32_precision = value

    reset()
    yield
    reset()


def state():
    return [switch.fp32_precision for switch in SWITCHES], former()


def former():
    """The switches that torch.compile and libraries read; a getter raises if the generations disagree."""
    return (
        torch.get_float32_matmul_precision(),
        _backends.cuda.matmul.allow_tf32,
        _backends.cudnn.allow_tf32,
    )


@pytest.mark.parametrize("precision", ["float32", "float16", "float64"])
def test_products_and_convolutions_are_exact_unless_tf32_was_asked_for(precision):
    assert _backends.cudnn.conv.fp32_precision == "tf32"  # torch's default
    set_precision(precision, CUDA)
    assert state() == (["ieee"] * 4, ("highest", False, False))
    set_precision("tf32", CUDA)
    assert state() == (["tf32"] * 4, ("high", True, True))
    set_precision(precision, CUDA)
    assert state() == (["ieee"] * 4, ("highest", False, False))


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_a_callers_switches_are_restored(precision, before):
    torch.set_float32_matmul_precision(before)
    expected = state()
    with float32_products(precision, CUDA):
        tf32 = precision == "tf32"
        assert former() == ("high" if tf32 else "highest", tf32, tf32)
    assert state() == expected


def test_switches_that_cannot_be_read_are_restored_too():
    _backends.cudnn.conv.fp32_precision = "ieee"  # alone: the former getter of cuDNN raises now
    with pytest.raises(RuntimeError):
        former()
    with float32_products("float32", CUDA):
        assert state() == (["ieee"] * 4, ("highest", False, False))
    assert [switch.fp32_precision for switch in SWITCHES] == ["none", "ieee", "tf32", "none"]


def test_a_setting_for_all_of_torch_is_not_inherited():
    before = _backends.fp32_precision
    _backends.fp32_precision = "tf32"
    try:
        with float32_products("float32", CUDA):
            assert state() == (["ieee"] * 4, ("highest", False, False))
    finally:
        _backends.fp32_precision = before


def test_on_a_cpu_nothing_is_switched_and_autocast_follows_the_precision():
    before = state()
    for precision in ("float32", "bfloat16"):
        set_precision(precision, CPU)
        with torch.autocast("cpu", torch.float16), computing_in(precision, CPU):
            assert torch.is_autocast_enabled("cpu") == (precision == "bfloat16")
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            assert product.dtype == getattr(torch, precision)
            assert state() == before


@pytest.mark.parametrize(("capability", "works"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bfloat16_needs_an_ampere_gpu_and_float16_is_suggested(capability, works, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    check_precision("float16", CUDA)
    check_precision("bfloat16", CPU)
    if works:
        return check_precision("bfloat16", CUDA)
    with pytest.raises(OptionError) as caught:
        check_precision("bfloat16", CUDA)
    assert (caught.value.option, caught.value.value) == ("precision", "bfloat16")
    assert "Tesla T4" in caught.value.rule
    assert "--precision float16" in caught.value.advice


@pytest.fixture
def kernels(monkeypatch):
    """Kernels may be chosen, and are as before afterwards."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)
    _backends.cudnn.deterministic = _backends.cudnn.benchmark = False
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("convolutions", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_kernels_are_deterministic_or_the_fastest_and_never_both(
    device, deterministic, convolutions, kernels
):
    set_kernels(device, deterministic=deterministic, fastest_convolutions=convolutions)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert _backends.cudnn.deterministic == deterministic
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == deterministic
    fastest = convolutions and not deterministic and device is CUDA
    assert _backends.cudnn.benchmark == fastest


def test_a_deterministic_run_has_the_same_bits_and_is_not_compiled_by_default(kernels, monkeypatch):
    monkeypatch.setattr(compiling, "AUTOMATIC", {"cpu"})
    weights = []
    for deterministic in (False, True, True):
        settings = ModelConfig("vit-scenes", compile="auto" if deterministic else False)
        config = resolve(
            TrainConfig(
                model=settings, deterministic=deterministic, batch=BatchConfig(4), algorithm="fastclip-v2"
            )
        )
        train_step = build_module.build_step(
            config, build_module.build_towers(config, World.alone()), 12, World.alone()
        )
        assert not compiling.is_compiled(train_step.towers)
        images = torch.linspace(-1, 1, 4 * 3 * 32 * 32).reshape(4, 3, 32, 32)
        images = torch.nn.functional.interpolate(images, size=train_step.towers.image_size)
        tokens = torch.ones(4, train_step.towers.context_length, dtype=torch.int64)
        assert train_step.update(0, images, tokens, torch.arange(4)).finite
        weights.append(train_step.towers.state_dict())
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in other)


def test_the_papers_resnet_has_the_layout_of_convolutions_and_its_earlier_runs_resume():
    config = resolve(parse(["--config", "cc3m-medium"]))
    assert (config.model.name, config.model.channels_last) == ("RN50", True)
    before = resolve(parse(["--config", "cc3m-medium", "--model.channels_last", "false"]))
    assert differences(before, config) == []


# Who uses it


def test_training_sets_its_precision_before_it_builds_anything(monkeypatch):
    class Built(Exception):
        """The model would be built now."""

    def build_model(*_, **__):
        raise Built

    monkeypatch.setattr(build_module, "build_model", build_model)
    config = resolve(TrainConfig(precision="tf32", model=ModelConfig("vit-scenes")))
    with pytest.raises(Built):
        build_module.build_towers(config, World(0, 1, 0, CUDA, None))
    assert former() == ("high", True, True)


@pytest.mark.parametrize("who", ["encoder", "model"])
def test_features_are_encoded_exactly_whatever_the_process_has_set(who, monkeypatch):
    """`Encoder` serves eval, search and evaluation in training; `Model` is what fastclip.load returns."""
    towers, seen = build_model("vit-scenes", device="cpu").eval(), []
    torch.set_float32_matmul_precision("high")
    before = state()
    if who == "encoder":
        encoder = Encoder(towers, World.alone())
        encoder.device = CUDA  # of the switches: nothing is computed
        with encoder._evaluating():
            seen.append(state())
    else:
        model = Model(towers)
        monkeypatch.setattr(Model, "device", CUDA)
        model._in_batches(["a cat"], lambda texts: seen.append(state()) or torch.ones(1, 2))
    assert seen == [(["ieee"] * 4, ("highest", False, False))]
    assert state() == before
