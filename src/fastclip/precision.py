"""The precision and kernels with which towers compute: torch's switches, set here and nowhere else.

On a GPU torch computes float32 convolutions in TF32, with 10 bits instead of 23, unless it is switched off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from fastclip.errors import OptionError

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16 = (8, 0)  # the first compute capability with bfloat16 tensor cores: Ampere
_cuda, _cudnn, _cpu = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
_SWITCHES: tuple[Any, ...] = (_cuda.matmul, _cudnn.conv, _cudnn.rnn, _cpu.matmul)  # type: ignore[attr-defined]


def check_precision(precision: str, device: torch.device) -> None:
    """OptionError if this device does not compute in this precision, or only far more slowly."""
    if precision == "tf32" and device.type != "cuda":
        advice = "On a CPU, pass --precision float32 or --precision bfloat16."
        raise OptionError("precision", precision, "requires an NVIDIA GPU", advice=advice)
    if precision == "bfloat16" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _BFLOAT16:
            found = f"this is {torch.cuda.get_device_name(device)}, of {'.'.join(map(str, capability))}"
            rule = f"requires a GPU of compute capability 8.0 (Ampere) or higher; {found}"
            advice = "Pass --precision float16, which it has tensor cores for, or --precision float32."
            raise OptionError("precision", precision, rule, advice=advice)


def set_precision(precision: str, device: torch.device) -> None:
    """Set torch's switches for the rest of this process, after `check_precision`.

    Both generations of torch's switches are set: torch.compile and libraries read the former ones, whose
    getters raise if the two disagree.
    """
    check_precision(precision, device)
    if device.type == "cuda":
        _set(tf32=precision == "tf32")


def set_kernels(device: torch.device, *, deterministic: bool, fastest_convolutions: bool) -> None:
    """Choose kernels for the rest of this process: the same at every run, or the fastest convolutions.

    torch raises an error for an operation that has no deterministic kernel. Measuring which convolution is
    fastest may choose another one in another run.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts, later
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        _cudnn.deterministic = True
    _cudnn.benchmark = fastest_convolutions and not deterministic and device.type == "cuda"


@contextmanager
def computing_in(precision: str, device: torch.device) -> Iterator[None]:
    """`float32_products`, and autocast for bfloat16 and float16; a caller's autocast is off inside."""
    # Up to torch 2.9 a caller's autocast would cache the weights cast here, without gradients.
    on = precision in AUTOCAST
    casting = torch.autocast(device.type, AUTOCAST.get(precision), enabled=on, cache_enabled=False)
    with float32_products(precision, device), casting:
        yield


@contextmanager
def float32_products(precision: str, device: torch.device) -> Iterator[None]:
    """Like `set_precision`, inside the context only; what was set before is restored."""
    check_precision(precision, device)
    if device.type != "cuda":
        yield
        return
    former, current = _former(), [switch.fp32_precision for switch in _SWITCHES]
    _set(tf32=precision == "tf32")
    try:
        yield
    finally:
        _restore(former, current)


def _set(tf32: bool) -> None:
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    _cudnn.allow_tf32 = tf32
    for switch in _SWITCHES:  # or a setting for all of torch would be inherited
        switch.fp32_precision = "tf32" if tf32 else "ieee"


def _former() -> tuple[str | None, bool | None]:
    """The former switches; None if they disagree with the new ones, and so cannot be read."""
    values: list[Any] = []
    for getter in (torch.get_float32_matmul_precision, lambda: _cudnn.allow_tf32):
        try:
            values.append(getter())
        except RuntimeError:
            values.append(None)
    return values[0], values[1]


def _restore(former: tuple[str | None, bool | None], current: list[str]) -> None:
    matmul, cudnn = former
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
    if cudnn is not None:
        _cudnn.allow_tf32 = cudnn
    for switch, precision in zip(_SWITCHES, current, strict=True):
        switch.fp32_precision = precision
