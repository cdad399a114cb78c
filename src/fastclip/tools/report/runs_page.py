"""The page of several runs side by side: overlaid curves, and tables of their results."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fastclip.config.resolved import Resolved
from fastclip.run.folder import Run, number
from fastclip.text import duration
from fastclip.tools.report.curves import (
    EPOCHS,
    SAMPLES,
    Axis,
    Curve,
    Line,
    curves,
    has_points,
    measure_title,
    short_name,
    time_axis,
)
from fastclip.tools.report.key_figures import known
from fastclip.tools.report.output import Page, drawn, fill
from fastclip.tools.report.scores import group_scores
from fastclip.tools.study.learning_curves import main_measures, measured
from fastclip.tools.study.rendering import Best, Grid, by_columns

MAX_RUNS = 10  # in one plot; more could not be distinguished


def render_runs(runs: list[Run]) -> Page:
    """The page and the curves on it."""
    names = distinct_names([run.folder for run in runs])
    missing = [f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.missing]
    if len(runs) > MAX_RUNS:
        missing.append(f"The plots show the first {MAX_RUNS} of {len(runs)} runs; the tables show all.")
    plots = overlaid(runs[:MAX_RUNS], names[:MAX_RUNS])
    html = fill(
        "runs.html",
        names=names,
        missing=missing,
        grids=[grid for grid in (_final_values(runs, names), _tasks(runs, names)) if grid.rows],
        plots=drawn(plots),
        configs=[(name, run.config_text) for name, run in zip(names, runs, strict=True) if run.config_text],
    )
    return Page(html, plots)


def distinct_names(folders: list[Path]) -> list[str]:
    """The last part of each folder, with as many parents as it takes to make them distinct."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len({*names}) == len({*parts}):
            break
    return names


def overlaid(runs: list[Run], names: list[str]) -> list[Curve]:
    """Evaluation metrics, the main one also against samples and time, and then all other curves."""
    longest = max((s for run in runs for s in known(run.records[-1:], "elapsed")), default=0.0)
    evaluations = []
    for place, measure in enumerate(dict.fromkeys((*main_measures(runs), *measured(runs)))):
        for axis in (EPOCHS, SAMPLES, time_axis(longest)) if place == 0 else (EPOCHS,):
            evaluations.append(_evaluation(runs, names, measure, axis, place))
    others: dict[str, Curve] = {}
    for run, name in zip(runs, names, strict=True):
        for curve in curves(run):
            if curve.key != "evaluation":
                caption = _CAPTIONS.get(curve.key, curve.caption)
                shape = replace(curve, lines=[], band=None, levels=(), latest="", caption=caption)
                others.setdefault(curve.key, shape).lines.append(replace(curve.lines[0], label=name))
    return [curve for curve in (*evaluations, *others.values()) if has_points(curve)]


_CAPTIONS = {  # where the caption for a single run does not apply to several
    "loss": "The training objective. Compare different algorithms by their evaluations, not by their losses.",
    "radius": "How unevenly the loss weights the negatives: mean(q − ℓ).",
    "log_u": "The median of the estimators of the samples in the batch.",
}


def _evaluation(runs: list[Run], names: list[str], measure: str, axis: Axis, place: int) -> Curve:
    lines = []
    for run, name in zip(runs, names, strict=True):
        x = [axis.position(run, record) for record in run.evaluations]
        y = [number(record["evaluation"].get(measure)) for record in run.evaluations]
        points = [(a, 100 * b) for a, b in zip(x, y, strict=True) if a is not None and b is not None]
        if points:
            lines.append(Line(name, [a for a, _ in points], [b for _, b in points]))
    caption = f"{measure} on data that the models do not train on. Higher is better."
    key, title = f"evaluation-{place}-{axis.key}", measure_title(measure, axis)
    return Curve(key, title, "% correct", caption, lines, from_zero=True, axis=axis.label)


def _final_values(runs: list[Run], names: list[str]) -> Grid:
    def of_config(shown: Callable[[Resolved], str]) -> list[str]:
        return ["–" if run.config is None else shown(run.config) for run in runs]

    def of_last(name: str, shown: Callable[[float], str]) -> list[str]:
        return [next(map(shown, known(run.records[-1:], name)), "–") for run in runs]

    def short(value: float) -> str:
        return f"{value:.4g}".replace("-", "−")

    measures = main_measures(runs)
    evaluated = [run.evaluations[-1]["evaluation"] if run.evaluations else {} for run in runs]
    about = {
        "run": names,
        "algorithm": of_config(lambda config: config.algorithm),
        "batch": of_config(lambda config: f"{config.batch.size:,}"),
        "epochs": of_config(lambda config: f"{config.epochs:g}"),
        "state": [run.state().kind for run in runs],
    }
    numbers = {
        **{f"{short_name(m)}, %": _scores([number(e.get(m)) for e in evaluated]) for m in measures},
        "loss": of_last("loss", short),
        "τ": of_last("tau", short),
        "time": of_last("elapsed", duration),
        "samples/s": of_last("samples_per_second", lambda speed: f"{speed:,.0f}"),
    }
    note = "From the last record of each run; scores are from its last evaluation."
    return by_columns("Final values", note, about, numbers)


def _tasks(runs: list[Run], names: list[str]) -> Grid:
    """Scores of `fastclip eval`: means first, then tasks; one column per run."""
    values: dict[tuple[str, str], dict[str, float | None]] = {}
    for run, name in zip(runs, names, strict=True):
        for group in group_scores(run.results):
            for mean in group.means:
                partial = f" ({mean.found} of {mean.tasks} tasks)" if mean.partial else ""
                values.setdefault((f"{group.title}: {mean.name}{partial}", "mean"), {})[name] = mean.value
            for score in group.scores:
                values.setdefault((score.name, score.measure), {})[name] = score.value
    rows = []
    for task, measure in sorted(values, key=lambda key: key[1] != "mean"):
        scores = [values[task, measure].get(name) for name in names]
        rows.append([task, measure, *_scores(scores, "not scored")])
    return Grid("Tasks", "Scores of `fastclip eval`, in percent.", ["task", "measure", *names], 2, rows)


def _scores(shares: list[float | None], absent: str = "–") -> list[str]:
    """Scores in percent, with the highest of several in bold."""
    shown = [absent if share is None else f"{100 * share:.2f}" for share in shares]
    best = max((float(text) for text in shown if text != absent), default=None)
    return [Best(t) if len(shown) > 1 and t != absent and float(t) == best else t for t in shown]
