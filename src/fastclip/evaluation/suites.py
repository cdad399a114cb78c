"""Suites: DataComp's 38 tasks and the paper's three means; the held-out tasks of a collection and theirs.

A mean over fewer tasks than its suite has is marked partial, wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

from fastclip.config.collections import COLLECTIONS
from fastclip.errors import OptionError

SUITES = ("datacomp", *(row.name for row in COLLECTIONS.values() if row.held_out))
IMAGENET, RETRIEVAL = "imagenet_and_variants", "retrieval"
DEFAULT_MEASURE = {
    "classification": "acc1",
    "multilabel": "mean_average_precision",
    "retrieval": "mean_recall@1",
    "associations": "jaccard_score_10-12",
}


class TaskRow(NamedTuple):
    """A task of a suite."""

    key: str  # DataComp's own name
    name: str
    images: int
    classes: int | None
    measure: str
    folder: str
    group: str


class Mean(NamedTuple):
    """A mean over the tasks of a suite that were scored."""

    name: str
    value: float | None
    found: int
    tasks: int

    @property
    def partial(self) -> bool:
        return self.found < self.tasks

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name}: not scored (0 of {self.tasks} tasks)"
        note = f" (partial: {self.found} of {self.tasks} tasks)" if self.partial else ""
        return f"{self.name}: {100 * self.value:.2f} %{note}"


@dataclass(frozen=True)
class Suite:
    """Tasks that belong together, and the means that are reported for them."""

    name: str
    title: str
    rows: tuple[TaskRow, ...]
    groups: dict[str, str | None]  # the name of each mean, and its group of tasks; None is all of them

    def row(self, folder: str) -> TaskRow | None:
        return next((row for row in self.rows if row.folder == folder), None)

    def missing(self, folders: set[str]) -> list[TaskRow]:
        return [row for row in self.rows if row.folder not in folders]

    def means(self, scores: dict[str, float]) -> list[Mean]:
        """The suite's means, from each task's score by folder name."""
        means = []
        for name, group in self.groups.items():
            rows = [row for row in self.rows if group is None or row.group == group]
            values = [scores[row.folder] for row in rows if row.folder in scores]
            mean = sum(values) / len(values) if values else None
            means.append(Mean(name, mean, len(values), len(rows)))
        return means


def find_suite(name: str) -> Suite:
    """One of SUITES."""
    if name not in SUITES:
        raise OptionError.unknown("suite", name, SUITES)
    if name == "datacomp":
        groups: dict[str, str | None] = {"Datacomp": None, "Retrieval": RETRIEVAL, "IN & Variants": IMAGENET}
        return Suite(name, "DataComp", _read_datacomp(), groups)
    groups = {"Retrieval": "retrieval", "Classification": "classification", "Hard": "hard"}
    return Suite(name, name.capitalize(), _held_out_rows(COLLECTIONS[name].held_out), groups)


def measure_of(folder: str, kind: str) -> str:
    """The metric that counts for a task: DataComp's choice for its tasks, else the default of its kind."""
    row = find_suite("datacomp").row(folder)
    return row.measure if row else DEFAULT_MEASURE[kind]


def _read_datacomp() -> tuple[TaskRow, ...]:
    lines = (files("fastclip.evaluation") / "datacomp_tasks.csv").read_text().splitlines()
    return tuple(
        TaskRow(key, name, int(images), int(classes) if classes else None, *rest)
        for key, name, images, classes, *rest in (line.split(",") for line in lines[1:])
    )


def _held_out_rows(sets: Mapping[str, tuple[str, ...]]) -> tuple[TaskRow, ...]:
    """Categories are the packages' own, too broad or too odd for a small model; these tasks are "hard"."""
    rows = []
    for prefix, questions in sets.items():
        for question in questions:
            hard = question == "categories"
            folder = f"hard_{prefix}_{question}" if hard else f"{prefix}_{question}"
            kind = "retrieval" if question == "retrieval" else "classification"
            name, group = f"{prefix} {question.replace('_', ' ')}", "hard" if hard else kind
            rows.append(TaskRow(folder, name, 0, None, DEFAULT_MEASURE[kind], folder, group))
    return tuple(rows)
