"""A study in tables, in the paper's form: mean (sd) over seeds, the best, and the gain over the baseline.

Everything here is plain data; `rendering` writes it for terminals, Markdown and machines.
"""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fastclip.config.options import BatchConfig, DataConfig, TrainConfig
from fastclip.run.folder import Run
from fastclip.terminal import console, progress
from fastclip.tools.study.arms import Arm, identity, slug
from fastclip.tools.study.captions import EqualCaptions, equal_captions
from fastclip.tools.study.measures import Measure, Scores, points, read_scores, training_measure
from fastclip.tools.study.statistics import Difference, Summary, effort_to_match, paired_difference, summarise
from fastclip.tools.study.study import StudyState, read_study
from fastclip.tools.study.tried import Tried, read_tried


@dataclass
class Row:
    """An arm's line of a table."""

    arm: str
    summary: Summary | None
    """None if no seed has a score."""
    missing: int
    """Seeds of the study that have none."""
    baseline: str | None
    """The arm that this one is compared with; None if there is none, or it is one itself."""
    improvement: float | None
    """Its mean minus the baseline's, over all seeds that each has."""
    difference: Difference | None
    """The same seed by seed, over those that both have."""
    best: bool = False
    """No other arm that it may be compared with has a higher mean; arms that lack seeds do not take part."""


@dataclass
class MeasureTable:
    """One measure of all arms."""

    measure: Measure
    rows: list[Row]


class EffortRow(NamedTuple):
    """What it took an arm to come to its baseline's final score, where 1 is what it took the baseline."""

    arm: str
    baseline: str
    samples: float | None
    """The mean over seeds; None unless all of them reached it, for those that did are the lucky ones."""
    seconds: float | None
    reached: int
    seeds: int


class CaptionRow(NamedTuple):
    """How often equal captions meet in the batches of an arm's first seed."""

    arm: str
    batch: int
    found: EqualCaptions


@dataclass
class StudyTables:
    """All that a study says."""

    name: str
    arms: list[Arm]
    columns: list[str]
    """The varied options, in the order of the study."""
    seeds: int
    tables: list[MeasureTable] = field(default_factory=list)
    effort_measure: str = ""
    effort: list[EffortRow] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    captions: list[CaptionRow] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[MeasureTable]:
        """Tables of means, of tasks, or of evaluations in training."""
        return [table for table in self.tables if table.measure.kind == kind]

    def label(self, arm: Arm) -> list[str]:
        """An arm's cells in the columns of the varied options; with its name where they do not say it."""
        cells = [shown(arm.values[column]) if column in arm.values else "–" for column in self.columns]
        return [arm.name, *cells] if self.needs_names else cells

    @property
    def headings(self) -> list[str]:
        return ["arm", *self.columns] if self.needs_names else self.columns

    @property
    def needs_names(self) -> bool:
        """Whether some arm has a name that its values do not say."""
        return any(not arm.values or arm.name != slug(arm.values) for arm in self.arms)


def study_tables(state: StudyState, scores: Scores | None = None) -> StudyTables:
    """Read the study's runs and put their scores together; what is not there is told in `missing`."""
    scores = scores or read_scores(state)
    columns = list(dict.fromkeys(key for arm in state.arms for key in arm.values))
    seeds = len({run.seed for run in state.runs})
    tables = StudyTables(Path(state.folder).resolve().name, state.arms, columns, seeds)
    baselines = find_baselines(state.arms, state.baseline)
    tables.missing = list(scores.missing)
    if state.baseline and not any(baselines.values()):
        tables.missing.append(
            f"No arm can be compared with the baseline ({_values(state.baseline)}): it takes one arm with "
            "these values and another that differs in nothing else that is varied."
        )
    if not scores.measures:
        tables.missing.append("There are no scores yet: no run has finished with an evaluation or tasks.")
    tables.tables = [_table(measure, state.arms, baselines, seeds) for measure in scores.measures]
    tables.tried = read_tried(state.folder, tables.missing)
    _add_effort(tables, scores, baselines)
    _add_captions(tables, scores)
    return tables


def find_baselines(arms: list[Arm], baseline: dict[str, object]) -> dict[str, str | None]:
    """For each arm the name of the one it is compared with: the baseline's values, all others the arm's own.

    An arm may say more than its baseline: of several that fit, the one that says most is taken.
    """
    wanted = {identity({key: value}) for key, value in baseline.items()}

    def others(arm: Arm) -> set[str]:
        return {identity({key: value}) for key, value in arm.values.items() if key not in baseline}

    def is_baseline(arm: Arm) -> bool:
        return bool(wanted) and wanted <= {identity({key: value}) for key, value in arm.values.items()}

    references = sorted(filter(is_baseline, arms), key=lambda arm: -len(arm.values))
    found: dict[str, str | None] = {}
    for arm in arms:
        matching = (one.name for one in references if others(one) <= others(arm))
        found[arm.name] = None if is_baseline(arm) else next(matching, None)
    return found


def print_study(out: Path, json: bool = False) -> None:
    """Show a study's tables, as far as its runs have come."""
    from fastclip.tools.study.rendering import as_dict, for_terminal

    tables = study_tables(read_study(out))
    if json:
        print(json_module.dumps(as_dict(tables), indent=2))
        return
    for part in for_terminal(tables):
        console().print(part, markup=False) if isinstance(part, str) else console().print(part)


def shown(value: object) -> str:
    """A varied value as people write it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return value if isinstance(value, str) else json_module.dumps(value, default=str)


def _values(values: dict[str, object]) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in values.items())


def _table(measure: Measure, arms: list[Arm], baselines: dict[str, str | None], seeds: int) -> MeasureTable:
    rows = []
    for arm in arms:
        values, baseline = measure.values.get(arm.name, {}), baselines[arm.name]
        against = measure.values.get(baseline, {}) if baseline else {}
        summary = summarise(values.values()) if values else None
        difference = paired_difference(values, against)
        improvement = summary.mean - fmean(against.values()) if summary and against else None
        if difference is not None and values.keys() == against.keys():
            improvement = difference.mean  # the same number: or the two could be rounded apart
        rows.append(Row(arm.name, summary, seeds - len(values), baseline, improvement, difference))
    _mark_best(rows)
    return MeasureTable(measure, rows)


def _mark_best(rows: list[Row]) -> None:
    """Within each baseline and the arms that are compared with it; or among all, where there is none."""
    compared = any(row.baseline for row in rows)
    circles: dict[str | None, list[Row]] = {}
    for row in rows:
        circles.setdefault((row.baseline or row.arm) if compared else None, []).append(row)
    for circle in circles.values():
        whole = [row for row in circle if row.summary is not None and not row.missing]
        highest = max((row.summary.mean for row in whole if row.summary), default=None)
        for row in whole if len(circle) > 1 else []:
            row.best = row.summary is not None and row.summary.mean == highest


def _add_effort(tables: StudyTables, scores: Scores, baselines: dict[str, str | None]) -> None:
    measure = training_measure(run for runs in scores.runs.values() for run in runs.values())
    if measure is None:
        return
    tables.effort_measure = measure
    for arm, baseline in baselines.items():
        both = sorted(scores.runs[arm].keys() & scores.runs[baseline].keys()) if baseline else []
        if baseline is None or not both:
            continue
        found = [
            effort_to_match(
                points(scores.runs[arm][seed], measure), points(scores.runs[baseline][seed], measure)
            )
            for seed in both
        ]
        reached = [effort for effort in found if effort is not None]
        seconds = [effort.seconds for effort in reached if effort.seconds is not None]
        row = EffortRow(
            arm,
            baseline,
            fmean(effort.samples for effort in reached) if len(reached) == len(both) else None,
            fmean(seconds) if len(seconds) == len(both) else None,
            len(reached),
            len(both),
        )
        tables.effort.append(row)


def _add_captions(tables: StudyTables, scores: Scores) -> None:
    """Runs with the same data, batch, epochs and order share a count."""
    counted: dict[str, EqualCaptions | None] = {}
    for arm, runs in scores.runs.items():
        if not runs:
            continue
        run = runs[min(runs)]
        try:
            config = _order_of(run)
            data = [config.data.train, config.data.shuffle, config.data.window]
            key = json_module.dumps([data, config.batch.size, config.epochs, config.seed])
            if key not in counted:
                with progress("counting equal captions", "captions") as update:
                    counted[key] = equal_captions(config, update)
        except (OSError, ValueError, TypeError, KeyError) as error:
            sentence = f"How often equal captions meet in a batch is not known: {error}"
            tables.missing += [] if sentence in tables.missing else [sentence]
            continue
        found = counted[key]
        tables.captions += [] if found is None else [CaptionRow(arm, config.batch.size, found)]


def _order_of(run: Run) -> TrainConfig:
    """As much of a run's config as its batches depend on, from its checkpoint."""
    saved = run.facts["config"]
    data, batch = DataConfig(**saved.get("data", {})), BatchConfig(**saved["batch"])
    return TrainConfig(epochs=saved["epochs"], seed=saved.get("seed", 0), data=data, batch=batch)
