"""A profile as a picture, like the paper's figure of training times: a step's parts as bars, the speed-up."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastclip.tools.profiling.breakdown import AlgorithmProfile, algorithms, sizes, speed_up
from fastclip.tools.report.plots import DASHES, DPI, MARKS, PAPER, style_of

_HEIGHT, _LEAST, _BAR = 3.6, 2.6, 0.34  # inches: of the picture, of a panel, of a bar
_GAP = 0.8  # bars between two sizes


class Part(NamedTuple):
    """A piece of a bar; the hatch tells it apart without colours."""

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
    """A PNG on white; bars are those of the median worker. One worker alone does not communicate."""
    width = max(_LEAST, _BAR * (len(profiles) + _GAP * len(sizes(profiles))) + 0.9)
    communicate, several = sizes(profiles)[-1] > 1, len(sizes(profiles)) > 1
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
    ordered = [profile for size in sizes(profiles) for profile in profiles if profile.size == size]
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
    _finish(axes, title, "ms a step")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper center", bbox_to_anchor=(0.5, -0.32))  # as they lie


def _places(profiles: list[AlgorithmProfile]) -> tuple[list[float], list[str], list[tuple[float, str]]]:
    """Where bars stand, what they are called, and where the name of each size goes."""
    places: list[float] = []
    names, groups, place = [], [], 0.0
    for size in sizes(profiles):
        inside = [profile.algorithm for profile in profiles if profile.size == size]
        places += [place + number for number in range(len(inside))]
        names += [name.removeprefix("fastclip-") for name in inside]
        groups.append((place + (len(inside) - 1) / 2, f"{size} worker{'s' if size > 1 else ''}"))
        place += len(inside) + _GAP
    return places, names, groups


def _draw_speed_up(axes: Axes, profiles: list[AlgorithmProfile]) -> None:
    for number, algorithm in enumerate(algorithms(profiles)):
        own = sorted((p for p in profiles if p.algorithm == algorithm), key=lambda profile: profile.size)
        ratios = {p.size: ratio for p in own if (ratio := speed_up(p, profiles)) is not None}
        colour, dash, mark = (some[number % len(some)] for some in (PAPER.lines, DASHES, MARKS))
        style: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": mark, "markersize": 4}
        axes.plot(list(ratios), list(ratios.values()), linewidth=1.4, label=algorithm, **style)
    ends = sizes(profiles)[0], sizes(profiles)[-1]
    axes.plot(ends, [end / ends[0] for end in ends], color=PAPER.rule, linewidth=0.8, label="ideal")
    axes.set_xticks(sizes(profiles))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers")
    _finish(axes, "Speed-up", "")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, columnspacing=1.0)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=18)
    axes.set_ylabel(unit)
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3, width=0.8)
