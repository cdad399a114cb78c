"""What runs measured while they trained: the measures, their courses, and how soon a score is reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import NamedTuple

from fastclip.run.folder import Run, number

IN_TRAINING = ("mean_recall@1", "tasks_mean", "image_retrieval_recall@1", "text_retrieval_recall@1")


class Point(NamedTuple):
    """An evaluation while a model trained."""

    samples: float
    seconds: float | None
    score: float


def measured(runs: Iterable[Run]) -> list[str]:
    """All measures of their evaluations, in the order of the records."""
    return list(dict.fromkeys(name for run in runs for e in run.evaluations for name in e["evaluation"]))


def main_measures(runs: Iterable[Run]) -> list[str]:
    """Those by which runs are compared while they train: the usual ones, or the first of any, or none."""
    names = measured(runs)
    return [name for name in IN_TRAINING if name in names] or names[:1]


def points(run: Run, measure: str) -> list[Point]:
    """A measure's course while a model trained, in the order of samples."""
    found = []
    for record in run.evaluations:
        score, samples = number(record["evaluation"].get(measure)), run.samples_at(record)
        if score is not None and samples is not None:
            found.append(Point(samples, run.seconds_at(record), score))
    return found


def first_reaching(points: Sequence[Point], score: float) -> Point | None:
    """The first evaluation at or above a score, in the order of samples; None if it is never reached.

    Nothing is guessed between two evaluations: how fine the answer is depends on how often was evaluated.
    """
    return min((p for p in points if score <= p.score < inf), key=lambda p: p.samples, default=None)


def effort_to_match(arm: Sequence[Point], baseline: Sequence[Point]) -> tuple[float, float | None] | None:
    """Samples and seconds until the arm has the baseline's final score, over the baseline's own.

    The baseline's own are those of its first evaluation at or above its final score. None if the arm never
    reaches it, or the baseline has no score that it had to train for; no seconds where one has no clock.
    """
    final = max((p for p in baseline if isfinite(p.score)), key=lambda p: p.samples, default=None)
    if final is None:
        return None
    own, reached = first_reaching(baseline, final.score), first_reaching(arm, final.score)
    if own is None or reached is None or own.samples <= 0:
        return None
    seconds = reached.seconds / own.seconds if own.seconds and reached.seconds is not None else None
    return reached.samples / own.samples, seconds
