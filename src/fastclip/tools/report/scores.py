"""Scores of `fastclip eval`, grouped by suite: means, scores of tasks, and tasks that failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fastclip.evaluation.suites import SUITES, Mean, find_suite
from fastclip.run.folder import number
from fastclip.run.results import Result


class Score(NamedTuple):
    """The score of a task."""

    name: str
    measure: str
    value: float
    images: int
    """Images that could be used."""
    others: dict[str, float]
    """Its other metrics."""


@dataclass
class Group:
    """The tasks of one suite, or of none."""

    title: str
    scores: list[Score] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Tasks and their errors."""
    unscored: int = 0
    """Tasks of the suite without a score."""


def group_scores(results: list[Result]) -> list[Group]:
    """Group results by suite, tasks in the suite's order; tasks of no suite come last."""
    left = {result.task: result for result in results}
    groups = []
    for name in _suites(left):
        suite = find_suite(name)
        rows = [row for row in suite.rows if row.folder in left]
        group = _group(suite.title, {row.name: left.pop(row.folder) for row in rows})
        values = {row.folder: score.value for row in rows for score in group.scores if score.name == row.name}
        group.means = [mean for mean in suite.means(values) if mean.found]
        group.unscored = len(suite.rows) - len(values)
        groups.append(group)
    if left:
        groups.append(_group("Other tasks" if groups else "Tasks", left))
    return groups


def _suites(tasks: dict[str, Result]) -> list[str]:
    """The fewest suites that contain the tasks: the icon suite includes the emoji tasks."""
    scored = {name: {row.folder for row in find_suite(name).rows} & tasks.keys() for name in SUITES}
    chosen, left = set(), {*tasks}
    for name in sorted(SUITES, key=lambda name: len(scored[name]), reverse=True):  # stable
        if scored[name] & left:
            chosen.add(name)
            left -= scored[name]
    return [name for name in reversed(SUITES) if name in chosen]  # DataComp last


def _group(title: str, results: dict[str, Result]) -> Group:
    group = Group(title)
    for name, result in results.items():
        value = number(result.value)
        if result.error or value is None:
            group.failed.append((name, result.error or f"the result has no {result.measure or 'metric'}"))
            continue
        others = {key: v for key, score in result.scores.items() if (v := number(score)) is not None}
        others.pop(result.measure)
        group.scores.append(Score(name, result.measure, value, result.images - result.unusable, others))
    return group
