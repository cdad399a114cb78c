"""From a recorded trace to where the time of each step went: the paper's five parts, and waiting for data.

A trace is what torch.profiler writes for Chrome and Perfetto. Time that several events cover counts once:
lengths are those of unions. Steps lie back to back, so the sum of their totals is the wall time.

On a GPU its kernels count: those of NCCL are communication, all others computation, copies within the device
and fills too; copies from and to the host are neither. On a CPU the operators count, on whatever thread of
the step: they never wait for other workers, as what wraps them may (backward nodes, c10d calls). A collective
of gloo lasts from its start to its completion, whoever waits for it.
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

WAITING_FOR_DATA = "waiting for data"  # the name of the annotation around the wait for a batch

Spans = NDArray[np.int64]
"""Starts and ends in ns, one row a span; what `covered` and `free` give is disjoint and in order."""

Window = tuple[int, int]  # where a step starts and ends, in ns
Kind = Literal["computation", "communication", "data"]
_NOT_COMPUTED = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "autograd", "torch", "profiler")
_OPERATOR = re.compile(rf"(?!(?:{'|'.join(_NOT_COMPUTED)})::)\w+::\w")  # aten::mm, torchvision::nms
_COMPILED = "## Call CompiledFxGraph"  # what torch.compile makes of a tower runs without operators


@dataclass(frozen=True)
class StepTimes:
    """One step of one worker in ms: total = computation + pure communication + others."""

    total: float
    computation: float
    communication: float
    pure_communication: float  # communication while nothing was computed
    overlap: float  # communication while something was computed
    others: float  # neither: the host's own work, copies to a GPU, waiting for data
    data_wait: float  # the part of others in which the worker waited for its batch


def read_events(trace: Path) -> list[dict]:
    """The events of a trace, gzipped or not."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt", encoding="utf-8", errors="replace") as file:
        return json.load(file)["traceEvents"]


def step_times(events: Iterable[dict], device: str) -> list[StepTimes]:
    """The times of every recorded step.

    Args:
        device: the type of the device that computed, `cuda` or `cpu`.
    """
    lasting = [event for event in events if event.get("ph") == "X"]
    kind_of: Callable[[dict], Kind | None] = kind_on_gpu if device == "cuda" else kind_on_cpu
    found: dict[Kind, list[dict]] = {"computation": [], "communication": [], "data": []}
    for event in lasting:
        if kind := kind_of(event):
            found[kind].append(event)
    if device == "cuda" and not found["computation"]:
        raise RuntimeError(
            "The profiler recorded no kernel of the GPU: perhaps it may not read its counters. Run it with "
            "the rights for that (NVIDIA's page on ERR_NVGPUCTRPERM says how); KINETO_LOG_LEVEL=0 tells more."
        )
    computed, communicated, waited = (_spans(found[kind]) for kind in found)
    return [_times(window, computed, communicated, waited, device != "cuda") for window in _windows(lasting)]


def kind_on_gpu(event: dict) -> Kind | None:
    """What an event says of the device; the host's own events say nothing but the wait for data."""
    category, name = event.get("cat"), event["name"]
    if category == "kernel":
        return "communication" if "nccl" in name.lower() else "computation"
    if category == "gpu_memcpy":  # between GPUs it belongs to a collective; to the host it is neither
        return "communication" if "PtoP" in name else "computation" if "DtoD" in name else None
    if category == "gpu_memset":
        return "computation"
    return _kind_of_wait(event)


def kind_on_cpu(event: dict) -> Kind | None:
    """Operators compute; gloo's own spans are collectives, from their start to their completion."""
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
        raise ValueError("The trace has no ProfilerStep# in it; was the profiler told where steps begin?")
    return list(pairwise([*spans[:, 0].tolist(), int(spans[-1, 1])]))


def _times(window: Window, computed: Spans, communicated: Spans, waited: Spans, on_cpu: bool) -> StepTimes:
    waited = covered(waited, window)
    if on_cpu:  # operators that decode a batch are no computation of the step
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
    """The time of the window that lies in any of the spans."""
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
    """The time of the window that lies in none of the spans."""
    taken = covered(spans, window)
    edges = np.r_[window[0], taken.ravel(), window[1]].reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def common(some: Spans, others: Spans, window: Window) -> Spans:
    """The time of the window that lies in both."""
    return free(np.concatenate([free(some, window), free(others, window)]), window)


def length(spans: Spans) -> int:
    """Of disjoint spans, in ns."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def _spans(events: list[dict]) -> Spans:
    """In order of their starts; a trace's times are µs with three digits."""
    times = np.array([(event["ts"], event["ts"] + event["dur"]) for event in events], dtype=np.float64)
    spans = np.rint(times.reshape(-1, 2) * 1000).astype(np.int64)
    return spans[np.argsort(spans[:, 0], kind="stable")]
