"""The device is what was asked for; a GPU that torch cannot use is never passed over in silence."""

import logging

import pytest
import torch

from fastclip.distributed import device as device_module
from fastclip.distributed.device import find_device, has_gpu, report_devices
from fastclip.distributed.world import World
from fastclip.errors import OptionError


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine with or without a GPU, that torch can use or not."""

    def pretend(gpu, usable, cuda="13.0"):
        monkeypatch.setattr(device_module, "has_gpu", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return pretend


def warnings(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("asked", "usable", "expected"),
    [("auto", True, "cuda:1"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda:1")],
)
def test_the_device_is_the_one_asked_for_and_by_default_a_gpu(asked, usable, expected, machine, caplog):
    machine(gpu=usable, usable=usable)
    assert find_device(1, asked) == torch.device(expected)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("gpu", "cuda", "advice"),
    [(True, None, "built without CUDA"), (True, "13.0", "driver"), (False, "13.0", "none here")],
)
def test_a_gpu_that_was_asked_for_and_cannot_be_used_is_an_error_with_the_reason(gpu, cuda, advice, machine):
    machine(gpu, usable=False, cuda=cuda)
    with pytest.raises(OptionError) as caught:
        find_device(0, "cuda")
    assert (caught.value.option, caught.value.value) == ("device", "cuda")
    assert advice in caught.value.advice
    assert "--device cpu" in caught.value.advice


def test_by_default_a_gpu_that_cannot_be_used_is_reported(machine, caplog):
    machine(gpu=True, usable=False, cuda=None)
    assert find_device(0) == torch.device("cpu")
    (record,) = warnings(caplog)
    assert "built without CUDA" in record.args[0]
    caplog.clear()
    assert find_device(0, "cpu") == torch.device("cpu")
    assert warnings(caplog) == []


@pytest.mark.parametrize(("visible", "expected"), [(None, True), ("0", True), ("", False), ("-1", False)])
def test_gpus_are_found_as_device_files_unless_they_are_hidden(visible, expected, tmp_path, monkeypatch):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "nvidiactl").touch()  # the driver's own, on machines without a GPU too
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu(tmp_path) == expected


class FourRanks(World):
    """A world whose other ranks report these devices."""

    names = ()

    def gather(self, value):
        return list(self.names)


@pytest.mark.parametrize("mixed", [False, True])
def test_all_devices_and_the_backend_are_logged_and_gpus_that_differ_are_reported(mixed, caplog, monkeypatch):
    caplog.set_level("INFO", device_module.__name__)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    world = FourRanks(0, 4, 0, torch.device("cpu"), None)
    FourRanks.names = ["A100"] * 3 + ["T4" if mixed else "A100"]
    report_devices(world)
    first, *others = caplog.records
    assert first.getMessage() == f"Device: {'3 × A100, 1 × T4' if mixed else '4 × A100'}, over nccl."
    assert [("rank 3" in other.args[0], other.levelname) for other in others] == [(True, "WARNING")] * mixed


def test_one_rank_on_a_cpu_says_so(caplog):
    caplog.set_level("INFO", device_module.__name__)
    report_devices(World.alone())
    assert [record.getMessage() for record in caplog.records] == ["Device: 1 × CPU."]
