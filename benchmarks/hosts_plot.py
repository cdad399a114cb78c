"""The plot of the test bed's results: step time and pure communication against hosts."""

from __future__ import annotations

import io

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastclip.tools.report.plots import DASHES, DPI, MARKS, PAPER, style_of

ROWS = {"total": "step, ms", "pure_communication": "pure communication, ms"}


def draw(cells: list[dict]) -> bytes:
    """A PNG of one setting's cells: one column per rate. One host has no link, and is in all of them."""
    rates = list(dict.fromkeys(cell["megabits"] for cell in cells))
    cases = list(dict.fromkeys(cell["case"] for cell in cells))
    with matplotlib.rc_context(style_of(PAPER) | {"font.size": 9, "legend.fontsize": 8}):
        figure = Figure(figsize=(2.6 * len(rates) + 0.4, 5.2), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(ROWS), len(rates), squeeze=False, sharex=True)
        for row, (part, title) in zip(grid, ROWS.items(), strict=True):
            for axes, rate in zip(row, rates, strict=True):
                for number, case in enumerate(cases):
                    points = [
                        (cell["hosts"], cell["ms"][part])
                        for cell in cells
                        if cell["case"] == case and (cell["megabits"] == rate or cell["hosts"] == 1)
                    ]
                    axes.plot(
                        *zip(*sorted(points), strict=True),
                        color=PAPER.lines[number],
                        linestyle=DASHES[number],
                        marker=MARKS[number],
                        markersize=4,
                        linewidth=1.4,
                        label=case,
                    )
                axes.set_xticks(sorted({cell["hosts"] for cell in cells}))
                axes.set_ylim(bottom=0)
                axes.grid(axis="y", linewidth=0.8)
                axes.set_axisbelow(True)
            row[0].set_ylabel(title)
        for top, bottom, rate in zip(grid[0], grid[-1], rates, strict=True):
            top.set_title(rate_name(rate), loc="left", fontsize=9, fontweight="bold")
            bottom.set_xlabel("hosts")
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(cases))
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return drawn.getvalue()


def rate_name(megabits: int | None) -> str:
    return "no limit" if megabits is None else f"{megabits:,} Mbit/s"
