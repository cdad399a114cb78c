"""Split the time of each step of a trace into the paper's five parts and the wait for data.

A trace is what torch.profiler writes for Chrome and Perfetto. Time covered by several events counts once:
lengths are those of unions. Steps are contiguous, so the sum of their totals is the wall time.

On a GPU, NCCL kernels are communication; all other kernels, copies within the device and fills are
computation; copies from and to the host are neither. On a CPU, operators on any thread of the step are
computation: unlike the events around them (backward nodes, c10d calls), they never wait for other ranks.
A gloo collective lasts from its start to its completion, even if nothing waits for it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastclip.errors import InputError

WAITING_FOR_DATA = "waiting for data"  # the name of the annotation around the wait for a batch

Spans = NDArray[np.int64]
"""Starts and ends in ns, one span per row; disjoint and sorted if returned by `covered` or `free`."""

Window = tuple[int, int]  # start and end of a step, in ns
Kind = Literal["computation", "communication", "data"]
_NOT_COMPUTED = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "autograd", "torch", "profiler")
_OPERATOR = re.compile(rf"(?!(?:{'|'.join(_NOT_COMPUTED)})::)\w+::\w")  # aten::mm, torchvision::nms
_COMPILED = "## Call CompiledFxGraph"  # a compiled tower runs without operators


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank in ms: total = computation + pure communication + others."""

    total: float
    computation: float
    communication: float
    pure_communication: float  # communication without computation
    overlap: float  # communication during computation
    others: float  # neither: host work, copies to a GPU, waiting for data
    data_wait: float  # the part of others spent waiting for a batch


class NoKernelsError(RuntimeError):
    """A trace of a GPU without any of its kernels."""


def read_events(trace: Path) -> list[dict]:
    """The events of a trace, gzipped or not."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt", encoding="utf-8", errors="replace") as file:
        return json.load(file)["traceEvents"]


def step_times(events: Iterable[dict], device: str) -> list[StepTimes]:
    """Return the times of every recorded step.

    Args:
        device: type of the device that computed, `cuda` or `cpu`.
    """
    lasting = [event for event in events if event.get("ph") == "X"]
    kind_of: Callable[[dict], Kind | None] = kind_on_gpu if device == "cuda" else kind_on_cpu
    by_kind: dict[Kind, list[dict]] = {"computation": [], "communication": [], "data": []}
    for event in lasting:
        if kind := kind_of(event):
            by_kind[kind].append(event)
    if device == "cuda" and not by_kind["computation"]:
        raise NoKernelsError(
            "The profiler recorded no GPU kernels. It may lack permission to read the GPU's counters: see "
            "NVIDIA's page on ERR_NVGPUCTRPERM. For details, set KINETO_LOG_LEVEL=0."
        )
    computed, communicated, waited = (_spans(group) for group in by_kind.values())
    return [_times(window, computed, communicated, waited, device != "cuda") for window in _windows(lasting)]


def kind_on_gpu(event: dict) -> Kind | None:
    """The kind of an event on a GPU; of the host's events only the wait for data counts."""
    category, name = event.get("cat"), event["name"]
    if category == "kernel":
        return "communication" if "nccl" in name.lower() else "computation"
    if category == "gpu_memcpy":  # between GPUs: part of a collective; to the host: neither
        return "communication" if "PtoP" in name else "computation" if "DtoD" in name else None
    if category == "gpu_memset":
        return "computation"
    return _kind_of_wait(event)


def kind_on_cpu(event: dict) -> Kind | None:
    """The kind of an event on a CPU: operators compute, gloo's spans are collectives."""
    name = event["name"]
    if name.startswith("gloo:"):
        return "communication"
    if (event.get("cat") == "cpu_op" and _OPERATOR.match(name)) or name.startswith(_COMPILED):
        return "computation"
    return _kind_of_wait(event)


def _kind_of_wait(event: dict) -> Kind | None:
    return "data" if event["name"] == WAITING_FOR_DATA and event.get("cat") == "user_annotation" else None


def _windows(lasting: list[dict]) -> list[Window]:
    """Each step lasts until the next one begins, the last one until its own end."""
    named = [event for event in lasting if event["name"].startswith("ProfilerStep#")]
    spans = _spans([event for event in named if event.get("cat") == "user_annotation"])
    if not len(spans):
        raise InputError("events", "contain no ProfilerStep#: call profiler.step() after each step.")
    return list(pairwise([*spans[:, 0].tolist(), int(spans[-1, 1])]))


def _times(window: Window, computed: Spans, communicated: Spans, waited: Spans, on_cpu: bool) -> StepTimes:
    waited = covered(waited, window)
    if on_cpu:  # operators that decode a batch are not computation of the step
        computed = common(computed, free(waited, window), window)
    computed, communicated = covered(computed, window), covered(communicated, window)
    busy = covered(np.concatenate([computed, communicated]), window)
    total, computation, communication = window[1] - window[0], length(computed), length(communicated)
    pure = length(busy) - computation
    times = {
        "total": total,
        "computation": computation,
        "communication": communication,
        "pure_communication": pure,
        "overlap": communication - pure,
        "others": total - length(busy),
        "data_wait": length(common(waited, free(busy, window), window)),
    }
    return StepTimes(**{name: nanoseconds / 1e6 for name, nanoseconds in times.items()})


def covered(spans: Spans, window: Window) -> Spans:
    """The part of the window inside any of the spans."""
    inside = np.clip(spans, *window)
    inside = inside[inside[:, 1] > inside[:, 0]]
    inside = inside[np.argsort(inside[:, 0], kind="stable")]
    if not len(inside):
        return inside
    reached = np.maximum.accumulate(inside[:, 1])
    begins = np.flatnonzero(np.r_[True, inside[1:, 0] > reached[:-1]])
    ends = np.r_[begins[1:] - 1, len(inside) - 1]
    return np.stack([inside[begins, 0], reached[ends]], axis=1)


def free(spans: Spans, window: Window) -> Spans:
    """The part of the window outside all spans."""
    taken = covered(spans, window)
    edges = np.r_[window[0], taken.ravel(), window[1]].reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def common(some: Spans, others: Spans, window: Window) -> Spans:
    """The part of the window inside both."""
    return free(np.concatenate([free(some, window), free(others, window)]), window)


def length(spans: Spans) -> int:
    """The total length of disjoint spans, in ns."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def _spans(events: list[dict]) -> Spans:
    """Sorted by start; times in a trace are µs with three digits."""
    times = np.array([(event["ts"], event["ts"] + event["dur"]) for event in events], dtype=np.float64)
    spans = np.rint(times.reshape(-1, 2) * 1000).astype(np.int64)
    return spans[np.argsort(spans[:, 0], kind="stable")]
