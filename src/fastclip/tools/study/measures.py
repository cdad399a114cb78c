"""A study's scores by measure, arm and seed: of tasks, of the paper's means over them, and while training.

A mean is taken over the same tasks in every run: a run that lacks one of them has no mean, and is told.
Runs of one seed see the same samples in the same order, so two arms are compared seed by seed: what a seed
does to both drops out of the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t as student

from fastclip.evaluation.tasks import find_suite
from fastclip.run.folder import Run, number, read_run
from fastclip.tools.study.courses import IN_TRAINING
from fastclip.tools.study.study import StudyRun, StudyState

CONFIDENCE = 0.95
_COLUMNS = ["kind", "measure", "about", "partial", "arm", "seed", "value"]


@dataclass
class Scores:
    """All that the finished runs of a study were given."""

    frame: pd.DataFrame
    """A row for each score, means first: its `kind` (mean, task or training), `measure`, what the number is
    `about` in a few words, why a mean is `partial` or "", `arm`, `seed`, and the `value` as a share of 1, NaN
    for the mean of a run that lacks a task."""
    runs: dict[str, dict[int, Run]]
    """The finished runs by arm and seed."""
    missing: list[str]
    """What is not counted, as sentences."""

    @property
    def all_runs(self) -> list[Run]:
        return [run for seeds in self.runs.values() for run in seeds.values()]


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
    """Of the two-sided 95 % t-interval; None where there is none: one seed gives no interval."""
    high: float | None
    n: int


def read_scores(state: StudyState) -> Scores:
    """The scores of every run that is done; what is not done, broken or not scored is told."""
    runs: dict[str, dict[int, Run]] = {arm.name: {} for arm in state.arms}
    missing = []
    for run in state.runs:
        try:
            if run.state == "done":
                runs[run.arm.name][run.seed] = read_run(run.folder, settings=False)
            else:
                missing.append(_not_done(run))
        except (OSError, ValueError) as error:
            missing.append(f"{run.folder.name} is not counted: {error}")
    scores = Scores(pd.DataFrame(columns=_COLUMNS), runs, missing)
    missing += [
        f"{run.name}: {told}" for run in scores.all_runs for told in run.missing if "left out" in told
    ]
    tasks, training = _frame(_tasks(scores)), _frame(_in_training(scores))
    kinds = {
        result.task: result.kind for run in scores.all_runs for result in run.results if not result.error
    }
    frames = [*_means(tasks, groups(kinds, state.study.suite), missing), tasks, training]
    scores.frame = pd.concat([frame for frame in frames if len(frame)] or frames)
    return scores


def groups(kinds: dict[str, str], suite: str | None) -> dict[str, tuple[str, ...]]:
    """The tasks of the paper's three means: a suite's tasks, or these, by the kind of each."""
    if suite == "datacomp":  # its means have names of their own
        found = find_suite(suite)
        return {
            name: tuple(row.folder for row in found.rows if group in (None, row.group))
            for name, group in found.groups.items()
        }
    if suite is not None:
        kinds = {row.folder: row.group for row in find_suite(suite).rows}
    retrieval = tuple(task for task, kind in kinds.items() if kind == "retrieval")
    others = tuple(task for task in kinds if task not in retrieval)
    named = {"Mean": tuple(kinds), "Retrieval": retrieval, "Classification & Variants": others}
    return {name: tasks for name, tasks in named.items() if tasks}


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


def _not_done(run: StudyRun) -> str:
    reason = f" {run.error.strip().splitlines()[-1]}" if run.error.strip() else ""
    what = "failed" if run.state == "failed" else "has not finished"
    return f"{run.folder.name} {what} and is not counted.{reason}"


def _frame(rows: Iterable[tuple]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=_COLUMNS)


def _tasks(scores: Scores) -> Iterable[tuple]:
    """Every score of `fastclip eval`."""
    for arm, runs in scores.runs.items():
        for seed, run in runs.items():
            for result in run.results:
                value = number(result.value)
                if result.error or value is None:
                    why = result.error or f"it has no {result.measure or 'measure'}"
                    scores.missing.append(f"{run.name} has no score of {result.task}: {why}")
                else:
                    yield "task", result.task, result.measure, "", arm, seed, value


def _in_training(scores: Scores) -> Iterable[tuple]:
    """The last evaluation of each run."""
    for arm, runs in scores.runs.items():
        for seed, run in runs.items():
            last = run.evaluations[-1]["evaluation"] if run.evaluations else {}
            for name in IN_TRAINING:
                if (value := number(last.get(name))) is not None:
                    yield "training", name, "at the end of training", "", arm, seed, value


def _means(
    tasks: pd.DataFrame, wanted: dict[str, tuple[str, ...]], missing: list[str]
) -> Iterable[pd.DataFrame]:
    wide = tasks.pivot(index=["arm", "seed"], columns="measure", values="value")
    for name, folders in wanted.items():
        here = [folder for folder in folders if folder in wide]
        if not here:
            continue
        for (arm, seed), count in wide[here].count(axis=1).items():
            if 0 < count < len(here):
                missing.append(
                    f"{arm}, seed {seed}, has {count} of the {len(here)} tasks of {name} that "
                    "others were scored on: it is left out of that mean."
                )
        mean = (sum(wide[folder] for folder in here) / len(here)).rename("value").reset_index()
        about = f"mean over {len(here)} task{'s' * (len(here) != 1)}"
        partial = f"{len(here)} of {len(folders)} tasks" if len(here) < len(folders) else ""
        yield mean.assign(kind="mean", measure=name, about=about, partial=partial)
