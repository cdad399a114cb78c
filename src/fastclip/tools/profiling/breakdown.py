"""What the workers of a profile found, as one table of the paper's form: categories, algorithms, sizes.

The slowest worker is the one that the others wait for: in a synchronous step all take the same time, and who
is late spends the least of it waiting. So workers are ordered by their time outside of pure communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, stdev

from rich.table import Table

from fastclip.tools.profiling.timeline import StepTimes

PARTS = {
    "total": "total",
    "computation": "computation",
    "communication": "communication",
    "pure_communication": "pure communication",
    "overlap": "overlap",
    "others": "others",
    "data_wait": "of it waiting for data",
}
"""The fields of StepTimes as they are shown, in the order of the paper's table."""
_SENT = "KiB sent, "  # and the kind of collective


@dataclass(frozen=True)
class WorkerProfile:
    """What one worker found."""

    rank: int
    steps: list[StepTimes]
    sent: dict[str, float]  # bytes a step by kind of collective
    peak_memory: int | None  # bytes, of what `memory` says; None where the system does not tell
    memory: str

    def mean(self, part: str) -> float:
        """A field of StepTimes, ms, over all steps."""
        return fmean(getattr(step, part) for step in self.steps)

    def spread(self, part: str) -> float:
        """Its standard deviation over the steps; 0 of one step."""
        return stdev(getattr(step, part) for step in self.steps) if len(self.steps) > 1 else 0.0


@dataclass(frozen=True)
class AlgorithmProfile:
    """One algorithm at one number of workers."""

    algorithm: str
    batch: int  # pairs a step over all workers
    workers: list[WorkerProfile]

    @classmethod
    def from_dict(cls, saved: dict) -> AlgorithmProfile:
        """From what dataclasses.asdict made of it."""
        workers = [
            WorkerProfile(**worker | {"steps": [StepTimes(**step) for step in worker["steps"]]})
            for worker in saved["workers"]
        ]
        return cls(saved["algorithm"], saved["batch"], workers)

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def median(self) -> WorkerProfile:
        """The worker in the middle, of two the one that is less late."""
        return self._by_lateness()[(self.size - 1) // 2]

    @property
    def slowest(self) -> WorkerProfile:
        """The worker that the others wait for."""
        return self._by_lateness()[-1]

    @property
    def samples_per_second(self) -> float:
        """Of all workers together, by the steps of the worker that took longest."""
        return self.batch / max(worker.mean("total") for worker in self.workers) * 1000

    def _by_lateness(self) -> list[WorkerProfile]:
        return sorted(self.workers, key=lambda w: w.mean("total") - w.mean("pure_communication"))


def columns(profiles: list[AlgorithmProfile]) -> list[tuple[int, str]]:
    """Numbers of workers, each with `median` and, for several workers, `slowest`."""
    return [(size, who) for size in sizes(profiles) for who in ("median", "slowest")[: min(size, 2)]]


def rows(profiles: list[AlgorithmProfile]) -> Iterator[tuple[str, str, list[str]]]:
    """Category, algorithm, and a cell for each of `columns`; the lines of one category together."""
    by_place = {(profile.algorithm, profile.size): profile for profile in profiles}
    kinds = sorted({kind for profile in profiles for worker in profile.workers for kind in worker.sent})
    sent = [f"{_SENT}{kind}" for kind in kinds]
    for category in (*PARTS.values(), "samples/s", _speed_up_over(profiles), *sent, "peak memory, MiB"):
        for algorithm in algorithms(profiles):
            found = [(by_place.get((algorithm, size)), who) for size, who in columns(profiles)]
            cells = [_cells(p, who, profiles).get(category, "") if p else "" for p, who in found]
            if any(cells):
                yield category, algorithm, cells


def _cells(profile: AlgorithmProfile, who: str, profiles: list[AlgorithmProfile]) -> dict[str, str]:
    """A column of one algorithm by category; what is true of all workers together stands by the median."""
    worker: WorkerProfile = getattr(profile, who)
    cells = {name: f"{worker.mean(part):.2f} ({worker.spread(part):.2f})" for part, name in PARTS.items()}
    if who == "median":
        cells["samples/s"] = f"{profile.samples_per_second:,.1f}"
        ratio = speed_up(profile, profiles) if len(sizes(profiles)) > 1 else None
        cells[_speed_up_over(profiles)] = "" if ratio is None else f"{ratio:.2f} ×"
    cells |= {f"{_SENT}{kind}": f"{count / 2**10:,.1f}" for kind, count in worker.sent.items()}
    peak = worker.peak_memory
    return cells | {"peak memory, MiB": "?" if peak is None else f"{peak / 2**20:,.0f}"}


def _speed_up_over(profiles: list[AlgorithmProfile]) -> str:
    fewest = min(sizes(profiles))
    return f"speed-up over {fewest} worker{'s' if fewest > 1 else ''}"


def as_table(profiles: list[AlgorithmProfile]) -> Table:
    """For a terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("ms a step")
    table.add_column("algorithm", no_wrap=True)
    for size, who in columns(profiles):
        heading = "1 worker" if size == 1 else f"{size} workers, median" if who == "median" else who
        table.add_column(heading, justify="right")
    last = ""
    for category, algorithm, cells in rows(profiles):
        table.add_row("" if category == last else category, algorithm, *cells)
        last = category
    return table


def sizes(profiles: list[AlgorithmProfile]) -> list[int]:
    """Numbers of workers, from few to many."""
    return sorted({profile.size for profile in profiles})


def algorithms(profiles: list[AlgorithmProfile]) -> list[str]:
    """In the order in which they were asked for."""
    return list(dict.fromkeys(profile.algorithm for profile in profiles))


def speed_up(profile: AlgorithmProfile, profiles: list[AlgorithmProfile]) -> float | None:
    """Pairs a second over those of the fewest workers; None if this algorithm was not measured there."""
    fewest = min(sizes(profiles))
    rates = {p.algorithm: p.samples_per_second for p in profiles if p.size == fewest}
    return profile.samples_per_second / rates[profile.algorithm] if profile.algorithm in rates else None
