"""The constants of `fastclip plan`, fitted on the paper's tables of step times, and their errors.

    python -m benchmarks.plan_fit    # takes seconds; checks that network.py's constants are still the fit's

`paper_times.csv` holds every figure of the eight tables in the paper's appendix as printed, in milliseconds,
with its standard deviation. Tables have their labels in the paper; the clusters are `ib` (InfiniBand),
`slingshot-1` and `slingshot-2`.

Eight numbers are fitted on 48 cells: pace and growth of each of the three clusters, φ and ψ for all. A step
is predicted from its bytes and from the computation on one node in the same table. Two errors are reported:
of the fit on all tables, and of the fit without the cell's table (leave one out).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from math import isclose
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from fastclip.tools.profiling.job import SETTINGS
from fastclip.tools.profiling.network import (
    CLUSTERS,
    ERRORS,
    GPUS_PER_NODE,
    HIDING,
    ErrorSize,
    Hiding,
    ModelErrors,
    Network,
    StepTime,
    predict_step,
)
from fastclip.tools.profiling.traffic import Traffic, step_traffic

PARTS = ("total", "computation", "communication", "pure", "overlap", "others")
TOLERANCE = 1e-6  # relative, between the constants of network.py and the fit
_START = (0.6, 0.8)  # φ and ψ before the fit


class Timing(NamedTuple):
    """Where the time of a step went: means over runs in ms, and `sd`, their standard deviations by name."""

    table: str
    recipe: str
    network: str
    nodes: int
    algorithm: str
    total: float
    computation: float
    communication: float
    pure: float
    """Communication without concurrent computation."""
    overlap: float
    """Communication hidden behind computation."""
    others: float
    """Neither computation nor communication."""
    sd: dict[str, float]


@cache
def paper_times() -> tuple[Timing, ...]:
    """All 64 columns of the eight tables: nodes 1, 2, 4, 8 of OpenCLIP and FastCLIP-v3."""
    with Path(__file__).with_name("paper_times.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_timing(row) for row in csv.DictReader(file))


def _timing(row: dict[str, str]) -> Timing:
    place = {name: row[name] for name in ("table", "recipe", "network", "algorithm")}
    means = {part: float(row[f"{part}_ms"]) for part in PARTS}
    return Timing(
        **place, nodes=int(row["nodes"]), **means, sd={part: float(row[f"{part}_sd"]) for part in PARTS}
    )


def one_node(timing: Timing) -> Timing:
    """The timing of the same algorithm on one node in the same table."""
    key = (timing.table, 1, timing.algorithm)
    return next(t for t in paper_times() if (t.table, t.nodes, t.algorithm) == key)


class Fit(NamedTuple):
    """Fitted networks, and how much communication hides behind computation."""

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
        predicted = (weights + exchange) * ms_per_megabyte
        bucketed = weights * but_the_last * ms_per_megabyte
        hidden = np.minimum(of_computation * computation, of_weights * bucketed)
        return np.concatenate([(predicted - communication) / total, (predicted - hidden - pure) / total])

    rough = np.array([median((communication / (weights + exchange))[which == i]) for i in range(len(names))])
    start = np.concatenate([rough, 0.1 * rough, _START])
    upper = np.concatenate([np.full(2 * len(names), np.inf), [1.0, 1.0]])
    x = least_squares(residuals, start, bounds=(0.0, upper)).x.tolist()
    networks = {
        name: Network(name, x[i], x[len(names) + i], _inside(name, times)) for i, name in enumerate(names)
    }
    return Fit(networks, Hiding(x[-2], x[-1]))


def timed_traffic(timing: Timing) -> Traffic:
    """Bytes that each rank sent in a step of a table, by our formulas, all in float32."""
    setting = SETTINGS[timing.recipe]
    return step_traffic(
        timing.algorithm,
        workers=GPUS_PER_NODE * timing.nodes,
        local_batch=setting.local_batch,
        features=setting.features,
        trained_bytes=4 * setting.weights,
    )


def _inside(network: str, times: Sequence[Timing]) -> float:
    """ms per megabyte between the GPUs of one node."""
    alone = [t for t in times if t.network == network and t.nodes == 1]
    return median(t.communication / timed_traffic(t).total * 1e6 for t in alone)


class Cell(NamedTuple):
    """A cell of the paper's tables, and the model's prediction of it; errors are relative to the cell."""

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
                cells.append(Cell(timing, _predicted(timing, fitted()), _predicted(timing, without)))
    return tuple(cells)


def _predicted(timing: Timing, fit: Fit) -> StepTime:
    alone, network = one_node(timing), fit.networks[timing.network]
    given = {"computation": alone.computation, "others": alone.others}
    return predict_step(timed_traffic(timing), timing.nodes, network, hiding=fit.hiding, **given)


def ratio_table() -> list[Ratio]:
    """The model's ratio FastCLIP-v3 / OpenCLIP against the 24 measured ones."""
    cells = {(c.timing.table, c.timing.nodes, c.timing.algorithm): c for c in error_table()}
    ratios = []
    for (table, nodes, algorithm), v3 in cells.items():
        if algorithm == "fastclip-v3":
            openclip = cells[table, nodes, "openclip"]
            pairs = ((v3.timing, openclip.timing), (v3.seen, openclip.seen), (v3.unseen, openclip.unseen))
            ratios.append(Ratio(table, nodes, *(ours.total / theirs.total for ours, theirs in pairs)))
    return ratios


def model_errors() -> ModelErrors:
    """Errors of the step time and of the ratio, on tables that the fit has seen and on unseen ones."""
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


def differences() -> list[str]:
    """Constants of network.py that differ from the fit, each with both values."""
    different = []
    for ours, theirs, name in (
        *((CLUSTERS[name], network, f'CLUSTERS["{name}"]') for name, network in fitted().networks.items()),
        (HIDING, fitted().hiding, "HIDING"),
        *((getattr(ERRORS, name), size, f"ERRORS.{name}") for name, size in model_errors()._asdict().items()),
    ):
        for part in theirs._fields:
            old, new = getattr(ours, part), getattr(theirs, part)
            if old != new and (isinstance(new, str) or not isclose(old, new, rel_tol=TOLERANCE)):
                different.append(f"{name}.{part} is {old}, the fit gives {new}")
    return different


def markdown() -> Iterator[str]:
    """The table of docs/scaling.md: every cell, with the errors of both fits."""
    yield (
        "| setting | network | nodes | OpenCLIP, ms | fitted | unseen | v3, ms | fitted | unseen "
        "| v3 / OpenCLIP | fitted | unseen |"
    )
    yield "|---|---|" + 10 * "---:|"
    cells = {(c.timing.table, c.timing.nodes, c.timing.algorithm): c for c in error_table()}
    for ratio in ratio_table():
        timing = cells[ratio.table, ratio.nodes, "openclip"].timing
        line = [timing.recipe.partition("-")[2], timing.network, str(ratio.nodes)]
        for algorithm in ("openclip", "fastclip-v3"):
            cell = cells[ratio.table, ratio.nodes, algorithm]
            errors = (f"{100 * e:+.1f} %".replace("-", "−") for e in (cell.seen_error, cell.unseen_error))
            line += [f"{cell.timing.total:,.0f}", *errors]
        line += [f"{value:.3f}" for value in (ratio.measured, ratio.seen, ratio.unseen)]
        yield f"| {' | '.join(line)} |"


def main() -> None:
    print(f"CLUSTERS = {fitted().networks}\nHIDING = {fitted().hiding}\nERRORS = {model_errors()}\n")
    print("\n".join(markdown()))
    if different := differences():
        sys.exit(
            "\n".join(["", "These constants of tools/profiling/network.py differ from the fit:", *different])
        )
    print(f"\nThe constants of tools/profiling/network.py agree with the fit within {TOLERANCE:g}.")


if __name__ == "__main__":
    main()
