"""The curves of a study: each arm's course as a mean over seeds, and final scores against an option."""

from __future__ import annotations

import re
from math import nan

from fastclip.run.folder import Run
from fastclip.tools.report.curves import (
    SAMPLES,
    TIME_UNITS,
    Axis,
    Curve,
    Line,
    has_points,
    short_name,
    time_axis,
)
from fastclip.tools.study.arms import Arm, identity
from fastclip.tools.study.measures import IN_TRAINING, Scores, points, training_measure
from fastclip.tools.study.statistics import Point, summarise
from fastclip.tools.study.tables import MeasureTable, StudyTables, find_baselines, shown

MOST_ARMS = 10  # in one plot; more could not be told apart
_FEW_ARMS = 5  # are easily told apart


def courses(scores: Scores, arms: list[Arm], baseline: dict[str, object]) -> list[Curve]:
    """The measures of training against samples and time: a line for each arm, ± sd around it.

    Where there are many arms, those that are compared with one baseline have plots of their own, and only the
    main measure is drawn.
    """
    runs = [run for seeds in scores.runs.values() for run in seeds.values()]
    main = training_measure(runs)
    measured = {name for run in runs for record in run.evaluations for name in record["evaluation"]}
    names = list(
        dict.fromkeys(name for name in (main, *IN_TRAINING) if name is not None and name in measured)
    )
    circles = _circles(arms, baseline)
    ends = [run.seconds_at(run.evaluations[-1]) for run in runs if run.evaluations]
    axes = (SAMPLES, time_axis(max((seconds for seconds in ends if seconds is not None), default=0.0)))
    found = [
        _course(scores, circle, label, name, axis)
        for name in (names if len(circles) == 1 else names[:1])
        for label, circle in circles.items()
        for axis in axes
    ]
    return [curve for curve in found if has_points(curve)]


def against_options(tables: StudyTables) -> list[Curve]:
    """Final scores against each varied option that is a number, with bars of ± sd."""
    chosen = tables.of_kind("mean") or tables.of_kind("training")[:1]
    found = [_against(tables, table, key) for key in tables.columns for table in chosen]
    return [curve for curve in found if curve is not None]


def mean_course(runs: list[Run], measure: str, clock: bool) -> tuple[list[float], list[float], list[float]]:
    """Where all runs were evaluated: samples or seconds, the mean score there, and its sd (0 for one run)."""
    by_samples: dict[float, list[Point]] = {}
    courses = [course for run in runs if (course := points(run, measure))]
    for point in (point for course in courses for point in course):
        by_samples.setdefault(point.samples, []).append(point)
    x, y, spread = [], [], []
    for samples, there in sorted(by_samples.items()):
        if len(there) < len(courses):
            continue
        seconds = [point.seconds for point in there if point.seconds is not None]
        when = sum(seconds) / len(seconds) if len(seconds) == len(there) else nan
        summary = summarise(point.score for point in there)
        x.append(when if clock else samples)
        y.append(summary.mean)
        spread.append(summary.sd or 0.0)
    return x, y, spread


def _circles(arms: list[Arm], baseline: dict[str, object]) -> dict[str, list[Arm]]:
    """Arms for one plot, by what they have in common; all in one where they are few, or nothing compares."""
    baselines, by_name = find_baselines(arms, baseline), {arm.name: arm for arm in arms}
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        reference = by_name[baselines[arm.name] or arm.name]
        common = [_told(name, value) for name, value in reference.values.items() if name not in baseline]
        found.setdefault(", ".join(common), []).append(arm)
    return found if len(arms) > _FEW_ARMS and baseline and len(found) < len(arms) else {"": arms}


def _course(scores: Scores, arms: list[Arm], label: str, measure: str, axis: Axis) -> Curve:
    lines = []
    for arm in arms[:MOST_ARMS]:
        x, y, spread = mean_course(list(scores.runs[arm.name].values()), measure, axis is not SAMPLES)
        x = [value / TIME_UNITS.get(axis.label, 1) for value in x]
        if y:
            lines.append(Line(arm.name, x, _percent(y), _percent(spread)))
    title = f"{short_name(measure)} against {'samples' if axis is SAMPLES else 'time'}"
    title = _capital(f"{title}, {label}" if label else title)
    more = f" {len(arms) - MOST_ARMS} more arms are in the tables." if len(arms) > MOST_ARMS else ""
    caption = f"{measure} while the models trained: the mean over seeds, the band is ± sd.{more}"
    key = "-".join(["course", *filter(None, (_safe(measure), _safe(label))), axis.key])
    return Curve(key, title, "% right", caption, lines, from_zero=True, axis=axis.label)


def _against(tables: StudyTables, table: MeasureTable, key: str) -> Curve | None:
    """None where the option is no number, or no two arms differ in nothing else."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    labels: dict[str, str] = {}
    for arm, row in zip(tables.arms, table.rows, strict=True):
        value = arm.values.get(key)
        if row.summary is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        others = {name: other for name, other in arm.values.items() if name != key}
        line = identity(others)
        labels[line] = ", ".join(_told(name, other) for name, other in others.items()) or table.measure.name
        place = (float(value), 100 * row.summary.mean, 100 * (row.summary.sd or 0.0))
        lines.setdefault(line, []).append(place)
    drawn = [
        Line(labels[line], *(list(column) for column in zip(*sorted(places), strict=True)))
        for line, places in lines.items()
        if len(places) > 1
    ][:MOST_ARMS]
    if not drawn:
        return None
    places = tuple(sorted({x for line in drawn for x in line.x}))
    partial = f" It is partial: {table.measure.partial}." if table.measure.partial else ""
    caption = f"{table.measure.name} at the end, mean over seeds; bars are ± sd.{partial}"
    name = f"against-{_safe(key)}-{_safe(table.measure.name)}"
    title = f"{table.measure.name} against {key}"
    return Curve(name, title, "%", caption, drawn, axis=key, places=places)


def _told(name: str, value: object) -> str:
    """An algorithm says what it is; a number needs its name."""
    return shown(value) if isinstance(value, str) else f"{name} {shown(value)}"


def _percent(shares: list[float]) -> list[float]:
    return [100 * share for share in shares]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _safe(name: str) -> str:
    """For ids."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
