"""The model of `network.py`, fitted on the paper's tables each time it is needed, and how wrong it is
there.

Eight numbers are fitted on 48 cells: pace and growth of each of the three clusters, φ and ψ for all. A step
is foretold from its bytes and from what the same table says of computation on one node. The error is that
of the fit itself, and that of tables which the fit has not seen, left out one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from fastclip.tools.profiling.network import Hiding, Network, StepTime, predict_step
from fastclip.tools.profiling.paper import GPUS_PER_NODE, Timing, one_node, paper_times
from fastclip.tools.profiling.traffic import Traffic, step_traffic

_START = (0.6, 0.8)  # φ and ψ before the fit


class Fit(NamedTuple):
    """What the tables say of networks, and of what hides behind computation."""

    networks: dict[str, Network]
    hiding: Hiding


@cache
def fitted() -> Fit:
    """The fit on all of the paper's tables."""
    return fit(paper_times())


def fit(times: Sequence[Timing]) -> Fit:
    """Least squares of communication and of pure communication, each relative to its step."""
    several = [t for t in times if t.nodes > 1]
    names = sorted({t.network for t in several})
    sent = [timed_traffic(t) for t in several]
    weights, exchange = (np.array([getattr(s, kind) / 1e6 for s in sent]) for kind in ("weights", "exchange"))
    but_the_last = np.array([1 - 1 / s.buckets for s in sent])
    which = np.array([names.index(t.network) for t in several])
    doublings = np.log2([t.nodes for t in several]) - 1
    total, computation, communication, pure = (
        np.array([getattr(t, part) for t in several])
        for part in ("total", "computation", "communication", "pure")
    )

    def residuals(x: np.ndarray) -> np.ndarray:
        paces, growths, (of_computation, of_weights) = x[: len(names)], x[len(names) : -2], x[-2:]
        ms_per_megabyte = paces[which] + growths[which] * doublings
        found = (weights + exchange) * ms_per_megabyte
        bucketed = weights * but_the_last * ms_per_megabyte
        hidden = np.minimum(of_computation * computation, of_weights * bucketed)
        return np.concatenate([(found - communication) / total, (found - hidden - pure) / total])

    rough = np.array([median((communication / (weights + exchange))[which == i]) for i in range(len(names))])
    start = np.concatenate([rough, 0.1 * rough, _START])
    upper = np.concatenate([np.full(2 * len(names), np.inf), [1.0, 1.0]])
    x = least_squares(residuals, start, bounds=(0.0, upper)).x.tolist()
    networks = {
        name: Network(name, x[i], x[len(names) + i], _inside(name, times)) for i, name in enumerate(names)
    }
    return Fit(networks, Hiding(x[-2], x[-1]))


def timed_traffic(timing: Timing) -> Traffic:
    """What each worker sent in a step of a table, by the formulas for our own; all of it in float32."""
    setting = timing.setting
    return step_traffic(
        timing.algorithm,
        workers=GPUS_PER_NODE * timing.nodes,
        local_batch=setting.local_batch,
        features=setting.features,
        trained_bytes=4 * setting.weights,
    )


def _inside(network: str, times: Sequence[Timing]) -> float:
    """ms for a megabyte between the GPUs of one node."""
    alone = [t for t in times if t.network == network and t.nodes == 1]
    return median(t.communication / timed_traffic(t).total * 1e6 for t in alone)


class Cell(NamedTuple):
    """A cell of the paper's tables, and what the model makes of it; errors are relative to the cell."""

    timing: Timing
    seen: StepTime
    """From the fit on all tables."""
    unseen: StepTime
    """From the fit without this cell's table."""

    @property
    def seen_error(self) -> float:
        return self.seen.total / self.timing.total - 1

    @property
    def unseen_error(self) -> float:
        return self.unseen.total / self.timing.total - 1


class Ratio(NamedTuple):
    """The step of FastCLIP-v3 over that of OpenCLIP, on one cluster and number of nodes."""

    table: str
    nodes: int
    measured: float
    seen: float
    unseen: float

    @property
    def seen_error(self) -> float:
        return self.seen / self.measured - 1

    @property
    def unseen_error(self) -> float:
        return self.unseen / self.measured - 1


@cache
def error_table() -> tuple[Cell, ...]:
    """The model against all 48 cells with more than one node: 24 of each algorithm."""
    cells = []
    for table in dict.fromkeys(t.table for t in paper_times()):
        without = fit([t for t in paper_times() if t.table != table])
        for timing in paper_times():
            if timing.table == table and timing.nodes > 1:
                cells.append(Cell(timing, _foretold(timing, fitted()), _foretold(timing, without)))
    return tuple(cells)


def ratio_table() -> list[Ratio]:
    """The model's ratio FastCLIP-v3 / OpenCLIP against the 24 that were measured."""
    found = {(c.timing.table, c.timing.nodes, c.timing.algorithm): c for c in error_table()}
    ratios = []
    for (table, nodes, algorithm), v3 in found.items():
        if algorithm == "fastclip-v3":
            openclip = found[table, nodes, "openclip"]
            pairs = ((v3.timing, openclip.timing), (v3.seen, openclip.seen), (v3.unseen, openclip.unseen))
            ratios.append(Ratio(table, nodes, *(ours.total / theirs.total for ours, theirs in pairs)))
    return ratios


def _foretold(timing: Timing, fit: Fit) -> StepTime:
    alone = one_node(timing)
    return predict_step(
        timed_traffic(timing),
        timing.nodes,
        fit.networks[timing.network],
        fit.hiding,
        computation=alone.computation,
        others=alone.others,
    )


class ErrorSize(NamedTuple):
    """Of relative errors, without their signs."""

    mean: float
    largest: float


class ModelErrors(NamedTuple):
    """How wrong the model is on the paper's cells with more than one node."""

    step_seen: ErrorSize
    step_unseen: ErrorSize
    ratio_seen: ErrorSize
    ratio_unseen: ErrorSize
    ratio_one: ErrorSize
    """Of who takes both algorithms to be equally fast."""


@cache
def model_errors() -> ModelErrors:
    """The error of the step's time on tables it has seen and on those it has not; the same of the ratio."""
    ratios = ratio_table()
    return ModelErrors(
        _size([c.seen_error for c in error_table()]),
        _size([c.unseen_error for c in error_table()]),
        _size([r.seen_error for r in ratios]),
        _size([r.unseen_error for r in ratios]),
        _size([1 / r.measured - 1 for r in ratios]),
    )


def _size(errors: list[float]) -> ErrorSize:
    return ErrorSize(fmean(map(abs, errors)), max(map(abs, errors)))
