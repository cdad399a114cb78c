"""The chart of a profile, like the paper's figure of training times: bars of a step's parts, the speed-up."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastclip.tools.profiling.breakdown import AlgorithmProfile, algorithms, rank_counts, ranks_text, speed_up
from fastclip.tools.report.plots import DASHES, DPI, MARKS, PAPER, style_of

_HEIGHT, _LEAST, _BAR = 3.6, 2.6, 0.34  # inches: height, panel width, bar width
_GAP = 0.8  # bars between two groups


class Part(NamedTuple):
    """A segment of a bar; the hatch distinguishes it without colour."""

    field: str
    label: str
    colour: str
    hatch: str


_STEP = [  # bottom to top
    Part("others", "others", "#c3c9d0", ""),
    Part("pure_communication", "pure communication", PAPER.lines[1], "///"),
    Part("computation", "computation", PAPER.lines[0], ""),
]
_COMMUNICATION = [_STEP[1], Part("overlap", "overlap with computation", PAPER.lines[4], "...")]


def draw(profiles: list[AlgorithmProfile]) -> bytes:
    """Return a PNG on white with bars of the median rank; a single rank has no panel of communication."""
    counts = rank_counts(profiles)
    width = max(_LEAST, _BAR * (len(profiles) + _GAP * len(counts)) + 0.9)
    communicate, several = counts[-1] > 1, len(counts) > 1
    widths = [width, *[width] * communicate, *[_LEAST] * several]
    style = {"font.size": 9, "legend.fontsize": 8, "hatch.linewidth": 0.6}
    with matplotlib.rc_context(style_of(PAPER) | style | {"figure.constrained_layout.h_pad": 0.1}):
        figure = Figure(figsize=(sum(widths) + 0.4, _HEIGHT), layout="constrained")
        FigureCanvasAgg(figure)
        panels = iter(figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0])
        _draw_bars(next(panels), profiles, _STEP, "A step")
        if communicate:
            _draw_bars(next(panels), profiles, _COMMUNICATION, "Communication")
        if several:
            _draw_speed_up(next(panels), profiles)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return drawn.getvalue()


def _draw_bars(axes: Axes, profiles: list[AlgorithmProfile], parts: list[Part], title: str) -> None:
    places, names, groups = _places(profiles)
    ordered = [profile for n in rank_counts(profiles) for profile in profiles if profile.num_ranks == n]
    bottoms = [0.0] * len(ordered)
    for part in parts:
        heights = [profile.median.mean(part.field) for profile in ordered]
        style: dict[str, Any] = {"hatch": part.hatch, "edgecolor": "white", "linewidth": 0.4}
        axes.bar(places, heights, 0.82, bottom=bottoms, label=part.label, color=part.colour, **style)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylim(0, 1.06 * max(bottoms) or 1)
    axes.set_xticks(places, names, rotation=90, fontsize=8)
    for place, label in groups:
        axes.text(place, 1.01, label, transform=axes.get_xaxis_transform(), ha="center", fontsize=8)
    _finish(axes, title, "ms per step")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper center", bbox_to_anchor=(0.5, -0.32)
    )  # in the order of the bars


def _places(profiles: list[AlgorithmProfile]) -> tuple[list[float], list[str], list[tuple[float, str]]]:
    """Positions of the bars, their labels, and the position and label of each number of ranks."""
    places: list[float] = []
    names, groups, place = [], [], 0.0
    for count in rank_counts(profiles):
        group = [profile.algorithm for profile in profiles if profile.num_ranks == count]
        places += [place + number for number in range(len(group))]
        names += [name.removeprefix("fastclip-") for name in group]
        groups.append((place + (len(group) - 1) / 2, ranks_text(count)))
        place += len(group) + _GAP
    return places, names, groups


def _draw_speed_up(axes: Axes, profiles: list[AlgorithmProfile]) -> None:
    for number, algorithm in enumerate(algorithms(profiles)):
        own = sorted((p for p in profiles if p.algorithm == algorithm), key=lambda profile: profile.num_ranks)
        ratios = {p.num_ranks: ratio for p in own if (ratio := speed_up(p, profiles)) is not None}
        colour, dash, mark = (some[number % len(some)] for some in (PAPER.lines, DASHES, MARKS))
        style: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": mark, "markersize": 4}
        axes.plot(list(ratios), list(ratios.values()), linewidth=1.4, label=algorithm, **style)
    counts = rank_counts(profiles)
    ends = counts[0], counts[-1]
    axes.plot(ends, [end / ends[0] for end in ends], color=PAPER.rule, linewidth=0.8, label="ideal")
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    _finish(axes, "Speed-up", "")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, columnspacing=1.0)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=18)
    axes.set_ylabel(unit)
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3, width=0.8)
