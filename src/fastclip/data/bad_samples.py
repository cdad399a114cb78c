"""Pairs that cannot be used: each is logged once and counted, and too many of them end the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from fastclip.checked_files import DamagedFile
from fastclip.data.manifest import Manifest
from fastclip.data.pairs import printable

_SHOWN = 5  # unusable pairs that an error lists
log = logging.getLogger(__name__)


class BadSample(NamedTuple):
    """A pair that could not be used, and the reason."""

    id: int
    file: str
    reason: str


class TooManyBadSamples(RuntimeError):
    """More than `max_bad` of the collection cannot be used.

    `reasons` and `files` count the unusable pairs.
    """

    def __init__(self, message: str, reasons: Mapping[str, int] = {}, files: Mapping[str, int] = {}):
        super().__init__(message)
        self.reasons, self.files = dict(reasons), dict(files)


class BadSampleLog:
    """Count samples that could not be used, log each once, and raise when there are too many.

    The limit applies to the whole collection, including pairs that indexing skipped. Each rank counts its own
    samples until the ranks exchange new ones (`take_new`).
    """

    def __init__(self, manifest: Manifest, max_bad: float):
        self.manifest, self.max_bad = manifest, max_bad
        self.left_out = sum(manifest.problem_counts.values())
        self.samples: dict[int, BadSample] = {}
        self._new: list[BadSample] = []
        self._check()

    def add(self, samples: Iterable[BadSample]) -> None:
        """Count and log those that are new."""
        for sample in samples:
            if sample.id not in self.samples:
                self.samples[sample.id] = sample
                self._new.append(sample)
                file, place = printable(sample.file), self._place(sample)
                log.warning("sample %d of %s%s is skipped: %s", sample.id, file, place, sample.reason)
        self._check()

    def take_new(self) -> list[BadSample]:
        """Return the samples found since the last call, for the other ranks."""
        new, self._new = self._new, []
        return new

    def restore(self, samples: Iterable[Sequence]) -> None:
        """Add samples that the run counted and logged before it was resumed."""
        self.samples |= {sample[0]: BadSample(*sample) for sample in samples}

    def summary(self) -> str:
        """One line for the end of a run: the number of unusable pairs, main reasons and worst files."""
        reasons, files = self._counts()
        if not reasons:
            return "All pairs could be used."
        why = ", ".join(f"{count:,} × {reason}" for reason, count in reasons.most_common(3))
        worst = ", ".join(f"{file} ({count:,})" for file, count in files.most_common(3))
        return f"{sum(reasons.values()):,} pairs could not be used: {why}. The worst files: {worst}."

    def first(self, most: int) -> list[str]:
        """The first unusable pairs, those that indexing skipped before others: file, place and reason."""
        skipped = [str(problem) for problem in islice(self.manifest.problems(), most)]
        found = [
            printable(f"{sample.file}{self._place(sample)}: {sample.reason}")
            for sample in islice(self.samples.values(), most)
        ]
        return [*skipped, *found][:most]

    def _place(self, sample: BadSample) -> str:
        position = self.manifest.position(sample.id)
        return f", {position}" if position else ""

    def _counts(self) -> tuple[Counter[str], Counter[str]]:
        """Unusable pairs by reason and by file, with those that indexing skipped."""
        reasons, files = Counter(sample.reason for sample in self.samples.values()), Counter[str]()
        for sample in self.samples:
            files[self.manifest.files[self.manifest.place(sample).file]] += 1
        try:
            for problem in self.manifest.problems():
                reasons[problem.reason] += problem.pairs
                files[problem.file] += problem.pairs
        except DamagedFile:  # the cache was deleted while the run trained: what is known without it
            reasons.update(self.manifest.problem_counts)
        return reasons, files

    def _check(self) -> None:
        if len(self.samples) + self.left_out > self.max_bad * (len(self.manifest) + self.left_out):
            message = (
                f"More than {self.max_bad:.1%} of the collection cannot be used. {self.summary()} "
                "Inspect the collection with `fastclip data check`, or allow more, e.g. --data.max_bad 0.05. "
                f"The first of them: {'; '.join(self.first(_SHOWN))}."
            )
            raise TooManyBadSamples(message, *self._counts())
