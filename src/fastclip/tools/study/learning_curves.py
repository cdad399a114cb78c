"""Metrics over the course of training: which there are, their curves, and how soon a score is reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import NamedTuple

from fastclip.run.folder import Run, number

IN_TRAINING = ("mean_recall@1", "tasks_mean", "image_retrieval_recall@1", "text_retrieval_recall@1")


class Point(NamedTuple):
    """An evaluation during training."""

    samples: float
    seconds: float | None
    score: float


def measured(runs: Iterable[Run]) -> list[str]:
    """All metrics of their evaluations, in the order of the records."""
    return list(dict.fromkeys(name for run in runs for e in run.evaluations for name in e["evaluation"]))


def main_measures(runs: Iterable[Run]) -> list[str]:
    """The metrics that compare runs in training: the usual ones, or else the first there is."""
    names = measured(runs)
    return [name for name in IN_TRAINING if name in names] or names[:1]


def points(run: Run, measure: str) -> list[Point]:
    """The learning curve of a metric, in the order of samples."""
    curve = []
    for record in run.evaluations:
        score, samples = number(record["evaluation"].get(measure)), run.samples_at(record)
        if score is not None and samples is not None:
            curve.append(Point(samples, run.seconds_at(record), score))
    return curve


def first_reaching(points: Sequence[Point], score: float) -> Point | None:
    """The first evaluation at or above a score, in the order of samples; None if it is never reached.

    Nothing is interpolated: the resolution is the interval between evaluations.
    """
    return min((p for p in points if score <= p.score < inf), key=lambda p: p.samples, default=None)


def effort_to_match(arm: Sequence[Point], baseline: Sequence[Point]) -> tuple[float, float | None] | None:
    """Samples and seconds that the arm takes to reach the baseline's final score, relative to the baseline.

    The baseline reaches it at its first evaluation at or above it. None if the arm never reaches it, or the
    baseline has it before training; seconds are None if either has no clock.
    """
    final = max((p for p in baseline if isfinite(p.score)), key=lambda p: p.samples, default=None)
    if final is None:
        return None
    own, reached = first_reaching(baseline, final.score), first_reaching(arm, final.score)
    if own is None or reached is None or own.samples <= 0:
        return None
    seconds = reached.seconds / own.seconds if own.seconds and reached.seconds is not None else None
    return reached.samples / own.samples, seconds
