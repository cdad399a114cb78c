"""The few big numbers at the head of a page: how good, how long, how fast, and what was lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from fastclip.run.folder import Run, number, timing
from fastclip.text import duration
from fastclip.tools.study.learning_curves import measured

_LONG_WAIT = 0.5  # share of the time: more readers would make the run faster


class Figure(NamedTuple):
    """A big number, and what it is."""

    name: str
    value: str
    note: str
    alarming: bool = False


def headline(run: Run) -> list[Figure]:
    """Those that the run's records allow."""
    return list(_figures(run))


def known(records: list[dict], name: str) -> list[float]:
    """The numbers that records have under a name, or under it in "time"."""
    values = (number(record.get(name, timing(record, name))) for record in records)
    return [value for value in values if value is not None]


def best_measure(run: Run) -> str | None:
    """By which the best checkpoint is chosen; what was never measured is not it."""
    chosen, names = run.config.evaluate.best if run.config else None, measured([run])
    wanted = (run.metadata.get("best", {}).get("measure"), chosen, "mean_recall@1", "tasks_mean")
    return next((name for name in (*wanted, *names) if name in names), None)


def in_words(measure: str) -> str:
    """A measure for who does not know it: what the share is a share of."""
    task, _, name = measure.rpartition("/")
    words = _WORDS.get(name, "by this measure")
    if found := re.fullmatch(r"(image|text)_retrieval_recall@(\d+)", name):
        which = {"image": "captions find their own picture", "text": "pictures find their own caption"}
        words = f"of {which[found[1]]} {'first' if found[2] == '1' else f'among the first {found[2]}'}"
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


def _figures(run: Run) -> Iterator[Figure]:
    measure, pairs = best_measure(run) or "", f"of {run.num_samples:,} " if run.num_samples else ""
    scored = [(value, e) for e in run.evaluations for value in known([e["evaluation"]], measure)]
    if scored:
        trained = [(value, record) for value, record in scored if record["step"] > 0]
        value, record = max(trained or scored, key=lambda pair: pair[0])
        name = "best score" if trained else "score before training"
        yield Figure(name, percent(value), f"{in_words(measure)} ({measure}), at epoch {record['epoch']:.3g}")
    if seconds := known([*run.records, run.metadata], "elapsed"):
        workers = run.metadata.get("workers")
        on = f", on {workers} workers" if workers and workers > 1 else ""
        yield Figure("time trained", duration(max(seconds)), f"with evaluations and checkpoints{on}")
    if speeds := known(run.records, "samples_per_second"):
        wait = median(known(run.records, "data_wait") or [0.0])
        note = f"the median; {100 * wait:.0f} % of the time waiting for data"
        yield Figure("samples a second", f"{median(speeds):,.0f}", note, wait > _LONG_WAIT)
    for skipped in known(run.records[-1:], "skipped"):
        note = "their loss or gradient was not finite" if skipped else "every loss and gradient was finite"
        yield Figure("skipped steps", f"{int(skipped):,}", note, skipped > 0)
    for bad in known(run.records[-1:], "bad"):
        note = f"{pairs}could not be used, and were replaced" if bad else f"all {pairs}could be used"
        yield Figure("bad pairs", f"{int(bad):,}", note, bad > 0)
