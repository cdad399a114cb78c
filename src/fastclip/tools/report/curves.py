"""The curves of a run: points, units, and a caption that says how to read each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import log, nan
from typing import Any, NamedTuple

from fastclip.run.folder import Run, number, timing
from fastclip.tools.report.key_figures import best_measure, known
from fastclip.tools.study.learning_curves import IN_TRAINING, measured

_MAX_LINES = 5  # evaluation metrics in one plot; more could not be distinguished


class Axis(NamedTuple):
    """A horizontal axis."""

    key: str
    label: str
    position: Callable[[Run, dict], float | None]
    """Where a record of a run is on it; None if unknown."""
    seconds: float = 1
    """Seconds per unit of a time axis."""


EPOCHS = Axis("epochs", "epochs", lambda run, record: number(record["epoch"]))
SAMPLES = Axis("samples", "samples seen", lambda run, record: run.samples_at(record))


def time_axis(seconds: float) -> Axis:
    """A time axis in a unit that suits this duration."""
    units = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
    unit = next(name for name, size in units.items() if seconds >= 2 * size or size == 1)

    def position(run: Run, record: dict) -> float | None:
        elapsed = run.seconds_at(record)
        return None if elapsed is None else elapsed / units[unit]

    return Axis("time", unit, position, units[unit])


@dataclass(frozen=True)
class Line:
    """Points of a line; y is NaN where a record has no value."""

    label: str
    x: list[float]
    y: list[float]
    spread: list[float] | None = None
    """Half the width of the band or error bar at each point."""


@dataclass(frozen=True)
class Band:
    """A filled area between two lines."""

    label: str
    x: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Level:
    """A horizontal reference line."""

    label: str
    value: float
    dotted: bool = False


@dataclass(frozen=True)
class Curve:
    """One plot."""

    key: str
    title: str
    unit: str
    """The label of the vertical axis."""
    caption: str
    lines: list[Line]
    band: Band | None = None
    levels: tuple[Level, ...] = ()
    from_zero: bool = False
    """The vertical axis starts at 0."""
    latest: str = ""
    """The last value of the first line."""
    axis: str = "epochs"
    """The label of the horizontal axis."""
    ticks: tuple[float, ...] = ()
    """The values of an option, if that is the horizontal axis; spreads are then error bars, not bands."""


def curves(run: Run, axis: Axis = EPOCHS) -> list[Curve]:
    """The curves that the records have values for, in the order of the page."""
    return [curve for make in _MAKERS if has_points(curve := make(run, axis))]


def curves_by_samples_and_time(run: Run) -> list[Curve]:
    """Evaluation and loss against samples and against time, where these are known."""
    axes = (SAMPLES, time_axis(max(known(run.records, "elapsed"), default=0.0)))
    every = [curve for axis in axes for curve in curves(run, axis)]
    return [curve for curve in every if curve.key.startswith(("evaluation", "loss"))]


def short_name(measure: str) -> str:
    """The name of a metric, short enough for a legend: image_retrieval_recall@5 becomes image recall@5."""
    recall = re.fullmatch(r"(image|text|mean)(?:_retrieval)?_recall@(\d+)", measure)
    return f"{recall[1]} recall@{recall[2]}" if recall else measure


def measure_title(measure: str, axis: Axis) -> str:
    name = short_name(measure)
    return name[:1].upper() + name[1:] + ("" if axis is EPOCHS else f" against {axis.key}")


def has_points(curve: Curve) -> bool:
    """Whether there is a point to draw."""
    return any(x == x and y == y for line in curve.lines for x, y in zip(line.x, line.y, strict=True))


def _curve(axis: Axis, key: str, unit: str, lines: list[Line], **more: Any) -> Curve:
    """A curve with the last value of its first line; axes other than epochs are named in the key."""
    values = [value for line in lines[:1] for value in line.y if value == value]
    latest = f"{values[-1]:.4g}{' %' * unit.startswith('%')}".replace("-", "−") if values else ""
    key = key if axis is EPOCHS else f"{key}-{axis.key}"
    return Curve(key=key, unit=unit, lines=lines, latest=latest, axis=axis.label, **more)


def _evaluation(run: Run, axis: Axis) -> Curve:
    names = measured([run])
    shown = [name for name in dict.fromkeys((best_measure(run), *_GENERAL, *names)) if name in names]
    x = _scaled([axis.position(run, record) for record in run.evaluations])
    lines = []
    for name in filter(None, shown[:_MAX_LINES]):
        y = _scaled([record["evaluation"].get(name) for record in run.evaluations], 100)
        lines.append(Line(short_name(name), x, y))
    omitted = len(names) - len(lines)
    more = f" metrics.jsonl has {omitted} more metric{'s' * (omitted != 1)}." if omitted > 0 else ""
    caption = (
        "Accuracy on data that the model does not train on. Higher is better; a line that turns down is a "
        f"sign of overfitting.{more}"
    )
    return _curve(axis, "evaluation", "% correct", lines, title="Evaluation", caption=caption, from_zero=True)


_GENERAL = (*IN_TRAINING, "image_retrieval_recall@5", "text_retrieval_recall@5")


def _simple(key: str, title: str, unit: str, caption: str, run: Run, axis: Axis, **more: Any) -> Curve:
    """A curve of one value of the records, called `name` there (default: the key); shares are in percent."""
    name, label = more.pop("name", key), more.pop("label", title)
    x = _scaled([axis.position(run, record) for record in run.records])
    values = [record.get(name, timing(record, name)) for record in run.records]
    lines = [Line(label, x, _scaled(values, 100 if unit.startswith("%") else 1))]
    return _curve(axis, key, unit, lines, title=title, caption=caption, **more)


def _radius(run: Run, axis: Axis) -> Curve:
    levels = []
    if run.config is not None:
        settings = run.config.loss
        if settings.algorithm.robust:
            levels.append(Level("ρ", settings.rho_for(run.config.batch.size)))
        levels.append(Level("log(B−1)", log(run.config.batch.size - 1), dotted=True))
    goal = (
        "This algorithm lowers τ while the radius is below ρ and raises it above, so it settles at ρ."
        if len(levels) == 2
        else "It grows as the model learns to separate its negatives, and as τ falls."
    )
    caption = f"How unevenly the loss weights the negatives. {goal} At γ = 1 it cannot exceed log(B−1)."
    curve = _simple("radius", "Radius", "nats", caption, run, axis, label="mean(q−ℓ)")
    return replace(curve, levels=tuple(levels))


def _log_u(run: Run, axis: Axis) -> Curve:
    low, high = (_scaled([record.get(f"log_u_q{q}") for record in run.records]) for q in ("05", "95"))
    caption = (
        "The estimators of the samples in the batch. They fall as pairs become easier to tell apart; the "
        "top of the band shows the samples that are still hard."
    )
    median = {"name": "log_u_q50", "label": "median"}
    curve = _simple("log_u", "Estimators log u", "log u", caption, run, axis, **median)
    return replace(curve, band=Band("5–95 %", curve.lines[0].x, low, high))


_MAKERS: tuple[Callable[[Run, Axis], Curve], ...] = (
    _evaluation,
    partial(_simple, "loss", "Loss", "loss",
            "The training objective. It should fall and then flatten; it may be negative, and may jump when "
            "γ changes. Compare algorithms by their evaluations, not by their losses."),
    partial(_simple, "tau", "Temperature τ", "τ",
            "How strongly the loss focuses on the hardest negatives; lower is sharper. It should settle "
            "above its lower limit."),
    _radius,
    _log_u,
    partial(_simple, "unvisited", "Unvisited pairs", "% of all pairs",
            "The share of pairs without an estimator so far. It reaches 0 at the end of the first epoch.",
            from_zero=True),
    partial(_simple, "gamma", "Inner learning rate γ", "γ",
            "How quickly the estimators follow the batch. At 1 only the current batch counts; below 1, past "
            "batches count too.", from_zero=True),
    partial(_simple, "lr", "Learning rate", "learning rate",
            "It rises during warm-up and then falls along a cosine.", from_zero=True),
    partial(_simple, "grad_norm", "Gradient norm", "norm",
            "The norm of the model's gradient before clipping. Isolated peaks are harmless; if it rises "
            "steadily, try a lower learning rate or --optim.clip 1.0.", from_zero=True),
    partial(_simple, "samples_per_second", "Speed", "samples/s",
            "Training throughput, excluding evaluations and checkpoints. Dips are caused by other work on "
            "the machine, or by slow data.", from_zero=True),
)  # fmt: skip


def _scaled(values: list, factor: float = 1) -> list[float]:
    numbers = [number(value) for value in values]
    return [nan if value is None else factor * value for value in numbers]
