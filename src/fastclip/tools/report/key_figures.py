"""The key figures at the top of a page: score, training time, speed, skipped steps and bad pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import fmean, median
from typing import NamedTuple

from fastclip.run.folder import Run, number, timing
from fastclip.text import duration
from fastclip.tools.study.learning_curves import measured

_LONG_WAIT = 0.5  # share of the time; above it, more loader workers would make the run faster


class Figure(NamedTuple):
    """A key figure."""

    name: str
    value: str
    note: str
    alarming: bool = False


def key_figures(run: Run) -> list[Figure]:
    """The figures that the run's records have values for."""
    return list(_figures(run))


def known(records: list[dict], name: str) -> list[float]:
    """The finite values that records have under a name, at the top level or under "time"."""
    values = (number(record.get(name, timing(record, name))) for record in records)
    return [value for value in values if value is not None]


def best_measure(run: Run) -> str | None:
    """The metric that the best checkpoint is chosen by, if it was measured; otherwise one that was."""
    chosen, names = run.config.evaluate.best if run.config else None, measured([run])
    preferred = (run.metadata.get("best", {}).get("measure"), chosen, "mean_recall@1", "tasks_mean")
    return next((name for name in (*preferred, *names) if name in names), None)


def describe(measure: str) -> str:
    """A metric in plain English, to be read after its value: "75 %" "of captions rank …"."""
    task, _, name = measure.rpartition("/")
    meaning = _MEANINGS.get(name, "by this metric")
    if recall := re.fullmatch(r"(image|text)_retrieval_recall@(\d+)", name):
        which = {"image": "captions rank their own image", "text": "images rank their own caption"}
        meaning = f"of {which[recall[1]]} {'first' if recall[2] == '1' else f'in the top {recall[2]}'}"
    return f"{meaning}, on {task}" if task else meaning


_MEANINGS = {
    "mean_recall@1": "of captions and images rank their own partner first",
    "tasks_mean": "mean over all tasks",
    "acc1": "of images are assigned the right class",
    "acc5": "of images have the right class in the top 5",
    "mean_per_class_recall": "of the images of a class are recognised, on average",
    "mean_average_precision": "mean average precision",
    "jaccard_score_10-12": "overlap with human choices",
}


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _figures(run: Run) -> Iterator[Figure]:
    measure, pairs = best_measure(run) or "", f"{run.num_samples:,} pairs" if run.num_samples else "the pairs"
    scored = [(value, e) for e in run.evaluations for value in known([e["evaluation"]], measure)]
    if scored:
        trained = [(value, record) for value, record in scored if record["step"] > 0]
        value, record = max(trained or scored, key=lambda pair: pair[0])
        name = "best score" if trained else "score before training"
        yield Figure(name, percent(value), f"{describe(measure)} ({measure}), at epoch {record['epoch']:.3g}")
    if seconds := known([*run.records, run.metadata], "elapsed"):
        ranks = run.metadata.get("workers")
        on = f", on {ranks} ranks" if ranks and ranks > 1 else ""
        yield Figure("training time", duration(max(seconds)), f"including evaluations and checkpoints{on}")
    if speeds := known(run.records, "samples_per_second"):
        wait = median(known(run.records, "data_wait") or [0.0])
        note = f"median; {100 * wait:.0f} % of the time is spent waiting for data"
        yield Figure("samples/s", f"{median(speeds):,.0f}", note, wait > _LONG_WAIT)
    if left_out := known(run.records, "left_out"):
        of = f"of {run.config.batch.size - 1:,} per pair, on average: " if run.config else ""
        yield Figure("negatives left out", f"{fmean(left_out):.3g}", f"{of}their caption is the pair's own")
    for skipped in known(run.records[-1:], "skipped"):
        note = "their loss or gradient was not finite" if skipped else "all losses and gradients were finite"
        yield Figure("skipped steps", f"{int(skipped):,}", note, skipped > 0)
    for bad in known(run.records[-1:], "bad"):
        note = f"of {pairs} could not be used and were replaced" if bad else f"all {pairs} could be used"
        yield Figure("bad pairs", f"{int(bad):,}", note, bad > 0)
