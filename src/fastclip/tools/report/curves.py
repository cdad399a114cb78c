"""Which curves a run has: their points, their units, and a sentence on how to read each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log, nan
from typing import NamedTuple

from fastclip.config.resolved import loss_settings
from fastclip.run.folder import Run, number, timing
from fastclip.tools.report.headline import best_measure

_MOST_LINES = 5  # of evaluation measures; more could not be told apart


class Axis(NamedTuple):
    """What lies on the level axis."""

    key: str
    label: str
    of: Callable[[Run, dict], float | None]
    """Where a record of a run lies."""


EPOCHS = Axis("epochs", "epochs", lambda run, record: number(record["epoch"]))
SAMPLES = Axis("samples", "samples seen", lambda run, record: run.samples_at(record))


def time_axis(seconds: float) -> Axis:
    """In the unit that suits what takes so long."""
    unit, size = next((name, s) for name, s in TIME_UNITS.items() if seconds >= 2 * s or s == 1)

    def of(run: Run, record: dict) -> float | None:
        found = run.seconds_at(record)
        return None if found is None else found / size

    return Axis("time", unit, of)


TIME_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


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
    return [curve for make in _MAKERS for curve in make(run, axis) if has_points(curve)]


def elsewhere(run: Run) -> list[Curve]:
    """The two that matter most against samples and time, where these are known."""
    axes = [SAMPLES, time_axis(max((_seconds(record) for record in run.records), default=0.0))]
    return [
        curve for axis in axes for curve in curves(run, axis) if curve.key.startswith(("evaluation", "loss"))
    ]


def short_name(measure: str) -> str:
    """A measure's name that fits into a legend."""
    found = re.fullmatch(r"(image|text|mean)(?:_retrieval)?_recall@(\d+)", measure)
    if not found:
        return measure
    sought = {"image": "find picture", "text": "find caption", "mean": "mean"}[found[1]]
    return f"{sought}, top {found[2]}"


def has_points(curve: Curve) -> bool:
    """Whether there is anything to draw."""
    return any(x == x and y == y for line in curve.lines for x, y in zip(line.x, line.y, strict=True))


def _evaluation(run: Run, axis: Axis) -> Iterator[Curve]:
    best = best_measure(run)
    if best is None:
        return
    measured = list(dict.fromkeys(name for record in run.evaluations for name in record["evaluation"]))
    first = [best, *_GENERAL]
    names = [name for name in dict.fromkeys(first) if name in measured]
    names = (names + [name for name in measured if name not in names])[:_MOST_LINES]
    x = _scaled([axis.of(run, record) for record in run.evaluations])
    lines = [
        Line(
            short_name(name), x, _scaled([record["evaluation"].get(name) for record in run.evaluations], 100)
        )
        for name in names
    ]
    left = len(measured) - len(names)
    more = f" {left} more measures are in metrics.jsonl." if left > 0 else ""
    caption = (
        "How often the model is right on data that it does not train on. Higher is better; a line that "
        f"turns down means that the model begins to fit its training pairs only.{more}"
    )
    yield Curve(
        _key("evaluation", axis),
        "Evaluation",
        "% right",
        caption,
        lines,
        from_zero=True,
        latest=_latest(lines, " %"),
        axis=axis.label,
    )


_GENERAL = ("mean_recall@1", "tasks_mean", "image_retrieval_recall@1", "text_retrieval_recall@1",
            "image_retrieval_recall@5", "text_retrieval_recall@5")  # fmt: skip


def _simple(
    key: str,
    title: str,
    unit: str,
    caption: str,
    *,
    factor: float = 1,
    from_zero: bool = False,
    of: Callable[[dict, str], object] = dict.get,
    after: str = "",
) -> Callable[[Run, Axis], Iterator[Curve]]:
    """A curve of one value of the records."""

    def make(run: Run, axis: Axis) -> Iterator[Curve]:
        y = _scaled([of(record, key) for record in run.records], factor)
        lines = [Line(title, _places(run, axis), y)]
        latest = _latest(lines, after)
        yield Curve(_key(key, axis), title, unit, caption, lines, None, (), from_zero, latest, axis.label)

    return make


def _radius(run: Run, axis: Axis) -> Iterator[Curve]:
    levels = []
    if run.config is not None:
        settings = loss_settings(run.config)
        if settings.algorithm.rho is not None:
            levels.append(Level("ρ", settings.rho))
        levels.append(Level("log(B−1)", log(run.config.batch.size - 1), dotted=True))
    goal = (
        "In this algorithm τ falls while the radius is below ρ and rises above it: the radius settles at ρ."
        if len(levels) == 2
        else "It grows as the model tells its negatives apart, and with a lower τ."
    )
    caption = f"How unevenly the negatives weigh. {goal} At γ = 1 it cannot pass log(B−1)."
    y = _scaled([record.get("radius") for record in run.records])
    lines = [Line("mean(q−ℓ)", _places(run, axis), y)]
    latest, key = _latest(lines), _key("radius", axis)
    yield Curve(key, "Radius", "nats", caption, lines, None, tuple(levels), False, latest, axis.label)


def _log_u(run: Run, axis: Axis) -> Iterator[Curve]:
    low, middle, high = (
        _scaled([record.get(f"log_u_q{q}") for record in run.records]) for q in ("05", "50", "95")
    )
    lines = [Line("median", _places(run, axis), middle)]
    caption = (
        "The estimators of the batch's samples. They fall as pairs become easier to tell from the rest; "
        "the upper edge of the band are the samples that are still hard."
    )
    band = Band("5–95 %", _places(run, axis), low, high)
    latest, key = _latest(lines), _key("log_u", axis)
    yield Curve(key, "Estimators log u", "log u", caption, lines, band, (), False, latest, axis.label)


_MAKERS: tuple[Callable[[Run, Axis], Iterator[Curve]], ...] = (
    _evaluation,
    _simple(
        "loss",
        "Loss",
        "loss",
        "What training makes small; it may be negative, and may jump when γ changes. It should fall and "
        "then flatten. Losses of two algorithms cannot be compared: their evaluations can.",
    ),
    _simple(
        "tau",
        "Temperature τ",
        "τ",
        "How sharply the loss looks at the hardest negatives; lower is sharper. It should settle, and not "
        "stay at its lower limit.",
    ),
    _radius,
    _log_u,
    _simple(
        "unvisited",
        "Unvisited pairs",
        "% of all pairs",
        "The share of the pairs that have no estimator yet. It reaches 0 at the end of the first epoch.",
        factor=100,
        from_zero=True,
        after=" %",
    ),
    _simple(
        "gamma",
        "Inner rate γ",
        "γ",
        "How fast the estimators follow the batch: at 1 only the batch counts, at lower values the past too.",
        from_zero=True,
    ),
    _simple(
        "lr",
        "Learning rate",
        "learning rate",
        "It rises in the warm-up and then falls along a cosine.",
        from_zero=True,
    ),
    _simple(
        "grad_norm",
        "Gradient norm",
        "norm",
        "The length of the model's gradient before clipping. Lone peaks are harmless; a steady rise is a "
        "warning: try a lower learning rate or --optim.clip 1.0.",
        from_zero=True,
    ),
    _simple(
        "samples_per_second",
        "Speed",
        "samples/s",
        "Pairs trained on in a second, without the time of evaluations and checkpoints. Dips are other work "
        "on the machine, or slow data.",
        from_zero=True,
        of=timing,
    ),
)


def _key(name: str, axis: Axis) -> str:
    return name if axis is EPOCHS else f"{name}-{axis.key}"


def _places(run: Run, axis: Axis) -> list[float]:
    return _scaled([axis.of(run, record) for record in run.records])


def _seconds(record: dict) -> float:
    return timing(record, "elapsed") or 0.0


def _scaled(values: list, factor: float = 1) -> list[float]:
    numbers = [number(value) for value in values]
    return [nan if value is None else factor * value for value in numbers]


def _latest(lines: list[Line], after: str = "") -> str:
    values = [value for value in lines[0].y if value == value]
    return f"{values[-1]:.4g}{after}".replace("-", "−") if values else ""
