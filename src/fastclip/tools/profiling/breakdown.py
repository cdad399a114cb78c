"""What the workers of a profile found, as one table of the paper's form: categories, algorithms, sizes.

The slowest worker is the one that the others wait for: in a synchronous step all take the same time, and who
is late spends the least of it waiting. So workers are ordered by their time outside of pure communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

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


@dataclass(frozen=True)
class WorkerProfile:
    """What one worker found."""

    rank: int
    steps: list[StepTimes]
    sent: dict[str, float]
    """Bytes a step by kind of collective."""
    peak_memory: int | None
    """Bytes, of what `memory` says; None where the system does not tell."""
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
    batch: int
    """Pairs a step over all workers."""
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
        return sorted(
            self.workers, key=lambda worker: worker.mean("total") - worker.mean("pure_communication")
        )


class Column(NamedTuple):
    """A column of the table: a worker of each algorithm at one size."""

    heading: str
    size: int
    pick: Callable[[AlgorithmProfile], WorkerProfile]
    whole: bool
    """Whether it also has what is true of all workers together."""


class Row(NamedTuple):
    """A line of the table."""

    category: str
    algorithm: str
    cells: list[str]


def columns(profiles: list[AlgorithmProfile]) -> list[Column]:
    """One for a worker alone, two for several."""
    found = []
    for size in sizes(profiles):
        if size == 1:
            found.append(Column("1 worker", 1, lambda profile: profile.median, True))
            continue
        found.append(Column(f"{size} workers, median", size, lambda profile: profile.median, True))
        found.append(Column("slowest", size, lambda profile: profile.slowest, False))
    return found


def rows(profiles: list[AlgorithmProfile]) -> Iterator[Row]:
    """All lines, those of one category together."""
    by_place = {(profile.algorithm, profile.size): profile for profile in profiles}
    for category, cell in _categories(profiles):
        for algorithm in algorithms(profiles):
            cells = []
            for column in columns(profiles):
                profile = by_place.get((algorithm, column.size))
                cells.append("" if profile is None else cell(profile, column))
            if any(cells):
                yield Row(category, algorithm, cells)


def as_table(profiles: list[AlgorithmProfile]) -> Table:
    """For a terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("ms a step")
    table.add_column("algorithm", no_wrap=True)
    for column in columns(profiles):
        table.add_column(Text(column.heading), justify="right")
    last = ""
    for row in rows(profiles):
        table.add_row("" if row.category == last else row.category, row.algorithm, *row.cells)
        last = row.category
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
    for other in profiles:
        if (other.algorithm, other.size) == (profile.algorithm, fewest):
            return profile.samples_per_second / other.samples_per_second
    return None


Cell = Callable[[AlgorithmProfile, Column], str]


def _categories(profiles: list[AlgorithmProfile]) -> Iterator[tuple[str, Cell]]:
    for part, name in PARTS.items():
        yield name, _time(part)
    yield "samples/s", lambda profile, column: f"{profile.samples_per_second:,.1f}" if column.whole else ""
    if len(sizes(profiles)) > 1:
        fewest = sizes(profiles)[0]
        name = f"speed-up over {fewest} worker{'s' if fewest > 1 else ''}"
        yield name, lambda profile, column: _ratio(speed_up(profile, profiles)) if column.whole else ""
    for kind in sorted({kind for profile in profiles for worker in profile.workers for kind in worker.sent}):
        yield f"KiB sent, {kind}", _sent(kind)
    yield "peak memory, MiB", _peak


def _time(part: str) -> Cell:
    def mean_and_spread(profile: AlgorithmProfile, column: Column) -> str:
        worker = column.pick(profile)
        return f"{worker.mean(part):.2f} ({worker.spread(part):.2f})"

    return mean_and_spread


def _peak(profile: AlgorithmProfile, column: Column) -> str:
    peak = column.pick(profile).peak_memory
    return "?" if peak is None else f"{peak / 2**20:,.0f}"


def _sent(kind: str) -> Cell:
    def kibibytes(profile: AlgorithmProfile, column: Column) -> str:
        sent = column.pick(profile).sent.get(kind)
        return "" if sent is None else f"{sent / 2**10:,.1f}"

    return kibibytes


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ×"
