"""The page of a study: tables, learning curves of its arms, tuned values, and missing runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pandas as pd
import yaml

from fastclip.run.folder import Run, State, without_secrets
from fastclip.tools.report.curves import SAMPLES, Axis, Curve, Line, has_points, measure_title, time_axis
from fastclip.tools.report.key_figures import Figure
from fastclip.tools.report.output import Page, drawn, fill
from fastclip.tools.study.arms import Arm, find_baselines, identity, shown
from fastclip.tools.study.learning_curves import Point, main_measures, points
from fastclip.tools.study.measures import Scores, read_scores
from fastclip.tools.study.rendering import difference_of, grids, of_kind, points_of
from fastclip.tools.study.result_tables import study_tables
from fastclip.tools.study.study_state import StudyState

MAX_ARMS = 10  # in one plot; more could not be distinguished
_FEW_ARMS = 5  # fit into one plot easily


def render_study(state: StudyState) -> Page:
    """The page and the curves on it; an empty study has a page, too."""
    scores = read_scores(state)
    tables = study_tables(state, scores)
    settings = {name: value for name, value in asdict(state.study).items() if value not in (None, {}, [])}
    options, training = against_options(tables), learning_curves(state, scores)
    html = fill(
        "study.html",
        name=tables["study"],
        about=_about(state),
        state=progress_of(state),
        figures=_key_figures(tables),
        missing=tables["missing"],
        grids=list(grids(tables)),
        options=drawn(options),
        training=drawn(training),
        runs=state.runs,
        settings=without_secrets(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)),
    )
    return Page(html, [*options, *training])


def progress_of(state: StudyState) -> State:
    """How many of its runs are done and how many failed."""
    counts = Counter(run.state for run in state.runs)
    total, done, failed = len(state.runs), counts["done"], counts["failed"]
    if total and done == total:
        return State("finished", f"all {total:,} runs are done")
    counted = f"{done:,} of {total:,} runs done{f', {failed:,} failed' if failed else ''}"
    return State("stopped" if failed else "in progress", f"{counted}; run the same command to continue")


def learning_curves(state: StudyState, scores: Scores) -> list[Curve]:
    """Training metrics against samples and time: one line per arm, with a band of ± sd.

    If there are many arms, those compared with the same baseline share a plot, and only the main metric is
    drawn.
    """
    names, groups = main_measures(scores.all_runs), _group_arms(state.arms, state.study.baseline)
    ends = [run.seconds_at(last) or 0.0 for run in scores.all_runs for last in run.evaluations[-1:]]
    axes = (SAMPLES, time_axis(max(ends, default=0.0)))
    curves = [
        _learning_curve(scores, arms, label, name, axis)
        for name in (names if len(groups) == 1 else names[:1])
        for label, arms in groups.items()
        for axis in axes
    ]
    return [curve for curve in curves if has_points(curve)]


def mean_learning_curve(runs: Iterable[Run], measure: str) -> pd.DataFrame:
    """Points where all runs were evaluated: `samples`, mean `seconds` and `score`, `sd` (0 for one run)."""
    curves = [curve for run in runs if (curve := points(run, measure))]
    every = pd.DataFrame([point for curve in curves for point in curve], columns=Point._fields, dtype=float)
    there = every.groupby("samples")
    mean = there.mean().assign(sd=there["score"].std().fillna(0.0))
    mean["seconds"] = mean["seconds"].where(there["seconds"].count() == there.size())  # all know the time
    return mean[there.size() >= len(curves)].reset_index()


def against_options(tables: dict[str, Any]) -> list[Curve]:
    """Final scores against each varied numeric option, with error bars of ± sd."""
    chosen = of_kind(tables, "mean") or of_kind(tables, "training")[:1]
    options = dict.fromkeys(option for arm in tables["arms"] for option in arm["values"])
    curves = [_against(tables["arms"], measure, option) for option in options for measure in chosen]
    return [curve for curve in curves if curve.lines]


def _about(state: StudyState) -> list[str]:
    study, arms, seeds = state.study, len(state.arms), len(state.study.seeds)
    about = [f"{arms:,} arm{'s' * (arms != 1)}", f"{seeds:,} seed{'s' * (seeds != 1)}"]
    return [*about, f"recipe {study.config}", *([f"suite {study.suite}"] if study.suite else [])]


def _key_figures(tables: dict[str, Any]) -> list[Figure]:
    """The best arm of the first table, and its largest gain over a baseline."""
    figures = []
    for measure in [*of_kind(tables, "mean"), *of_kind(tables, "training")][:1]:
        name, partial = measure["name"], f", partial: {measure['partial']}" if measure["partial"] else ""
        scored = [row for row in measure["rows"] if row["summary"] and not row["missing"]]
        if scored:
            best = max(scored, key=lambda row: row["summary"]["mean"])
            value = f"{100 * best['summary']['mean']:.2f} %"
            figures.append(Figure(f"best {name}", value, f"{best['arm']}{partial}"))
        compared = [row for row in scored if row["difference"]]
        if compared:
            most = max(compared, key=lambda row: row["difference"]["mean"])
            gain = points_of(most["difference"]["mean"])
            over = f"{most['arm']} over {most['baseline']}, paired by seed: {difference_of(most)}"
            figures.append(Figure("largest gain", gain, f"points of {name}: {over}"))
    return figures


def _group_arms(arms: list[Arm], baseline: dict[str, object]) -> dict[str, list[Arm]]:
    """The arms of each plot by what they have in common; one plot if there are few arms or no baseline."""
    baselines, by_name = find_baselines(arms, baseline), {arm.name: arm for arm in arms}
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        reference = by_name[baselines[arm.name] or arm.name]
        groups.setdefault(_label(reference.values, without=baseline), []).append(arm)
    return groups if len(arms) > _FEW_ARMS and baseline and len(groups) < len(arms) else {"": arms}


def _learning_curve(scores: Scores, arms: list[Arm], label: str, measure: str, axis: Axis) -> Curve:
    lines = []
    for arm in arms[:MAX_ARMS]:
        curve = mean_learning_curve(scores.runs[arm.name].values(), measure)
        x = curve["samples"] if axis is SAMPLES else curve["seconds"] / axis.seconds
        if len(curve):
            lines.append(Line(arm.name, list(x), list(100 * curve["score"]), list(100 * curve["sd"])))
    title = ", ".join(filter(None, (measure_title(measure, axis), label)))
    hidden = len(arms) - MAX_ARMS
    more = f" The tables have {hidden} more arm{'s' * (hidden != 1)}." if hidden > 0 else ""
    caption = f"{measure} during training: mean over seeds, with a band of ± sd.{more}"
    key = "-".join(filter(None, ("course", _safe(measure), _safe(label), axis.key)))
    return Curve(key, title, "% correct", caption, lines, from_zero=True, axis=axis.label)


def _against(arms: list[dict], measure: dict, option: str) -> Curve:
    """No lines if the option is not numeric, or if no two arms differ only in it."""
    name = measure["name"]
    lines: dict[str, tuple[str, list]] = {}
    for arm, row in zip(arms, measure["rows"], strict=True):
        value, summary = arm["values"].get(option), row["summary"]
        if summary is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        others = {key: other for key, other in arm["values"].items() if key != option}
        point = (float(value), 100 * summary["mean"], 100 * (summary["sd"] or 0.0))
        lines.setdefault(identity(others), (_label(others) or name, []))[1].append(point)
    drawn = [
        Line(label, *(list(column) for column in zip(*sorted(rows), strict=True)))
        for label, rows in lines.values()
        if len(rows) > 1
    ][:MAX_ARMS]
    partial = f" Partial: {measure['partial']}." if measure["partial"] else ""
    caption = f"Final {name}: mean over seeds, with error bars of ± sd.{partial}"
    key, title = f"against-{_safe(option)}-{_safe(name)}", f"{name} against {option}"
    ticks = tuple(sorted({x for line in drawn for x in line.x}))
    return Curve(key, title, "%", caption, drawn, axis=option, ticks=ticks)


def _label(values: dict[str, object], without: Iterable[str] = ()) -> str:
    """Text values speak for themselves; numbers are shown with their option."""
    return ", ".join(
        shown(value) if isinstance(value, str) else f"{name} {shown(value)}"
        for name, value in values.items()
        if name not in without
    )


def _safe(name: str) -> str:
    """The name as part of an id or a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
