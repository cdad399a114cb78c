"""The page about a study: its tables, each arm's course, what tuning chose, and which runs are missing."""

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

MOST_ARMS = 10  # in one plot; more could not be told apart
_FEW_ARMS = 5  # are easily told apart


def render_study(state: StudyState) -> Page:
    """The page, and what is drawn on it; an empty study has one too."""
    scores = read_scores(state)
    tables = study_tables(state, scores)
    settings = {name: value for name, value in asdict(state.study).items() if value not in (None, {}, [])}
    options, course = against_options(tables), courses(state, scores)
    html = fill(
        "study.html",
        name=tables["study"],
        about=_about(state),
        state=progress_of(state),
        figures=_headline(tables),
        missing=tables["missing"],
        grids=list(grids(tables)),
        options=drawn(options),
        courses=drawn(course),
        runs=state.runs,
        settings=without_secrets(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)),
    )
    return Page(html, [*options, *course])


def progress_of(state: StudyState) -> State:
    """How many of its runs are done, and how many failed."""
    counts = Counter(run.state for run in state.runs)
    total, done, failed = len(state.runs), counts["done"], counts["failed"]
    if total and done == total:
        return State("finished", f"all {total:,} runs are done")
    words = f"{done:,} of {total:,} runs done{f', {failed:,} failed' if failed else ''}"
    return State("stopped" if failed else "in progress", f"{words}; the same command goes on")


def courses(state: StudyState, scores: Scores) -> list[Curve]:
    """The measures of training against samples and time: a line for each arm, ± sd around it.

    Where there are many arms, those that are compared with one baseline have plots of their own, and only the
    main measure is drawn.
    """
    names, circles = main_measures(scores.all_runs), _circles(state.arms, state.study.baseline)
    ends = [run.seconds_at(last) or 0.0 for run in scores.all_runs for last in run.evaluations[-1:]]
    axes = (SAMPLES, time_axis(max(ends, default=0.0)))
    found = [
        _course(scores, circle, label, name, axis)
        for name in (names if len(circles) == 1 else names[:1])
        for label, circle in circles.items()
        for axis in axes
    ]
    return [curve for curve in found if has_points(curve)]


def mean_course(runs: Iterable[Run], measure: str) -> pd.DataFrame:
    """Where all runs were evaluated: `samples`, mean `seconds` and `score`, and its `sd` (0 for one run)."""
    found = [course for run in runs if (course := points(run, measure))]
    every = pd.DataFrame([point for course in found for point in course], columns=Point._fields, dtype=float)
    there = every.groupby("samples")
    mean = there.mean().assign(sd=there["score"].std().fillna(0.0))
    mean["seconds"] = mean["seconds"].where(there["seconds"].count() == there.size())  # or no clock
    return mean[there.size() >= len(found)].reset_index()


def against_options(tables: dict[str, Any]) -> list[Curve]:
    """Final scores against each varied option that is a number, with bars of ± sd."""
    chosen = of_kind(tables, "mean") or of_kind(tables, "training")[:1]
    options = dict.fromkeys(option for arm in tables["arms"] for option in arm["values"])
    found = [_against(tables["arms"], measure, option) for option in options for measure in chosen]
    return [curve for curve in found if curve.lines]


def _about(state: StudyState) -> list[str]:
    study, arms, seeds = state.study, len(state.arms), len(state.study.seeds)
    about = [f"{arms:,} arm{'s' * (arms != 1)}", f"{seeds:,} seed{'s' * (seeds != 1)}"]
    return [*about, f"recipe {study.config}", *([f"suite {study.suite}"] if study.suite else [])]


def _headline(tables: dict[str, Any]) -> list[Figure]:
    """The best arm of the first table, and the largest gain over a baseline in it."""
    found = []
    for measure in [*of_kind(tables, "mean"), *of_kind(tables, "training")][:1]:
        name, partial = measure["name"], f", partial: {measure['partial']}" if measure["partial"] else ""
        scored = [row for row in measure["rows"] if row["summary"] and not row["missing"]]
        if scored:
            best = max(scored, key=lambda row: row["summary"]["mean"])
            value = f"{100 * best['summary']['mean']:.2f} %"
            found.append(Figure(f"best {name}", value, f"{best['arm']}{partial}"))
        compared = [row for row in scored if row["difference"]]
        if compared:
            most = max(compared, key=lambda row: row["difference"]["mean"])
            gain = points_of(most["difference"]["mean"])
            over = f"{most['arm']} over {most['baseline']}, seed by seed: {difference_of(most)}"
            found.append(Figure("largest gain", gain, f"points of {name}: {over}"))
    return found


def _circles(arms: list[Arm], baseline: dict[str, object]) -> dict[str, list[Arm]]:
    """Arms for one plot, by what they have in common; all in one where they are few, or nothing compares."""
    baselines, by_name = find_baselines(arms, baseline), {arm.name: arm for arm in arms}
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        reference = by_name[baselines[arm.name] or arm.name]
        found.setdefault(_told(reference.values, but=baseline), []).append(arm)
    return found if len(arms) > _FEW_ARMS and baseline and len(found) < len(arms) else {"": arms}


def _course(scores: Scores, arms: list[Arm], label: str, measure: str, axis: Axis) -> Curve:
    lines = []
    for arm in arms[:MOST_ARMS]:
        course = mean_course(scores.runs[arm.name].values(), measure)
        x = course["samples"] if axis is SAMPLES else course["seconds"] / axis.seconds
        if len(course):
            lines.append(Line(arm.name, list(x), list(100 * course["score"]), list(100 * course["sd"])))
    title = ", ".join(filter(None, (measure_title(measure, axis), label)))
    more = f" {len(arms) - MOST_ARMS} more arms are in the tables." if len(arms) > MOST_ARMS else ""
    caption = f"{measure} while the models trained: the mean over seeds, the band is ± sd.{more}"
    key = "-".join(filter(None, ("course", _safe(measure), _safe(label), axis.key)))
    return Curve(key, title, "% right", caption, lines, from_zero=True, axis=axis.label)


def _against(arms: list[dict], measure: dict, option: str) -> Curve:
    """Without lines where the option is no number, or no two arms differ in nothing else."""
    name = measure["name"]
    lines: dict[str, tuple[str, list]] = {}
    for arm, row in zip(arms, measure["rows"], strict=True):
        value, summary = arm["values"].get(option), row["summary"]
        if summary is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        others = {key: other for key, other in arm["values"].items() if key != option}
        place = (float(value), 100 * summary["mean"], 100 * (summary["sd"] or 0.0))
        lines.setdefault(identity(others), (_told(others) or name, []))[1].append(place)
    drawn = [
        Line(label, *(list(column) for column in zip(*sorted(places), strict=True)))
        for label, places in lines.values()
        if len(places) > 1
    ][:MOST_ARMS]
    partial = f" It is partial: {measure['partial']}." if measure["partial"] else ""
    caption = f"{name} at the end, mean over seeds; bars are ± sd.{partial}"
    key, title = f"against-{_safe(option)}-{_safe(name)}", f"{name} against {option}"
    marks = tuple(sorted({x for line in drawn for x in line.x}))
    return Curve(key, title, "%", caption, drawn, axis=option, places=marks)


def _told(values: dict[str, object], but: Iterable[str] = ()) -> str:
    """An algorithm says what it is; a number needs its name."""
    return ", ".join(
        shown(value) if isinstance(value, str) else f"{name} {shown(value)}"
        for name, value in values.items()
        if name not in but
    )


def _safe(name: str) -> str:
    """For ids."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
