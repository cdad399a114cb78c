"""A study's tables for a terminal, as Markdown, and as plain values for machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from fastclip.tools.study.arms import identity
from fastclip.tools.study.statistics import Difference
from fastclip.tools.study.tables import MeasureTable, Row, StudyTables, shown
from fastclip.tools.study.tried import Tried

_MOST_COLUMNS = 6  # of numbers, side by side in a terminal


class Cell(NamedTuple):
    """A cell of a grid."""

    text: str
    bold: bool = False


class Grid(NamedTuple):
    """A table as it is shown: the first columns name an arm or a task, the rest are numbers."""

    title: str
    note: str
    headings: list[str]
    names: int
    """How many columns are names."""
    rows: list[list[Cell]]


def grids(tables: StudyTables) -> Iterator[Grid]:
    """Every table that has something to say, in the order in which a reader needs them."""
    means, tasks, training = (tables.of_kind(kind) for kind in ("mean", "task", "training"))
    if len(means) > 1:
        yield _overview(tables, means)
    for table in (*means, *training[:1]):  # the others are for machines
        yield measure_grid(tables, table)
    if tasks:
        yield _tasks(tables, tasks)
    if tables.effort:
        yield _effort(tables)
    if tables.tried:
        yield _tuning(tables)
    if tables.captions:
        yield _captions(tables)


def measure_grid(tables: StudyTables, table: MeasureTable) -> Grid:
    """One measure of all arms, with differences where there is a baseline."""
    measure = table.measure
    compared = any(row.baseline for row in table.rows)
    headings = [*tables.headings, "% (sd)", "seeds"]
    headings += ["improvement", "paired difference, 95 %"] if compared else []
    rows = []
    for arm, row in zip(tables.arms, table.rows, strict=True):
        line = [*map(Cell, tables.label(arm)), _score(row), Cell(_seeds(row))]
        if compared:
            line += [Cell(points_of(row.improvement)), Cell(difference_of(row))]
        rows.append(line)
    partial = f"; partial: {measure.partial}" if measure.partial else ""
    note = f"{measure.about}{partial}."
    if any(row.missing and row.summary for row in table.rows):
        note += " * lacks seeds, and takes no part in who is best."
    return Grid(measure.name, note, headings, len(tables.headings), rows)


def for_terminal(tables: StudyTables) -> Iterator[Table | str]:
    """Rich tables, and lines between them."""
    for grid in chain.from_iterable(map(_narrow, grids(tables))):
        table = Table(title=Text(grid.title, style="bold"), title_justify="left", box=None, pad_edge=False)
        table.padding = (0, 2, 0, 0)
        for number, heading in enumerate(grid.headings):
            right = number >= grid.names
            table.add_column(
                Text(heading), justify="right" if right else "left", overflow="fold", no_wrap=right
            )
        for row in grid.rows:
            table.add_row(*(Text(cell.text, style="bold" if cell.bold else "") for cell in row))
        yield table
        yield f"{grid.note}\n"
    for sentence in tables.missing:
        yield f"! {sentence}"


def _narrow(grid: Grid) -> Iterator[Grid]:
    """Pieces with no more columns of numbers than a terminal shows, each with the names."""
    for start in range(grid.names, len(grid.headings), _MOST_COLUMNS):
        columns = [*range(grid.names), *range(start, min(start + _MOST_COLUMNS, len(grid.headings)))]
        rows = [[row[column] for column in columns] for row in grid.rows]
        yield grid._replace(headings=[grid.headings[column] for column in columns], rows=rows)


def as_markdown(tables: StudyTables) -> str:
    """For documents: every table under its name, the best in bold."""
    parts = []
    for grid in grids(tables):
        lines = [f"**{_plain(grid.title)}**: {_plain(grid.note)}", ""]
        lines.append("| " + " | ".join(map(_plain, grid.headings)) + " |")
        rules = ["---" if number < grid.names else "---:" for number in range(len(grid.headings))]
        lines.append("|" + "|".join(rules) + "|")
        for row in grid.rows:
            cells = (f"**{_plain(cell.text)}**" if cell.bold else _plain(cell.text) for cell in row)
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    if tables.missing:
        parts.append("\n".join(f"- {_plain(sentence)}" for sentence in tables.missing))
    return "\n\n".join(parts) + "\n"


def as_dict(tables: StudyTables) -> dict:
    """All numbers as they are: shares of 1, not percent."""
    return {
        "study": tables.name,
        "seeds": tables.seeds,
        "arms": [asdict(arm) for arm in tables.arms],
        "measures": [
            {
                "name": table.measure.name,
                "kind": table.measure.kind,
                "about": table.measure.about,
                "partial": table.measure.partial,
                "rows": [
                    asdict(row)
                    | {
                        "summary": row.summary and row.summary._asdict(),
                        "difference": row.difference and row.difference._asdict(),
                        "values": {str(s): v for s, v in table.measure.values.get(row.arm, {}).items()},
                    }
                    for row in table.rows
                ],
            }
            for table in tables.tables
        ],
        "effort": {"measure": tables.effort_measure, "rows": [row._asdict() for row in tables.effort]},
        "tuning": [one._asdict() for one in tables.tried],
        "equal_captions": [row._asdict() | {"found": row.found._asdict()} for row in tables.captions],
        "missing": tables.missing,
    }


def points_of(share: float | None) -> str:
    """A difference in percentage points, with its sign."""
    return "–" if share is None else _signed(100 * share)


def difference_of(row: Row) -> str:
    """+1.46 [+0.90, +2.02]; or why there is no interval."""
    found: Difference | None = row.difference
    if found is None:
        return "no seed in common" if row.baseline else "–"
    if found.low is None or found.high is None:
        return f"{_signed(100 * found.mean)} ({found.note})"
    few = f", {found.n} seeds" if row.summary and found.n < row.summary.n else ""
    return f"{_signed(100 * found.mean)} [{_signed(100 * found.low)}, {_signed(100 * found.high)}]{few}"


def _overview(tables: StudyTables, means: list[MeasureTable]) -> Grid:
    """The paper's table: its means side by side, and all improvements in one column."""
    compared = any(row.baseline for table in means for row in table.rows)
    headings = [*tables.headings, *(table.measure.name for table in means)]
    headings += ["improvement"] if compared else []
    rows = []
    for number, arm in enumerate(tables.arms):
        across = [table.rows[number] for table in means]
        line = [*map(Cell, tables.label(arm)), *map(_score, across)]
        if compared:
            gains = [points_of(row.improvement) for row in across]
            line.append(Cell(", ".join(gains) if any(row.baseline for row in across) else ""))
        rows.append(line)
    partial = [f"{t.measure.name}: {t.measure.partial}" for t in means if t.measure.partial]
    note = "Mean (sd) over seeds, in percent; improvements are differences in points."
    note += f" Partial: {'; '.join(partial)}." if partial else ""
    return Grid("Summary", note, headings, len(tables.headings), rows)


def _tasks(tables: StudyTables, tasks: list[MeasureTable]) -> Grid:
    """A line for each task, a column for each arm."""
    rows = [
        [Cell(table.measure.name), Cell(table.measure.about), *map(_score, table.rows)] for table in tasks
    ]
    headings = ["task", "measure", *(arm.name for arm in tables.arms)]
    return Grid("Tasks", "Mean (sd) over seeds, in percent.", headings, 2, rows)


def _effort(tables: StudyTables) -> Grid:
    rows = [
        [
            Cell(row.arm),
            Cell(row.baseline),
            Cell("–" if row.samples is None else f"{row.samples:.2f} ×"),
            Cell("–" if row.seconds is None else f"{row.seconds:.2f} ×"),
            Cell(f"{row.reached} of {row.seeds}"),
        ]
        for row in tables.effort
    ]
    note = (
        f"What it took to reach the baseline's final {tables.effort_measure}, where 1 is what it took the "
        "baseline: by the first evaluation at or above it, as a mean over seeds where all of them reached it."
    )
    headings = ["arm", "baseline", "samples", "time", "seeds that reached it"]
    return Grid("How soon", note, headings, 2, rows)


def _tuning(tables: StudyTables) -> Grid:
    """A line for each arm, a column for each choice that was tried."""
    choices = {identity(one.values): one.values for one in tables.tried}
    rows = []
    for arm in dict.fromkeys(one.arm for one in tables.tried):
        tried = {identity(one.values): one for one in tables.tried if one.arm == arm}
        rows.append([Cell(arm), *(_trial(tried.get(choice)) for choice in choices)])
    headings = [", ".join(f"{key} {shown(value)}" for key, value in v.items()) for v in choices.values()]
    note = "Scores on validation pairs, in percent, never on the tests; ✓ was chosen."
    return Grid("Tuning", note, ["arm", *headings], 1, rows)


def _trial(one: Tried | None) -> Cell:
    if one is None:
        return Cell("–")
    if one.score is None:
        return Cell("failed" if one.error else "not there yet")
    return Cell(f"{100 * one.score:.2f}{' ✓' * one.chosen}", one.chosen)


def _captions(tables: StudyTables) -> Grid:
    """A line for each batch size and order that the arms have."""
    alike: dict[tuple, list[str]] = {}
    for row in tables.captions:
        alike.setdefault((row.batch, row.found), []).append(row.arm)
    rows = [
        [
            Cell(f"{arms[0]} and {len(arms) - 1} more" if len(arms) > 2 else ", ".join(arms)),
            Cell(f"{batch:,}"),
            Cell(f"{100 * found.actual:.2f}"),
            Cell(f"{100 * found.expected:.2f}"),
            Cell(f"{100 * found.repeated:.1f}"),
            Cell(f"{found.captions:,} of {found.samples:,}"),
        ]
        for (batch, found), arms in alike.items()
    ]
    note = (
        "The share of a batch's samples that have another with the same caption in it, which the loss takes "
        "for a negative: counted over the first seed's batches, and expected by chance."
    )
    headings = ["arms", "batch", "met, %", "expected, %", "shared in all data, %", "different captions"]
    return Grid("Equal captions", note, headings, 1, rows)


def _score(row: Row) -> Cell:
    if row.summary is None:
        return Cell("missing")
    spread = "" if row.summary.sd is None else f" ({100 * row.summary.sd:.2f})"
    return Cell(f"{100 * row.summary.mean:.2f}{spread}{'*' * bool(row.missing)}", row.best)


def _seeds(row: Row) -> str:
    n = row.summary.n if row.summary else 0
    return f"{n} of {n + row.missing}" if row.missing else str(n)


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _plain(text: str) -> str:
    """On one line, with no sign that would end a cell."""
    return " ".join(text.replace("|", "\\|").split())
