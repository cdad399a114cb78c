"""The page about a study: its tables, each arm's course, what tuning chose, and which runs are missing."""

from __future__ import annotations

from collections import Counter

import yaml

from fastclip.run.folder import State, without_secrets
from fastclip.tools.report.headline import Figure
from fastclip.tools.report.study_curves import against_options, courses
from fastclip.tools.report.template import Page, drawn, fill
from fastclip.tools.study.measures import read_scores
from fastclip.tools.study.rendering import difference_of, grids
from fastclip.tools.study.study import StudyState
from fastclip.tools.study.tables import StudyTables, study_tables


def render_study(state: StudyState) -> Page:
    """The page, and what is drawn on it; an empty study has one too."""
    scores = read_scores(state)
    tables = study_tables(state, scores)
    settings = {name: value for name, value in state.settings.items() if value not in (None, {}, [])}
    options, course = against_options(tables), courses(scores, state.arms, state.baseline)
    html = fill(
        "study.html",
        name=tables.name,
        about=_about(state),
        state=progress_of(state),
        figures=_headline(tables),
        missing=tables.missing,
        grids=list(grids(tables)),
        options=drawn(options),
        courses=drawn(course),
        runs=state.runs,
        settings=without_secrets(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)),
    )
    return Page(html, [*options, *course])


def progress_of(state: StudyState) -> State:
    """How many of its runs are done, and how many failed."""
    counts = Counter(run.state for run in state.runs)
    total, done, failed = len(state.runs), counts["done"], counts["failed"]
    if total and done == total:
        return State("finished", f"all {total:,} runs are done")
    words = f"{done:,} of {total:,} runs done{f', {failed:,} failed' if failed else ''}"
    return State("stopped" if failed else "in progress", f"{words}; the same command goes on")


def _about(state: StudyState) -> list[str]:
    seeds = len({run.seed for run in state.runs})
    about = [f"{len(state.arms):,} arm{'s' * (len(state.arms) != 1)}", f"{seeds:,} seed{'s' * (seeds != 1)}"]
    about += [f"recipe {state.settings['config']}"] if state.settings.get("config") else []
    about += [f"suite {state.suite}"] if state.suite else []
    return about


def _headline(tables: StudyTables) -> list[Figure]:
    """The best arm of the first table, and the largest gain over a baseline in it."""
    table = next(iter(tables.of_kind("mean") or tables.of_kind("training")), None)
    if table is None:
        return []
    name = table.measure.name
    scored = [row for row in table.rows if row.summary is not None and not row.missing]
    found = []
    if scored:
        best = max(scored, key=lambda row: row.summary.mean if row.summary else 0.0)
        assert best.summary is not None
        partial = f", partial: {table.measure.partial}" if table.measure.partial else ""
        found.append(Figure(f"best {name}", f"{100 * best.summary.mean:.2f} %", f"{best.arm}{partial}"))
    compared = [row for row in scored if row.difference is not None]
    if compared:
        most = max(compared, key=lambda row: row.difference.mean if row.difference else 0.0)
        assert most.difference is not None
        gain = f"{100 * most.difference.mean:+.2f}".replace("-", "−")
        note = f"points of {name}: {most.arm} over {most.baseline}, seed by seed: {difference_of(most)}"
        found.append(Figure("largest gain", gain, note))
    return found
