"""A study's scores by measure, arm and seed: of tasks, of the paper's means over them, and while training.

A mean is taken over the same tasks in every run: a run that lacks one of them has no mean, and is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fastclip.evaluation.tasks import find_suite
from fastclip.run.folder import Run, number, read_run
from fastclip.tools.study.statistics import Point
from fastclip.tools.study.study import StudyRun, StudyState

IN_TRAINING = ("mean_recall@1", "tasks_mean", "image_retrieval_recall@1", "text_retrieval_recall@1")


@dataclass
class Measure:
    """One measure of all runs that have it."""

    name: str
    kind: Literal["mean", "task", "training"]
    about: str
    """What the number is, in a few words."""
    partial: str = ""
    """Why a mean is not the full one; empty if it is."""
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    """By arm and seed; shares of 1."""


@dataclass
class Scores:
    """All that the finished runs of a study were given."""

    measures: list[Measure] = field(default_factory=list)
    runs: dict[str, dict[int, Run]] = field(default_factory=dict)
    """The finished runs by arm and seed."""
    missing: list[str] = field(default_factory=list)
    """What is not counted, as sentences."""


class Group(NamedTuple):
    """Tasks over which a mean is taken."""

    name: str
    folders: tuple[str, ...]
    tasks: int
    """How many it has when all are there."""


def read_scores(state: StudyState) -> Scores:
    """The scores of every run that is done; what is not done, broken or not scored is told."""
    scores = Scores(runs={arm.name: {} for arm in state.arms})
    for run in state.runs:
        if run.state != "done":
            scores.missing.append(_not_done(run))
            continue
        try:
            scores.runs[run.arm.name][run.seed] = read_run(run.folder, settings=False)
        except (OSError, ValueError) as error:
            scores.missing.append(f"{run.folder.name} is not counted: {error}")
    for name, runs in scores.runs.items():
        if not any(run.arm.name == name for run in state.runs):
            scores.missing.append(f"The arm {name} has no run.")
        for found in runs.values():
            scores.missing += [f"{found.name}: {told}" for told in found.missing if "left out" in told]
    tasks = _tasks(scores)
    wanted = groups(_kinds(scores), state.suite)
    scores.measures = [*_means(tasks, wanted, scores.missing), *tasks.values(), *_in_training(scores)]
    return scores


def points(run: Run, measure: str) -> list[Point]:
    """A measure's course while a model trained, in the order of samples."""
    found = []
    for record in run.evaluations:
        score, samples = number(record["evaluation"].get(measure)), run.samples_at(record)
        if score is not None and samples is not None:
            found.append(Point(samples, run.seconds_at(record), score))
    return found


def training_measure(runs: Iterable[Run]) -> str | None:
    """The one by which runs are compared while they train: the first of the usual ones, or any."""
    measured = list(dict.fromkeys(name for run in runs for e in run.evaluations for name in e["evaluation"]))
    return next((name for name in (*IN_TRAINING, *measured) if name in measured), None)


def groups(kinds: dict[str, str], suite: str | None) -> list[Group]:
    """The paper's three means: over a suite's tasks, or over these, by the kind of each."""
    if suite == "datacomp":  # its means have names of their own
        rows = find_suite(suite).rows
        of = {name: (rows if group is None else [row for row in rows if row.group == group])
              for name, group in find_suite(suite).groups.items()}  # fmt: skip
        return [Group(name, tuple(row.folder for row in rows), len(rows)) for name, rows in of.items()]
    if suite is not None:
        kinds = {row.folder: row.group for row in find_suite(suite).rows}
    retrieval = tuple(task for task, kind in kinds.items() if kind == "retrieval")
    others = tuple(task for task in kinds if task not in retrieval)
    named = {"Mean": tuple(kinds), "Retrieval": retrieval, "Classification & Variants": others}
    return [Group(name, tasks, len(tasks)) for name, tasks in named.items() if tasks]


def _not_done(run: StudyRun) -> str:
    reason = f" {run.error.strip().splitlines()[-1]}" if run.error.strip() else ""
    what = "failed" if run.state == "failed" else "has not finished"
    return f"{run.folder.name} {what} and is not counted.{reason}"


def _tasks(scores: Scores) -> dict[str, Measure]:
    """A measure for each task that any run was scored on."""
    found: dict[str, Measure] = {}
    for arm, runs in scores.runs.items():
        for seed, run in runs.items():
            for result in run.results:
                value = number(result.value)
                if result.error or value is None:
                    why = result.error or f"it has no {result.measure or 'measure'}"
                    scores.missing.append(f"{run.name} has no score of {result.task}: {why}")
                    continue
                measure = found.setdefault(result.task, Measure(result.task, "task", result.measure))
                measure.values.setdefault(arm, {})[seed] = value
    return found


def _kinds(scores: Scores) -> dict[str, str]:
    runs = [run for seeds in scores.runs.values() for run in seeds.values()]
    return {result.task: result.kind for run in runs for result in run.results if not result.error}


def _means(tasks: dict[str, Measure], wanted: list[Group], missing: list[str]) -> list[Measure]:
    found = []
    for group in wanted:
        here = [tasks[folder] for folder in group.folders if folder in tasks]
        if not here:
            continue
        partial = f"{len(here)} of {group.tasks} tasks" if len(here) < group.tasks else ""
        mean = Measure(group.name, "mean", f"mean over {len(here)} task{'s' * (len(here) != 1)}", partial)
        scored = {(arm, seed) for task in here for arm, seeds in task.values.items() for seed in seeds}
        for arm, seed in sorted(scored):
            values = [task.values.get(arm, {}).get(seed) for task in here]
            known = [value for value in values if value is not None]
            if len(known) == len(here):
                mean.values.setdefault(arm, {})[seed] = sum(known) / len(known)
            else:
                missing.append(
                    f"{arm}, seed {seed}, has {len(known)} of the {len(here)} tasks of {group.name} that "
                    "others were scored on: it is left out of that mean."
                )
        found.append(mean)
    return found


def _in_training(scores: Scores) -> list[Measure]:
    """The last evaluation of each run."""
    found: dict[str, Measure] = {}
    for arm, runs in scores.runs.items():
        for seed, run in runs.items():
            last = run.evaluations[-1]["evaluation"] if run.evaluations else {}
            for name in (name for name in IN_TRAINING if name in last):
                value = number(last[name])
                if value is not None:
                    measure = found.setdefault(name, Measure(name, "training", "at the end of training"))
                    measure.values.setdefault(arm, {})[seed] = value
    return list(found.values())
