"""A study's results as tables: on a terminal, in Markdown, and on a page.

`tables` is what `result_tables.study_tables` returns and `--json` prints: stored results can be rendered.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from fastclip.tools.study.arms import identity, shown, shown_options, slug

_MOST_COLUMNS = 6  # of numbers, on a terminal


class Best(str):
    """A cell in bold: the best among the arms it is compared with."""


class Grid(NamedTuple):
    """A table to show: the first columns name an arm or a task, the others are numbers."""

    title: str
    note: str
    headings: list[str]
    names: int
    """The number of columns with names."""
    rows: list[list[str]]


def grids(tables: dict[str, Any]) -> Iterator[Grid]:
    """All tables that are not empty, the most important first."""
    means, tasks, training = (of_kind(tables, kind) for kind in ("mean", "task", "training"))
    if len(means) > 1:
        yield _overview(tables, means)
    for measure in (*means, *training[:1]):  # the others are in --json
        yield _measure(tables, measure)
    if tasks:
        headings = ["task", "metric", *(arm["name"] for arm in tables["arms"])]
        rows = [[task["name"], task["about"], *map(_score, task["rows"])] for task in tasks]
        yield Grid("Tasks", "Mean (sd) over seeds, in percent.", headings, 2, rows)
    if tables["effort"]["rows"]:
        yield _effort(**tables["effort"])
    if tables["tuning"]:
        yield _tuning(tables["tuning"])
    if tables["equal_captions"]:
        yield _captions(tables["equal_captions"])


def of_kind(tables: dict[str, Any], kind: str) -> list[dict]:
    """The metrics that are a mean, a task, or from training."""
    return [measure for measure in tables["measures"] if measure["kind"] == kind]


def for_terminal(tables: dict[str, Any]) -> Iterator[Table | str]:
    """Rich tables and lines of text between them."""
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
    """Split a grid to fit a terminal; each piece has the columns with names."""
    for start in range(grid.names, len(grid.headings), _MOST_COLUMNS):
        headings, *rows = [
            row[: grid.names] + row[start : start + _MOST_COLUMNS] for row in (grid.headings, *grid.rows)
        ]
        yield grid._replace(headings=headings, rows=rows)


def as_markdown(tables: dict[str, Any]) -> str:
    """Every table under its title, the best in bold."""
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
    """+1.46 [+0.90, +2.02], or why there is no interval."""
    found = row["difference"]
    if found is None:
        return "no seed in common" if row["baseline"] else "–"
    mean, low, high = (points_of(found[name]) for name in ("mean", "low", "high"))
    if found["low"] is None:
        return f"{mean} (one seed gives no interval)"
    few = f", {found['n']} seeds" if found["n"] < row["summary"]["n"] else ""
    return f"{mean} [{low}, {high}]{few}"


def by_columns(title: str, note: str, names: dict[str, Any], numbers: dict[str, Any]) -> Grid:
    """A grid from columns by heading: names first, then numbers."""
    rows = [list(row) for row in zip(*names.values(), *numbers.values(), strict=True)]
    return Grid(title, note, [*names, *numbers], len(names), rows)


def _names(tables: dict[str, Any]) -> dict[str, list[str]]:
    """Columns that name arms: the varied options, and the names that do not follow from them."""
    arms = tables["arms"]
    options = dict.fromkeys(option for arm in arms for option in arm["values"])
    found = {o: [shown(arm["values"][o]) if o in arm["values"] else "–" for arm in arms] for o in options}
    if all(arm["values"] and arm["name"] == slug(arm["values"]) for arm in arms):
        return found
    return {"arm": [arm["name"] for arm in arms]} | found


def _overview(tables: dict[str, Any], means: list[dict]) -> Grid:
    """The paper's table: the means side by side, and their improvements in one column."""
    columns = {measure["name"]: [_score(row) for row in measure["rows"]] for measure in means}
    across = zip(*(measure["rows"] for measure in means), strict=True)
    gains = [", ".join(points_of(one["improvement"]) for one in rows if one["baseline"]) for rows in across]
    if any(gains):
        columns["improvement"] = gains
    partial = [f"{measure['name']}: {measure['partial']}" for measure in means if measure["partial"]]
    note = "Mean (sd) over seeds, in percent; improvements in percentage points."
    note += f" Partial: {'; '.join(partial)}." if partial else ""
    return by_columns("Summary", note, _names(tables), columns)


def _measure(tables: dict[str, Any], measure: dict) -> Grid:
    """One metric of all arms, with differences if there is a baseline."""
    rows = measure["rows"]
    columns: dict[str, Any] = {"% (sd)": map(_score, rows), "seeds": map(_seeds, rows)}
    if any(row["baseline"] for row in rows):
        columns["improvement"] = (points_of(row["improvement"]) for row in rows)
        columns["paired difference, 95 %"] = map(difference_of, rows)
    note = measure["about"] + (f"; partial: {measure['partial']}." if measure["partial"] else ".")
    if any(row["missing"] and row["summary"] for row in rows):
        note += " * Some seeds are missing; not considered for the best."
    return by_columns(measure["name"], note, _names(tables), columns)


def _effort(measure: str, rows: list[dict]) -> Grid:
    def times(name: str) -> list[str]:
        return ["–" if row[name] is None else f"{row[name]:.2f} ×{interval(row, name)}" for row in rows]

    def interval(row: dict, name: str) -> str:
        low, high = row.get(f"{name}_interval", (None, None))  # results stored by earlier versions have none
        return "" if low is None else f" [{low:.2f}, {high:.2f}]"

    note = (
        f"Samples and time to reach the baseline's final {measure}, relative to the baseline: up to the "
        "first evaluation at or above it; means over seeds with 95 % intervals, if all of them reached it."
    )
    names = {name: [row[name] for row in rows] for name in ("arm", "baseline")}
    reached = [f"{row['reached']} of {row['seeds']}" for row in rows]
    numbers = {"samples": times("samples"), "time": times("seconds"), "seeds that reached it": reached}
    return by_columns("How soon", note, names, numbers)


def _tuning(trials: list[dict]) -> Grid:
    """One row per arm, one column per combination of values."""
    choices = {identity(one["values"]): shown_options(one["values"]) for one in trials}
    cells = {(one["arm"], identity(one["values"])): _trial(one) for one in trials}
    arms = dict.fromkeys(one["arm"] for one in trials)
    rows = [[arm, *(cells.get((arm, choice), "–") for choice in choices)] for arm in arms]
    note = "Scores on validation pairs, in percent (never on the tests); ✓ marks the chosen value."
    return Grid("Tuning", note, ["arm", *choices.values()], 1, rows)


def _trial(one: dict) -> str:
    if one["score"] is None:
        return "failed" if one["error"] else "pending"
    return Best(f"{100 * one['score']:.2f} ✓") if one["chosen"] else f"{100 * one['score']:.2f}"


def _captions(counted: list[dict]) -> Grid:
    """One row per batch size and order of samples."""
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
        "Samples that share their caption with another sample of the batch, which the loss treats as a "
        "negative: counted in the first seed's batches, and expected by chance."
    )
    headings = ["arms", "batch", "in batches, %", "expected, %", "in the whole data, %", "distinct captions"]
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
    """On one line, with no character that would end a cell."""
    return " ".join(text.replace("|", "\\|").split())
