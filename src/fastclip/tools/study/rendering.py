"""A study's figures for people: as tables on a terminal, in Markdown, and on a page.

`tables` is what `tables.study_tables` gives and `--json` prints, so kept figures can be written again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from fastclip.tools.study.arms import identity, shown, shown_options, slug

_MOST_COLUMNS = 6  # of numbers, side by side in a terminal


class Best(str):
    """A cell in bold: the best of those that it is compared with."""


class Grid(NamedTuple):
    """A table as it is shown: the first columns name an arm or a task, the rest are numbers."""

    title: str
    note: str
    headings: list[str]
    names: int
    """How many columns are names."""
    rows: list[list[str]]


def grids(tables: dict[str, Any]) -> Iterator[Grid]:
    """Every table that has something to say, in the order in which a reader needs them."""
    means, tasks, training = (of_kind(tables, kind) for kind in ("mean", "task", "training"))
    if len(means) > 1:
        yield _overview(tables, means)
    for measure in (*means, *training[:1]):  # the others are for machines
        yield _measure(tables, measure)
    if tasks:
        headings = ["task", "measure", *(arm["name"] for arm in tables["arms"])]
        rows = [[task["name"], task["about"], *map(_score, task["rows"])] for task in tasks]
        yield Grid("Tasks", "Mean (sd) over seeds, in percent.", headings, 2, rows)
    if tables["effort"]["rows"]:
        yield _effort(**tables["effort"])
    if tables["tuning"]:
        yield _tuning(tables["tuning"])
    if tables["equal_captions"]:
        yield _captions(tables["equal_captions"])


def of_kind(tables: dict[str, Any], kind: str) -> list[dict]:
    """Measures that are means, tasks, or evaluations in training."""
    return [measure for measure in tables["measures"] if measure["kind"] == kind]


def for_terminal(tables: dict[str, Any]) -> Iterator[Table | str]:
    """Rich tables, and lines between them."""
    for grid in chain.from_iterable(map(_narrow, grids(tables))):
        yield as_table(grid)
        yield f"{grid.note}\n"
    for sentence in tables["missing"]:
        yield f"! {sentence}"


def as_table(grid: Grid) -> Table:
    title = Text(grid.title, style="bold") if grid.title else None
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(grid.headings):
        table.add_column(Text(heading), overflow="fold")
        if number >= grid.names:
            table.columns[-1].justify, table.columns[-1].no_wrap = "right", True
    for row in grid.rows:
        table.add_row(*(Text(cell, style="bold" if isinstance(cell, Best) else "") for cell in row))
    return table


def _narrow(grid: Grid) -> Iterator[Grid]:
    """Pieces with no more columns of numbers than a terminal shows, each with the names."""
    for start in range(grid.names, len(grid.headings), _MOST_COLUMNS):
        headings, *rows = [
            row[: grid.names] + row[start : start + _MOST_COLUMNS] for row in (grid.headings, *grid.rows)
        ]
        yield grid._replace(headings=headings, rows=rows)


def as_markdown(tables: dict[str, Any]) -> str:
    """For documents: every table under its name, the best in bold."""
    parts = []
    for grid in grids(tables):
        rules = ["---"] * grid.names + ["---:"] * (len(grid.headings) - grid.names)
        lines = [f"**{_plain(grid.title)}**: {_plain(grid.note)}", "", _line(grid.headings)]
        parts.append("\n".join([*lines, f"|{'|'.join(rules)}|", *map(_line, grid.rows)]))
    if tables["missing"]:
        parts.append("\n".join(f"- {_plain(sentence)}" for sentence in tables["missing"]))
    return "\n\n".join(parts) + "\n"


def points_of(share: float | None) -> str:
    """A difference in percentage points, with its sign."""
    return "–" if share is None else f"{100 * share:+.2f}".replace("-", "−")


def difference_of(row: dict) -> str:
    """+1.46 [+0.90, +2.02]; or why there is no interval."""
    found = row["difference"]
    if found is None:
        return "no seed in common" if row["baseline"] else "–"
    mean, low, high = (points_of(found[name]) for name in ("mean", "low", "high"))
    if found["low"] is None:
        return f"{mean} (one seed gives no interval)"
    few = f", {found['n']} seeds" if found["n"] < row["summary"]["n"] else ""
    return f"{mean} [{low}, {high}]{few}"


def _names(tables: dict[str, Any]) -> list[list[str]]:
    """Columns that name arms, headings first: the varied options, and names that these do not say."""
    arms = tables["arms"]
    options = list(dict.fromkeys(option for arm in arms for option in arm["values"]))
    rows = [[shown(arm["values"][o]) if o in arm["values"] else "–" for o in options] for arm in arms]
    if all(arm["values"] and arm["name"] == slug(arm["values"]) for arm in arms):
        return [options, *rows]
    return [["arm", *options], *([arm["name"], *row] for arm, row in zip(arms, rows, strict=True))]


def _overview(tables: dict[str, Any], means: list[dict]) -> Grid:
    """The paper's table: its means side by side, and all improvements in one column."""
    headings, *rows = _names(tables)
    names = len(headings)
    across = list(zip(*(measure["rows"] for measure in means), strict=True))
    rows = [row + [_score(one) for one in found] for row, found in zip(rows, across, strict=True)]
    headings = headings + [measure["name"] for measure in means]
    if any(one["baseline"] for found in across for one in found):
        headings.append("improvement")
        for row, found in zip(rows, across, strict=True):
            gains = ", ".join(points_of(one["improvement"]) for one in found)
            row.append(gains if any(one["baseline"] for one in found) else "")
    partial = [f"{measure['name']}: {measure['partial']}" for measure in means if measure["partial"]]
    note = "Mean (sd) over seeds, in percent; improvements are differences in points."
    note += f" Partial: {'; '.join(partial)}." if partial else ""
    return Grid("Summary", note, headings, names, rows)


def _measure(tables: dict[str, Any], measure: dict) -> Grid:
    """One measure of all arms, with differences where there is a baseline."""
    headings, *rows = _names(tables)
    names, found = len(headings), measure["rows"]
    headings = [*headings, "% (sd)", "seeds"]
    rows = [[*row, _score(one), _seeds(one)] for row, one in zip(rows, found, strict=True)]
    if any(one["baseline"] for one in found):
        headings += ["improvement", "paired difference, 95 %"]
        for row, one in zip(rows, found, strict=True):
            row += [points_of(one["improvement"]), difference_of(one)]
    note = measure["about"] + (f"; partial: {measure['partial']}." if measure["partial"] else ".")
    if any(one["missing"] and one["summary"] for one in found):
        note += " * lacks seeds, and takes no part in who is best."
    return Grid(measure["name"], note, headings, names, rows)


def _effort(measure: str, rows: list[dict]) -> Grid:
    def times(share: float | None) -> str:
        return "–" if share is None else f"{share:.2f} ×"

    cells = [
        [row["arm"], row["baseline"], times(row["samples"]), times(row["seconds"]),
         f"{row['reached']} of {row['seeds']}"]
        for row in rows
    ]  # fmt: skip
    note = (
        f"What it took to reach the baseline's final {measure}, where 1 is what it took the "
        "baseline: by the first evaluation at or above it, as a mean over seeds where all of them reached it."
    )
    return Grid("How soon", note, ["arm", "baseline", "samples", "time", "seeds that reached it"], 2, cells)


def _tuning(tried: list[dict]) -> Grid:
    """A line for each arm, a column for each choice that was tried."""
    choices = {identity(one["values"]): shown_options(one["values"]) for one in tried}
    cells = {(one["arm"], identity(one["values"])): _trial(one) for one in tried}
    arms = dict.fromkeys(one["arm"] for one in tried)
    rows = [[arm, *(cells.get((arm, choice), "–") for choice in choices)] for arm in arms]
    note = "Scores on validation pairs, in percent, never on the tests; ✓ was chosen."
    return Grid("Tuning", note, ["arm", *choices.values()], 1, rows)


def _trial(one: dict) -> str:
    if one["score"] is None:
        return "failed" if one["error"] else "not there yet"
    return Best(f"{100 * one['score']:.2f} ✓") if one["chosen"] else f"{100 * one['score']:.2f}"


def _captions(counted: list[dict]) -> Grid:
    """A line for each batch size and order that the arms have."""
    alike: dict[tuple, list[str]] = {}
    for row in counted:
        alike.setdefault((row["batch"], *row["found"].values()), []).append(row["arm"])
    rows = [
        [
            f"{arms[0]} and {len(arms) - 1} more" if len(arms) > 2 else ", ".join(arms),
            *(f"{batch:,}", f"{100 * actual:.2f}", f"{100 * expected:.2f}", f"{100 * repeated:.1f}"),
            f"{captions:,} of {samples:,}",
        ]
        for (batch, actual, expected, repeated, captions, samples), arms in alike.items()
    ]
    note = (
        "The share of a batch's samples that have another with the same caption in it, which the loss takes "
        "for a negative: counted over the first seed's batches, and expected by chance."
    )
    headings = ["arms", "batch", "met, %", "expected, %", "shared in all data, %", "different captions"]
    return Grid("Equal captions", note, headings, 1, rows)


def _score(row: dict) -> str:
    if row["summary"] is None:
        return "missing"
    mean, sd = row["summary"]["mean"], row["summary"]["sd"]
    spread = "" if sd is None else f" ({100 * sd:.2f})"
    text = f"{100 * mean:.2f}{spread}{'*' * bool(row['missing'])}"
    return Best(text) if row["best"] else text


def _seeds(row: dict) -> str:
    n = row["summary"]["n"] if row["summary"] else 0
    return f"{n} of {n + row['missing']}" if row["missing"] else str(n)


def _line(cells: list[str]) -> str:
    """A row in Markdown."""
    plain = (f"**{_plain(cell)}**" if isinstance(cell, Best) else _plain(cell) for cell in cells)
    return f"| {' | '.join(plain)} |"


def _plain(text: str) -> str:
    """On one line, with no sign that would end a cell."""
    return " ".join(text.replace("|", "\\|").split())
