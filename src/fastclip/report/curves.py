"""Which curves a run has: their points, their units, and a sentence on how to read each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log, nan

from fastclip.report.headline import best_measure
from fastclip.report.run import Run, number, timing
from fastclip.training.resolve import loss_settings

_MOST_LINES = 5  # of evaluation measures; more could not be told apart


@dataclass(frozen=True)
class Line:
    """Values against epochs; NaN where a record has none."""

    label: str
    x: list[float]
    y: list[float]


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


def curves(run: Run) -> list[Curve]:
    """All for which the records have values, in the order of the page."""
    return [curve for make in _MAKERS for curve in make(run) if _has_points(curve)]


def _evaluation(run: Run) -> Iterator[Curve]:
    best = best_measure(run)
    if best is None:
        return
    measured = list(dict.fromkeys(name for record in run.evaluations for name in record["evaluation"]))
    first = [best, *_GENERAL]
    names = [name for name in dict.fromkeys(first) if name in measured]
    names = (names + [name for name in measured if name not in names])[:_MOST_LINES]
    epochs = [record["epoch"] for record in run.evaluations]
    lines = [
        Line(
            _short(name), epochs, _scaled([record["evaluation"].get(name) for record in run.evaluations], 100)
        )
        for name in names
    ]
    left = len(measured) - len(names)
    more = f" {left} more measures are in metrics.jsonl." if left > 0 else ""
    caption = (
        "How often the model is right on data that it does not train on. Higher is better; a line that "
        f"turns down means that the model begins to fit its training pairs only.{more}"
    )
    yield Curve("evaluation", "Evaluation", "% right", caption, lines, None, (), True, _latest(lines, " %"))


_GENERAL = ("mean_recall@1", "tasks_mean", "image_retrieval_recall@1", "text_retrieval_recall@1",
            "image_retrieval_recall@5", "text_retrieval_recall@5")  # fmt: skip


def _short(measure: str) -> str:
    """A name that fits into a legend."""
    found = re.fullmatch(r"(image|text|mean)(?:_retrieval)?_recall@(\d+)", measure)
    if not found:
        return measure
    sought = {"image": "find picture", "text": "find caption", "mean": "mean"}[found[1]]
    return f"{sought}, top {found[2]}"


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
) -> Callable[[Run], Iterator[Curve]]:
    """A curve of one value of the records."""

    def make(run: Run) -> Iterator[Curve]:
        y = _scaled([of(record, key) for record in run.records], factor)
        lines = [Line(title, _epochs(run), y)]
        yield Curve(key, title, unit, caption, lines, None, (), from_zero, _latest(lines, after))

    return make


def _radius(run: Run) -> Iterator[Curve]:
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
    lines = [Line("mean(q−ℓ)", _epochs(run), _scaled([record.get("radius") for record in run.records]))]
    yield Curve("radius", "Radius", "nats", caption, lines, None, tuple(levels), False, _latest(lines))


def _log_u(run: Run) -> Iterator[Curve]:
    low, middle, high = (
        _scaled([record.get(f"log_u_q{q}") for record in run.records]) for q in ("05", "50", "95")
    )
    lines = [Line("median", _epochs(run), middle)]
    caption = (
        "The estimators of the batch's samples. They fall as pairs become easier to tell from the rest; "
        "the upper edge of the band are the samples that are still hard."
    )
    band = Band("5–95 %", _epochs(run), low, high)
    yield Curve("log_u", "Estimators log u", "log u", caption, lines, band, (), False, _latest(lines))


_MAKERS: tuple[Callable[[Run], Iterator[Curve]], ...] = (
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


def _epochs(run: Run) -> list[float]:
    return [record["epoch"] for record in run.records]


def _scaled(values: list, factor: float = 1) -> list[float]:
    numbers = [number(value) for value in values]
    return [nan if value is None else factor * value for value in numbers]


def _has_points(curve: Curve) -> bool:
    return any(value == value for line in curve.lines for value in line.y)


def _latest(lines: list[Line], after: str = "") -> str:
    values = [value for value in lines[0].y if value == value]
    return f"{values[-1]:.4g}{after}".replace("-", "−") if values else ""
