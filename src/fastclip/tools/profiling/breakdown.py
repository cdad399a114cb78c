"""The profiles of all ranks as one table of the paper's form: categories, algorithms, numbers of ranks.

The slowest rank is the one that the others wait for. In a synchronous step all ranks take the same time, and
the last to arrive spends the least of it waiting: ranks are ordered by their time outside pure communication.
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
"""The fields of StepTimes and their names in the table, in the order of the paper's."""
_SENT = "KiB sent, "  # followed by the kind of collective


@dataclass(frozen=True)
class RankProfile:
    """The measurements of one rank."""

    rank: int
    steps: list[StepTimes]
    sent: dict[str, float]  # bytes per step by kind of collective
    peak_memory: int | None  # bytes; None where the system does not report it
    memory: str  # what peak_memory measures

    def mean(self, part: str) -> float:
        """The mean of a field of StepTimes over all steps, in ms."""
        return fmean(getattr(step, part) for step in self.steps)

    def spread(self, part: str) -> float:
        """Its standard deviation over the steps; 0 for a single step."""
        return stdev(getattr(step, part) for step in self.steps) if len(self.steps) > 1 else 0.0


@dataclass(frozen=True)
class AlgorithmProfile:
    """One algorithm with one number of ranks. The fields are the keys of profile.json."""

    algorithm: str
    batch: int  # the global batch
    workers: list[RankProfile]

    @classmethod
    def from_dict(cls, saved: dict) -> AlgorithmProfile:
        """Undo dataclasses.asdict."""
        ranks = [
            RankProfile(**rank | {"steps": [StepTimes(**step) for step in rank["steps"]]})
            for rank in saved["workers"]
        ]
        return cls(saved["algorithm"], saved["batch"], ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.workers)

    @property
    def median(self) -> RankProfile:
        """The rank in the middle; of two, the less late."""
        return self._by_lateness()[(self.num_ranks - 1) // 2]

    @property
    def slowest(self) -> RankProfile:
        """The rank that the others wait for."""
        return self._by_lateness()[-1]

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together, by the steps of the rank that took longest."""
        return self.batch / max(rank.mean("total") for rank in self.workers) * 1000

    def _by_lateness(self) -> list[RankProfile]:
        return sorted(self.workers, key=lambda rank: rank.mean("total") - rank.mean("pure_communication"))


def columns(profiles: list[AlgorithmProfile]) -> list[tuple[int, str]]:
    """Numbers of ranks, each with `median` and, for several ranks, `slowest`."""
    return [(n, which) for n in rank_counts(profiles) for which in ("median", "slowest")[: min(n, 2)]]


def rows(profiles: list[AlgorithmProfile]) -> Iterator[tuple[str, str, list[str]]]:
    """Category, algorithm, and a cell for each of `columns`; rows of one category are adjacent."""
    by_place = {(profile.algorithm, profile.num_ranks): profile for profile in profiles}
    kinds = sorted({kind for profile in profiles for rank in profile.workers for kind in rank.sent})
    sent = [f"{_SENT}{kind}" for kind in kinds]
    for category in (*PARTS.values(), "samples/s", _speed_up_over(profiles), *sent, "peak memory, MiB"):
        for algorithm in algorithms(profiles):
            measured = [(by_place.get((algorithm, n)), which) for n, which in columns(profiles)]
            cells = [_cells(p, which, profiles).get(category, "") if p else "" for p, which in measured]
            if any(cells):
                yield category, algorithm, cells


def _cells(profile: AlgorithmProfile, which: str, profiles: list[AlgorithmProfile]) -> dict[str, str]:
    """A column of one algorithm by category; totals over all ranks are in the median's column."""
    rank: RankProfile = getattr(profile, which)
    cells = {name: f"{rank.mean(part):.2f} ({rank.spread(part):.2f})" for part, name in PARTS.items()}
    if which == "median":
        cells["samples/s"] = f"{profile.samples_per_second:,.1f}"
        ratio = speed_up(profile, profiles) if len(rank_counts(profiles)) > 1 else None
        cells[_speed_up_over(profiles)] = "" if ratio is None else f"{ratio:.2f} ×"
    cells |= {f"{_SENT}{kind}": f"{count / 2**10:,.1f}" for kind, count in rank.sent.items()}
    peak = rank.peak_memory
    return cells | {"peak memory, MiB": "?" if peak is None else f"{peak / 2**20:,.0f}"}


def _speed_up_over(profiles: list[AlgorithmProfile]) -> str:
    return f"speed-up over {ranks_text(min(rank_counts(profiles)))}"


def ranks_text(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def as_table(profiles: list[AlgorithmProfile]) -> Table:
    """The table for a terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("ms per step")
    table.add_column("algorithm", no_wrap=True)
    for count, which in columns(profiles):
        heading = "1 rank" if count == 1 else f"{count} ranks, median" if which == "median" else which
        table.add_column(heading, justify="right")
    last = ""
    for category, algorithm, cells in rows(profiles):
        table.add_row("" if category == last else category, algorithm, *cells)
        last = category
    return table


def rank_counts(profiles: list[AlgorithmProfile]) -> list[int]:
    """The numbers of ranks, in ascending order."""
    return sorted({profile.num_ranks for profile in profiles})


def algorithms(profiles: list[AlgorithmProfile]) -> list[str]:
    """In the order of the command line."""
    return list(dict.fromkeys(profile.algorithm for profile in profiles))


def speed_up(profile: AlgorithmProfile, profiles: list[AlgorithmProfile]) -> float | None:
    """Samples/s relative to the fewest ranks; None if this algorithm was not measured there."""
    fewest = min(rank_counts(profiles))
    rates = {p.algorithm: p.samples_per_second for p in profiles if p.num_ranks == fewest}
    return profile.samples_per_second / rates[profile.algorithm] if profile.algorithm in rates else None
