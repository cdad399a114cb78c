"""The page of several runs side by side: every curve overlaid, and tables of what each came to."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fastclip.run.folder import Run, number, timing
from fastclip.text import duration
from fastclip.tools.report.curves import (
    EPOCHS,
    SAMPLES,
    Axis,
    Curve,
    Line,
    curves,
    has_points,
    short_name,
    time_axis,
)
from fastclip.tools.report.scores import group_scores
from fastclip.tools.report.template import Page, drawn, fill
from fastclip.tools.study.measures import IN_TRAINING
from fastclip.tools.study.rendering import Cell, Grid

MOST_RUNS = 10  # in one plot; more could not be told apart


def render_runs(runs: list[Run]) -> Page:
    """The page, and what is drawn on it."""
    names = distinct_names([run.folder for run in runs])
    missing = [f"{name}: {told}" for name, run in zip(names, runs, strict=True) for told in run.missing]
    if len(runs) > MOST_RUNS:
        missing.append(f"Plots show the first {MOST_RUNS} of {len(runs)} runs; the tables have all.")
    grids = [_final_values(runs, names), _tasks(runs, names)]
    plots = overlaid(runs[:MOST_RUNS], names[:MOST_RUNS])
    html = fill(
        "runs.html",
        names=names,
        missing=missing,
        grids=[grid for grid in grids if grid.rows],
        plots=drawn(plots),
        configs=[(name, run.config_text) for name, run in zip(names, runs, strict=True) if run.config_text],
    )
    return Page(html, plots)


def distinct_names(folders: list[Path]) -> list[str]:
    """Each folder's last part, with as many before it as it takes to tell them apart."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len({*names}) == len({*parts}):
            break
    return names


def overlaid(runs: list[Run], names: list[str]) -> list[Curve]:
    """Every measure of the evaluations, the main one against samples and time too; then all other curves."""
    measured = [name for run in runs for record in run.evaluations for name in record["evaluation"]]
    measures = list(dict.fromkeys(name for name in (*IN_TRAINING, *measured) if name in measured))
    longest = max((timing(run.records[-1], "elapsed") or 0.0 for run in runs if run.records), default=0.0)
    found = [_evaluation(runs, names, measure, EPOCHS, n) for n, measure in enumerate(measures)]
    elsewhere = (
        [_evaluation(runs, names, measures[0], axis, 0) for axis in (SAMPLES, time_axis(longest))]
        if measures
        else []
    )
    found = [*found[:1], *elsewhere, *found[1:]]
    lines: dict[str, list[Line]] = {}
    shapes: dict[str, Curve] = {}
    for run, name in zip(runs, names, strict=True):
        for curve in curves(run):
            if curve.key != "evaluation":
                shapes.setdefault(curve.key, curve)
                lines.setdefault(curve.key, []).append(replace(curve.lines[0], label=name))
    found += [
        replace(
            shape,
            lines=lines[key],
            band=None,
            levels=(),
            latest="",
            caption=_CAPTIONS.get(key, shape.caption),
        )
        for key, shape in shapes.items()
    ]
    return [curve for curve in found if has_points(curve)]


_CAPTIONS = {  # where a single run's would be wrong, or of one algorithm
    "loss": "What training makes small. Losses of different algorithms cannot be compared: evaluations can.",
    "radius": "How unevenly the negatives weigh: mean(q − ℓ).",
    "log_u": "The median of the estimators of the batch's samples.",
}


def _evaluation(runs: list[Run], names: list[str], measure: str, axis: Axis, place: int) -> Curve:
    lines = []
    for run, name in zip(runs, names, strict=True):
        x = [axis.of(run, record) for record in run.evaluations]
        y = [number(record["evaluation"].get(measure)) for record in run.evaluations]
        known = [(a, 100 * b) for a, b in zip(x, y, strict=True) if a is not None and b is not None]
        if known:
            lines.append(Line(name, [a for a, _ in known], [b for _, b in known]))
    key = f"evaluation-{place}-{axis.key}"
    caption = f"{measure} on data that the models do not train on. Higher is better."
    title = short_name(measure)
    title = title[:1].upper() + title[1:] + ("" if axis is EPOCHS else f" against {axis.key}")
    return Curve(key, title, "% right", caption, lines, from_zero=True, axis=axis.label)


def _final_values(runs: list[Run], names: list[str]) -> Grid:
    measured = [name for run in runs for record in run.evaluations for name in record["evaluation"]]
    measures = [name for name in IN_TRAINING if name in measured] or list(dict.fromkeys(measured))[:1]
    headings = ["run", "algorithm", "batch", "epochs", "state"]
    headings += [f"{short_name(m)}, %" for m in measures] + ["loss", "τ", "time", "samples/s"]
    rows = []
    for run, name in zip(runs, names, strict=True):
        config, last = run.config, run.records[-1] if run.records else {}
        evaluated = run.evaluations[-1]["evaluation"] if run.evaluations else {}
        about = ["–"] * 3
        if config is not None:
            about = [config.algorithm, f"{config.batch.size:,}", f"{config.epochs:g}"]
        scores = [number(evaluated.get(measure)) for measure in measures]
        elapsed, speed = timing(last, "elapsed"), timing(last, "samples_per_second")
        numbers = [_short(number(last.get(value))) for value in ("loss", "tau")]
        clock = [duration(elapsed), "–" if speed is None else f"{speed:,.0f}"]
        shown = ["–" if score is None else f"{100 * score:.2f}" for score in scores]
        rows.append([Cell(text) for text in (name, *about, run.state().kind, *shown, *numbers, *clock)])
    for column in range(5, 5 + len(measures)):
        for row, cell in zip(rows, _best_bold([row[column] for row in rows]), strict=True):
            row[column] = cell
    return Grid(
        "Final values", "At each run's last record; scores are its last evaluation's.", headings, 5, rows
    )


def _tasks(runs: list[Run], names: list[str]) -> Grid:
    """Scores of `fastclip eval`: means first, then tasks; a column for each run."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for run, name in zip(runs, names, strict=True):
        groups = group_scores(run.results)
        for group in groups:
            for mean in group.means:
                partial = f" ({mean.found} of {mean.tasks} tasks)" if mean.partial else ""
                row = found.setdefault((f"{group.title}: {mean.name}{partial}", "mean"), {})
                row[name] = "–" if mean.value is None else f"{100 * mean.value:.2f}"
        for score in (score for group in groups for score in group.scores):
            found.setdefault((score.name, score.measure), {})[name] = f"{100 * score.value:.2f}"
    rows = []
    for task, measure in sorted(found, key=lambda key: key[1] != "mean"):
        scores = [found[task, measure].get(name, "not scored") for name in names]
        rows.append([Cell(task), Cell(measure), *_best_bold([Cell(score) for score in scores])])
    return Grid("Tasks", "Scores of `fastclip eval`, in percent.", ["task", "measure", *names], 2, rows)


def _best_bold(cells: list[Cell]) -> list[Cell]:
    """The highest of several scores in bold."""
    values = [_value(cell) for cell in cells]
    best = max((value for value in values if value is not None), default=None)
    bold = [len(cells) > 1 and value is not None and value == best for value in values]
    return [cell._replace(bold=is_best) for cell, is_best in zip(cells, bold, strict=True)]


def _value(cell: Cell) -> float | None:
    try:
        return float(cell.text)
    except ValueError:
        return None


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}".replace("-", "−")
