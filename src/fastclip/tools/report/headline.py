"""The few big numbers at the head of a page: how good, how long, how fast, and what was lost."""

from __future__ import annotations

import re
from statistics import median
from typing import NamedTuple

from fastclip.run.folder import Run, number, timing
from fastclip.text import duration

_LONG_WAIT = 0.5  # share of the time: more readers would make the run faster


class Figure(NamedTuple):
    """A big number, and what it is."""

    name: str
    value: str
    note: str
    alarming: bool = False


def headline(run: Run) -> list[Figure]:
    """Those that the run's records allow."""
    found = [_score(run), _time(run), _speed(run), _skipped(run), _bad(run)]
    return [figure for figure in found if figure is not None]


def best_measure(run: Run) -> str | None:
    """By which the best checkpoint is chosen; what was never measured is not it."""
    config = run.config
    wanted = [
        run.facts.get("best", {}).get("measure"),
        config.evaluate.best if config else None,
        "mean_recall@1",
        "tasks_mean",
    ]
    measured = [name for record in run.evaluations for name in record["evaluation"]]
    return next((name for name in (*wanted, *measured) if name in measured), None)


def in_words(measure: str) -> str:
    """A measure for who does not know it: what the share is a share of."""
    task, _, name = measure.rpartition("/")
    words = _WORDS.get(name, "by this measure")
    if found := re.fullmatch(r"(image|text)_retrieval_recall@(\d+)", name):
        which = (
            "captions find their own picture" if found[1] == "image" else "pictures find their own caption"
        )
        words = f"of {which} {'first' if found[2] == '1' else f'among the first {found[2]}'}"
    return f"{words}, in {task}" if task else words


_WORDS = {
    "mean_recall@1": "of captions and pictures find their own partner first",
    "tasks_mean": "is the mean over all tasks",
    "acc1": "of pictures are given the right class",
    "acc5": "of pictures have the right class among the first 5",
    "mean_per_class_recall": "of a class's pictures are recognised, on average",
    "mean_average_precision": "is the mean average precision",
    "jaccard_score_10-12": "is the overlap with what people chose",
}


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _score(run: Run) -> Figure | None:
    measure = best_measure(run)
    if measure is None:
        return None
    scored = [
        (value, record)
        for record in run.evaluations
        if (value := number(record["evaluation"].get(measure))) is not None
    ]
    trained = [(value, record) for value, record in scored if record["step"] > 0]
    if not scored:
        return None
    value, record = max(trained or scored, key=lambda pair: pair[0])
    name = "best score" if trained else "score before training"
    return Figure(name, percent(value), f"{in_words(measure)} ({measure}), at epoch {record['epoch']:.3g}")


def _time(run: Run) -> Figure | None:
    known = [timing(record, "elapsed") for record in run.records] + [number(run.facts.get("elapsed"))]
    seconds = max((value for value in known if value is not None), default=None)
    if seconds is None:
        return None
    workers = run.facts.get("workers")
    on = f", on {workers} workers" if workers and workers > 1 else ""
    return Figure("time trained", duration(seconds), f"with evaluations and checkpoints{on}")


def _speed(run: Run) -> Figure | None:
    speeds = [v for record in run.records if (v := timing(record, "samples_per_second")) is not None]
    if not speeds:
        return None
    waits = [v for record in run.records if (v := timing(record, "data_wait")) is not None]
    wait = median(waits) if waits else 0.0
    note = f"the median; {100 * wait:.0f} % of the time waiting for data"
    return Figure("samples a second", f"{median(speeds):,.0f}", note, wait > _LONG_WAIT)


def _skipped(run: Run) -> Figure | None:
    count = _last_count(run, "skipped")
    if count is None:
        return None
    note = "their loss or gradient was not finite" if count else "every loss and gradient was finite"
    return Figure("skipped steps", f"{count:,}", note, count > 0)


def _bad(run: Run) -> Figure | None:
    count, pairs = _last_count(run, "bad"), run.num_samples
    if count is None:
        return None
    of = f" of {pairs:,}" if pairs else ""
    note = f"{of.strip()} could not be used, and were replaced" if count else f"all{of} could be used"
    return Figure("bad pairs", f"{count:,}", note.strip(), count > 0)


def _last_count(run: Run, name: str) -> int | None:
    values = [number(record.get(name)) for record in run.records[-1:]]
    return None if not values or values[0] is None else int(values[0])
