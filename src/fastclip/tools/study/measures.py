"""A study's scores by metric, arm and seed: of tasks, of the paper's means over them, and in training.

A mean is over the same tasks in every run: a run that lacks one of them has no mean, and is reported. Runs
with the same seed see the same samples in the same order, so arms are compared seed by seed: the effect of
the seed on both cancels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

from fastclip.errors import InputError
from fastclip.evaluation.suites import find_suite
from fastclip.run.folder import METRICS, RESULTS, Run, number, read_run
from fastclip.tools.study.learning_curves import IN_TRAINING
from fastclip.tools.study.study_state import StudyState

CONFIDENCE = 0.95


@dataclass
class Scores:
    """All scores of a study's finished runs."""

    frame: pd.DataFrame
    """One row per score, means first: `kind` (mean, task or training), `measure`, `about` (a short
    description), `partial` (why a mean is, or ""), `arm`, `seed` and `value`: a fraction of 1, NaN for the
    mean of a run that lacks a task."""
    runs: dict[str, dict[int, Run]]
    """The finished runs by arm and seed."""
    missing: list[str]
    """What is not counted and why, as sentences."""

    @property
    def all_runs(self) -> list[Run]:
        return [run for seeds in self.runs.values() for run in seeds.values()]


def read_scores(state: StudyState) -> Scores:
    """The scores of every finished run; others are listed in `missing`."""
    runs: dict[str, dict[int, Run]] = {arm.name: {} for arm in state.arms}
    missing = []
    for run in state.runs:
        try:
            if run.state == "done":
                runs[run.arm.name][run.seed] = read_run(run.folder, settings=False)
                continue
            why = f" {run.error.strip().splitlines()[-1]}" if run.error.strip() else ""
            outcome = "failed" if run.state == "failed" else "has not finished"
            missing.append(f"{run.name} {outcome} and is not counted.{why}")
        except (OSError, ValueError) as error:
            missing.append(f"{run.name} is not counted: {error}")
    done = [run for seeds in runs.values() for run in seeds.values()]
    skipped = (f"{METRICS}: ", f"{RESULTS}: ")  # sentences about lines of these files
    missing += [f"{run.name}: {one}" for run in done for one in run.missing if one.startswith(skipped)]
    kinds = {result.task: result.kind for run in done for result in run.results if not result.error}
    found = pd.DataFrame(
        [
            (kind, measure, about, "", arm, seed, value)
            for arm, seeds in runs.items()
            for seed, run in seeds.items()
            for kind, measure, about, value in _of_run(run, missing)
        ],
        columns=["kind", "measure", "about", "partial", "arm", "seed", "value"],
    )
    tasks, training = (found[found.kind == kind] for kind in ("task", "training"))
    means = _means(tasks, groups(kinds, state.study.suite), missing)
    return Scores(pd.concat([*means, tasks, training]), runs, missing)


def groups(kinds: dict[str, str], suite: str | None) -> dict[str, tuple[str, ...]]:
    """The tasks of the paper's three means: of a suite, or else of these tasks and their kinds."""
    if suite == "datacomp":  # its means have their own names
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


def summarise(values: Iterable[float]) -> dict[str, Any]:
    """The `mean`, the sample `sd` (None for a single value) and `n` of at least one value."""
    found = np.asarray(list(values), dtype=np.float64)
    if not len(found):
        raise InputError("values", "must not be empty.")
    sd = float(found.std(ddof=1)) if len(found) > 1 else None
    return {"mean": float(found.mean()), "sd": sd, "n": len(found)}


def paired_difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, Any] | None:
    """An arm minus its baseline, over the `n` seeds that both have; None if there are none.

    The `mean`, and `low` and `high` of the two-sided 95 % t-interval, which are None for a single seed.
    """
    seeds = sorted(arm.keys() & baseline.keys())
    if not seeds:
        return None
    differences = {seed: arm[seed] - baseline[seed] for seed in seeds}
    low, high = interval_of(differences)
    return {"mean": summarise(differences.values())["mean"], "low": low, "high": high, "n": len(seeds)}


def interval_of(values: Mapping[Any, float]) -> tuple[float | None, float | None]:
    """Both ends of the two-sided 95 % t-interval of the mean over seeds; None for fewer than two."""
    if len(values) < 2:
        return None, None
    mean, sd, n = summarise(values.values()).values()
    half = float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * sd / sqrt(n)
    return mean - half, mean + half


def _of_run(run: Run, missing: list[str]) -> Iterator[tuple]:
    """The scores of `fastclip eval` and of the last evaluation in training: kind, measure, about, value."""
    for result in run.results:
        value = number(result.value)
        if result.error or value is None:
            why = result.error or f"{result.measure or 'the metric'} is missing"
            missing.append(f"{run.name} has no score for {result.task}: {why}")
        else:
            yield "task", result.task, result.measure, value
    last = run.evaluations[-1]["evaluation"] if run.evaluations else {}
    for name in IN_TRAINING:
        if (value := number(last.get(name))) is not None:
            yield "training", name, "at the end of training", value


def _means(
    tasks: pd.DataFrame, wanted: dict[str, tuple[str, ...]], missing: list[str]
) -> Iterator[pd.DataFrame]:
    wide = tasks.pivot(index=["arm", "seed"], columns="measure", values="value")
    for name, folders in wanted.items():
        here = [folder for folder in folders if folder in wide]
        if not here:
            continue
        for (arm, seed), count in wide[here].count(axis=1).items():
            if 0 < count < len(here):
                missing.append(
                    f"{arm}, seed {seed}, has {count} of the {len(here)} tasks of {name} that "
                    "others were scored on, and is excluded from that mean."
                )
        mean = (sum(wide[folder] for folder in here) / len(here)).rename("value").reset_index()
        about = f"mean over {len(here)} task{'s' * (len(here) != 1)}"
        partial = f"{len(here)} of {len(folders)} tasks" if len(here) < len(folders) else ""
        yield mean.assign(kind="mean", measure=name, about=about, partial=partial)
