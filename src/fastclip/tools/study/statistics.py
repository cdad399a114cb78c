"""What several seeds say together: means and spreads, paired differences, and how soon a score is reached.

Runs of one seed see the same samples in the same order, so two arms are compared seed by seed: what a seed
does to both drops out of the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, sqrt
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

CONFIDENCE = 0.95


class Summary(NamedTuple):
    """Values of several seeds."""

    mean: float
    sd: float | None
    """With n − 1 below; None for one value alone."""
    n: int


class Difference(NamedTuple):
    """An arm minus its baseline, over the seeds that both have."""

    mean: float
    low: float | None
    """Of the two-sided 95 % t-interval; None where there is none."""
    high: float | None
    n: int

    @property
    def note(self) -> str:
        """Why there is no interval; empty if there is one."""
        return "" if self.low is not None else "one seed gives no interval"


class Point(NamedTuple):
    """An evaluation while a model trained."""

    samples: float
    seconds: float | None
    score: float


class Effort(NamedTuple):
    """What it took to come to the baseline's final score, as shares of what it took the baseline."""

    samples: float
    seconds: float | None
    """None where one of the two has no clock."""


def summarise(values: Iterable[float]) -> Summary:
    """Mean and standard deviation of at least one value."""
    found = np.asarray(list(values), dtype=np.float64)
    if not len(found):
        raise ValueError("There is no mean of no values; leave out what has no score.")
    sd = float(found.std(ddof=1)) if len(found) > 1 else None
    return Summary(float(found.mean()), sd, len(found))


def paired_difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Seed by seed, with its interval; None if no seed has both."""
    seeds = sorted(arm.keys() & baseline.keys())
    if not seeds:
        return None
    mean, sd, n = summarise(arm[seed] - baseline[seed] for seed in seeds)
    if sd is None:
        return Difference(mean, None, None, n)
    half = float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * sd / sqrt(n)
    return Difference(mean, mean - half, mean + half, n)


def first_reaching(points: Sequence[Point], score: float) -> Point | None:
    """The first evaluation at or above a score, in the order of samples; None if it is never reached.

    Nothing is guessed between two evaluations: how fine the answer is depends on how often was evaluated.
    """
    known = sorted((point for point in points if isfinite(point.score)), key=lambda point: point.samples)
    return next((point for point in known if point.score >= score), None)


def effort_to_match(arm: Sequence[Point], baseline: Sequence[Point]) -> Effort | None:
    """Samples and seconds until the arm has the baseline's final score, over the baseline's own.

    The baseline's own are those of its first evaluation at or above its final score. None if the arm never
    reaches it, or the baseline has no score that it had to train for.
    """
    known = [point for point in baseline if isfinite(point.score)]
    if not known:
        return None
    final = max(known, key=lambda point: point.samples).score
    own, reached = first_reaching(baseline, final), first_reaching(arm, final)
    if own is None or reached is None or own.samples <= 0:
        return None
    seconds = reached.seconds / own.seconds if own.seconds and reached.seconds is not None else None
    return Effort(reached.samples / own.samples, seconds)
