"""Which curves a run has: their points, their units, and a sentence on how to read each."""

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

_MOST_LINES = 5  # of evaluation measures; more could not be told apart


class Axis(NamedTuple):
    """What lies on the level axis."""

    key: str
    label: str
    of: Callable[[Run, dict], float | None]
    """Where a record of a run lies."""
    seconds: float = 1
    """In a unit of time."""


EPOCHS = Axis("epochs", "epochs", lambda run, record: number(record["epoch"]))
SAMPLES = Axis("samples", "samples seen", lambda run, record: run.samples_at(record))


def time_axis(seconds: float) -> Axis:
    """In the unit that suits what takes so long."""
    units = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
    unit = next(name for name, size in units.items() if seconds >= 2 * size or size == 1)

    def of(run: Run, record: dict) -> float | None:
        found = run.seconds_at(record)
        return None if found is None else found / units[unit]

    return Axis("time", unit, of, units[unit])


@dataclass(frozen=True)
class Line:
    """Values; NaN where a record has none."""

    label: str
    x: list[float]
    y: list[float]
    spread: list[float] | None = None
    """How far values lie around each point, to both sides."""


@dataclass(frozen=True)
class Band:
    """What lies between two lines."""

    label: str
    x: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Level:
    """A value to compare with."""

    label: str
    value: float
    dotted: bool = False


@dataclass(frozen=True)
class Curve:
    """One plot."""

    key: str
    title: str
    unit: str
    """What the upright axis says."""
    caption: str
    lines: list[Line]
    band: Band | None = None
    levels: tuple[Level, ...] = ()
    from_zero: bool = False
    """The upright axis starts at 0."""
    latest: str = ""
    """The last value of the first line."""
    axis: str = "epochs"
    """What the level axis says."""
    places: tuple[float, ...] = ()
    """Where the level axis is marked, and spreads are bars: the values of an option; a course has none."""


def curves(run: Run, axis: Axis = EPOCHS) -> list[Curve]:
    """All for which the records have values, in the order of the page."""
    return [curve for make in _MAKERS if has_points(curve := make(run, axis))]


def elsewhere(run: Run) -> list[Curve]:
    """The two that matter most against samples and time, where these are known."""
    axes = (SAMPLES, time_axis(max(known(run.records, "elapsed"), default=0.0)))
    found = [curve for axis in axes for curve in curves(run, axis)]
    return [curve for curve in found if curve.key.startswith(("evaluation", "loss"))]


def short_name(measure: str) -> str:
    """A measure's name that fits into a legend."""
    found = re.fullmatch(r"(image|text|mean)(?:_retrieval)?_recall@(\d+)", measure)
    if not found:
        return measure
    sought = {"image": "find picture", "text": "find caption", "mean": "mean"}[found[1]]
    return f"{sought}, top {found[2]}"


def measure_title(measure: str, axis: Axis) -> str:
    name = short_name(measure)
    return name[:1].upper() + name[1:] + ("" if axis is EPOCHS else f" against {axis.key}")


def has_points(curve: Curve) -> bool:
    """Whether there is anything to draw."""
    return any(x == x and y == y for line in curve.lines for x, y in zip(line.x, line.y, strict=True))


def _curve(axis: Axis, key: str, unit: str, lines: list[Line], **more: Any) -> Curve:
    """With the last value of the first line; an axis other than epochs has its name in the key."""
    values = [value for line in lines[:1] for value in line.y if value == value]
    latest = f"{values[-1]:.4g}{' %' * unit.startswith('%')}".replace("-", "−") if values else ""
    key = key if axis is EPOCHS else f"{key}-{axis.key}"
    return Curve(key=key, unit=unit, lines=lines, latest=latest, axis=axis.label, **more)


def _evaluation(run: Run, axis: Axis) -> Curve:
    names = measured([run])
    shown = [name for name in dict.fromkeys((best_measure(run), *_GENERAL, *names)) if name in names]
    x = _scaled([axis.of(run, record) for record in run.evaluations])
    lines = []
    for name in filter(None, shown[:_MOST_LINES]):
        y = _scaled([record["evaluation"].get(name) for record in run.evaluations], 100)
        lines.append(Line(short_name(name), x, y))
    left = len(names) - len(lines)
    more = f" {left} more measures are in metrics.jsonl." if left > 0 else ""
    caption = (
        "How often the model is right on data that it does not train on. Higher is better; a line that "
        f"turns down means that the model begins to fit its training pairs only.{more}"
    )
    return _curve(axis, "evaluation", "% right", lines, title="Evaluation", caption=caption, from_zero=True)


_GENERAL = (*IN_TRAINING, "image_retrieval_recall@5", "text_retrieval_recall@5")


def _simple(key: str, title: str, unit: str, caption: str, run: Run, axis: Axis, **more: Any) -> Curve:
    """A curve of one value of the records, whose `name` is the key if left out; shares are in percent."""
    name, label = more.pop("name", key), more.pop("label", title)
    x = _scaled([axis.of(run, record) for record in run.records])
    values = [record.get(name, timing(record, name)) for record in run.records]
    lines = [Line(label, x, _scaled(values, 100 if unit.startswith("%") else 1))]
    return _curve(axis, key, unit, lines, title=title, caption=caption, **more)


def _radius(run: Run, axis: Axis) -> Curve:
    levels = []
    if run.config is not None:
        settings = run.config.loss
        if settings.algorithm.rho is not None:
            levels.append(Level("ρ", settings.rho))
        levels.append(Level("log(B−1)", log(run.config.batch.size - 1), dotted=True))
    goal = (
        "In this algorithm τ falls while the radius is below ρ and rises above it: the radius settles at ρ."
        if len(levels) == 2
        else "It grows as the model tells its negatives apart, and with a lower τ."
    )
    caption = f"How unevenly the negatives weigh. {goal} At γ = 1 it cannot pass log(B−1)."
    curve = _simple("radius", "Radius", "nats", caption, run, axis, label="mean(q−ℓ)")
    return replace(curve, levels=tuple(levels))


def _log_u(run: Run, axis: Axis) -> Curve:
    low, high = (_scaled([record.get(f"log_u_q{q}") for record in run.records]) for q in ("05", "95"))
    caption = (
        "The estimators of the batch's samples. They fall as pairs become easier to tell from the rest; "
        "the upper edge of the band are the samples that are still hard."
    )
    median = {"name": "log_u_q50", "label": "median"}
    curve = _simple("log_u", "Estimators log u", "log u", caption, run, axis, **median)
    return replace(curve, band=Band("5–95 %", curve.lines[0].x, low, high))


_MAKERS: tuple[Callable[[Run, Axis], Curve], ...] = (
    _evaluation,
    partial(_simple, "loss", "Loss", "loss",
            "What training makes small; it may be negative, and may jump when γ changes. It should fall and "
            "then flatten. Losses of two algorithms cannot be compared: their evaluations can."),
    partial(_simple, "tau", "Temperature τ", "τ",
            "How sharply the loss looks at the hardest negatives; lower is sharper. It should settle, and "
            "not stay at its lower limit."),
    _radius,
    _log_u,
    partial(_simple, "unvisited", "Unvisited pairs", "% of all pairs",
            "The share of the pairs that have no estimator yet. It reaches 0 at the end of the first epoch.",
            from_zero=True),
    partial(_simple, "gamma", "Inner rate γ", "γ",
            "How fast the estimators follow the batch: at 1 only the batch counts, at lower values the past "
            "too.", from_zero=True),
    partial(_simple, "lr", "Learning rate", "learning rate",
            "It rises in the warm-up and then falls along a cosine.", from_zero=True),
    partial(_simple, "grad_norm", "Gradient norm", "norm",
            "The length of the model's gradient before clipping. Lone peaks are harmless; a steady rise is a "
            "warning: try a lower learning rate or --optim.clip 1.0.", from_zero=True),
    partial(_simple, "samples_per_second", "Speed", "samples/s",
            "Pairs trained on in a second, without the time of evaluations and checkpoints. Dips are other "
            "work on the machine, or slow data.", from_zero=True),
)  # fmt: skip


def _scaled(values: list, factor: float = 1) -> list[float]:
    numbers = [number(value) for value in values]
    return [nan if value is None else factor * value for value in numbers]
