"""The few big numbers at the head of a page: how good, how long, how fast, and what was lost."""

from __future__ import annotations

import re
from statistics import median
from typing import NamedTuple

from fastclip.run.folder import Run, number, timing
from fastclip.text import duration
from fastclip.tools.study.courses import measured

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


def known(records: list[dict], name: str) -> list[float]:
    """The numbers that records have under a name, or under it in "time"."""
    values = (number(record.get(name, timing(record, name))) for record in records)
    return [value for value in values if value is not None]


def best_measure(run: Run) -> str | None:
    """By which the best checkpoint is chosen; what was never measured is not it."""
    chosen, names = run.config.evaluate.best if run.config else None, measured([run])
    wanted = (run.facts.get("best", {}).get("measure"), chosen, "mean_recall@1", "tasks_mean")
    return next((name for name in (*wanted, *names) if name in names), None)


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
    measure = best_measure(run) or ""
    scored = [(value, e) for e in run.evaluations for value in known([e["evaluation"]], measure)]
    if not scored:
        return None
    trained = [(value, record) for value, record in scored if record["step"] > 0]
    value, record = max(trained or scored, key=lambda pair: pair[0])
    name = "best score" if trained else "score before training"
    return Figure(name, percent(value), f"{in_words(measure)} ({measure}), at epoch {record['epoch']:.3g}")


def _time(run: Run) -> Figure | None:
    seconds = known([*run.records, run.facts], "elapsed")
    if not seconds:
        return None
    workers = run.facts.get("workers")
    on = f", on {workers} workers" if workers and workers > 1 else ""
    return Figure("time trained", duration(max(seconds)), f"with evaluations and checkpoints{on}")


def _speed(run: Run) -> Figure | None:
    speeds = known(run.records, "samples_per_second")
    if not speeds:
        return None
    wait = median(known(run.records, "data_wait") or [0.0])
    note = f"the median; {100 * wait:.0f} % of the time waiting for data"
    return Figure("samples a second", f"{median(speeds):,.0f}", note, wait > _LONG_WAIT)


def _skipped(run: Run) -> Figure | None:
    for count in known(run.records[-1:], "skipped"):
        note = "their loss or gradient was not finite" if count else "every loss and gradient was finite"
        return Figure("skipped steps", f"{int(count):,}", note, count > 0)
    return None


def _bad(run: Run) -> Figure | None:
    for count in known(run.records[-1:], "bad"):
        of = f"of {run.num_samples:,} " if run.num_samples else ""
        note = f"{of}could not be used, and were replaced" if count else f"all {of}could be used"
        return Figure("bad pairs", f"{int(count):,}", note, count > 0)
    return None
