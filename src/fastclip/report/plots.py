"""A curve as inline SVG: the same points give the same bytes, and colours follow the page's light or dark."""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fastclip.report.curves import Curve

WIDTH, HEIGHT = 340, 215  # of the drawing, which the page scales
_MOST_POINTS = 600  # of a line; more are not seen, and make the page large
_LONGEST_NAME = 22  # letters in a legend
_FEW_POINTS = 30  # a line of so few has marks where it was measured

# matplotlib draws with the colours on the left; on the page they are the variables on the right
_INK, _RULE, _GRID = "#010203", "#040506", "#070809"
_LINES = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05")
_VARIABLES = {
    _INK: "var(--soft)",
    _RULE: "var(--rule)",
    _GRID: "var(--grid)",
    **{colour: f"var(--line-{number})" for number, colour in enumerate(_LINES, start=1)},
}
# Told apart without colours too
_DASHES: tuple = ("-", (0, (6, 2)), (0, (1.2, 1.6)), (0, (7, 2, 1.2, 2)), (0, (3, 1.5)))
_MARKS = ("o", "s", "^", "D", "v")

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters, in the page's font
    "text.parse_math": False,  # a name with $ in it is no formula
    "font.family": "DejaVu Sans",  # comes with matplotlib: measures are the same everywhere
    "font.size": 11,
    "text.color": _INK,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "grid.color": _GRID,
    "legend.fontsize": 11,
    "legend.frameon": False,
}


def draw(curve: Curve) -> str:
    """An <svg> element for an HTML page, without ids that another plot may have."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": curve.key}):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        FigureCanvasSVG(figure)
        # Fixed margins: plots beside each other have their axes in the same places
        rows, columns = _legend_shape(curve)
        axes = figure.add_axes((0.205, 0.19, 0.77, 0.775 - 0.085 * rows))
        _draw_lines(axes, curve)
        _draw_axes(axes, curve)
        if rows:
            _draw_legend(axes, columns)
        drawn = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    return _for_page(drawn.getvalue(), curve)


def thinned(x: list[float], y: list[float], most: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most so many points: the lowest and the highest of each stretch, so that no peak is lost."""
    if len(x) <= most:
        return x, y
    kept: set[int] = {0, len(x) - 1}
    stretches = (most - 2) // 2
    for stretch in range(stretches):
        inside = range(stretch * len(x) // stretches, (stretch + 1) * len(x) // stretches)
        known = [i for i in inside if math.isfinite(y[i])] or [inside[0]]
        kept |= {min(known, key=y.__getitem__), max(known, key=y.__getitem__)}
    order = sorted(kept)
    return [x[i] for i in order], [y[i] for i in order]


def _legend_shape(curve: Curve) -> tuple[int, int]:
    """Rows and columns; one line alone needs no name, for the title has it."""
    names = [line.label for line in curve.lines] + [level.label for level in curve.levels]
    names += [curve.band.label] if curve.band else []
    if len(names) < 2:
        return 0, 0
    columns = 3 if max(map(len, names)) < _LONGEST_NAME / 2 else 2
    return math.ceil(len(names) / columns), columns


def _draw_lines(axes: Axes, curve: Curve) -> None:
    for number, line in enumerate(curve.lines):
        axes.plot(
            *thinned(line.x, line.y),
            color=_LINES[number % len(_LINES)],
            linestyle=_DASHES[number % len(_DASHES)],
            linewidth=1.8 if number == 0 else 1.4,
            marker=_MARKS[number % len(_MARKS)] if len(line.x) <= _FEW_POINTS else "",
            markersize=3,
            label=_printable(line.label),
        )
    if curve.band is not None:
        every = math.ceil(len(curve.band.x) / _MOST_POINTS)  # both edges at the same places
        x, low, high = (values[::every] for values in (curve.band.x, curve.band.low, curve.band.high))
        axes.fill_between(x, low, high, color=_LINES[0], alpha=0.2, linewidth=0, label=curve.band.label)
    for level in curve.levels:
        dashes = (0, (1.2, 2)) if level.dotted else (0, (6, 3))
        axes.axhline(level.value, color=_INK, linewidth=1.2, linestyle=dashes, label=_printable(level.label))


def _draw_axes(axes: Axes, curve: Curve) -> None:
    axes.set_xlabel("epochs")
    axes.set_ylabel(curve.unit)
    axes.yaxis.set_label_coords(-0.213, 0.5)
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
    if curve.from_zero:
        highest = axes.dataLim.y1
        axes.set_ylim(0, 1.06 * highest if highest > 0 else 1)
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3, width=0.8)
    for axis, most in ((axes.xaxis, 6), (axes.yaxis, 5)):
        axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _draw_legend(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.25, 1.02),
        ncols=columns,
        borderaxespad=0.1,
        handlelength=2.4,
        handletextpad=0.5,
        labelspacing=0.25,
        columnspacing=1.2,
    )


def _short(value: float) -> str:
    """0.0005, 5e−6, −2, 1500: no more letters than it takes."""
    if abs(value) < 1e-12:
        return "0"
    text = f"{value:.4g}".replace("-", "−")
    return re.sub(r"e(−?)\+?0*", r"e\1", text)


def _printable(label: str) -> str:
    """Short, without what XML cannot hold; matplotlib hides names that begin with a line below."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in label).lstrip("_") or "?"
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 1]}…"


def _for_page(svg: str, curve: Curve) -> str:
    """What HTML needs of the file: no namespaces, no style for the whole page, variables for colours."""
    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    used = set(re.findall(r"(?:url\(|href=\")#([\w-]+)", svg))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if attributes.get("id") not in used:
            attributes.pop("id", None)
        element.attrib.clear()
        for name, value in attributes.items():
            element.set(name, f"{curve.key}-{value}" if name == "id" else _in_page(value, curve.key))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", f"{curve.title} against epochs, at the end {curve.latest}")
    return ET.tostring(root, encoding="unicode")


def _in_page(value: str, key: str) -> str:
    """An attribute: its colours, and the ids that it refers to."""
    for colour, variable in _VARIABLES.items():
        value = value.replace(colour, variable)
    value = re.sub(r"\bfont: ([\d.]+)px [^;]*", r"font-size: \1px", value)
    return re.sub(r"^#|url\(#", lambda found: f"{found[0]}{key}-", value)
