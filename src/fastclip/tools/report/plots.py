"""Draw a curve as inline SVG, in the colours of the page's light or dark scheme, or as PNG. Reproducible."""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fastclip.tools.report.curves import Curve, Line

WIDTH, HEIGHT = 340, 215  # of a plot; the page scales it
_BELOW, _ABOVE, _LEGEND_ROW, _TITLE = 41, 9, 16, 22  # heights within it
_MAX_POINTS = 600  # of a line; more would not be visible and make the page large
_MAX_LABEL = 44  # characters in a legend; longer labels are cut
_COLUMNS = {3: 10, 2: 19}  # columns of a legend, and the longest label that fits
_LEGEND = {"borderaxespad": 0.1, "handlelength": 2.4, "handletextpad": 0.5, "labelspacing": 0.25,
           "columnspacing": 1.2}  # fmt: skip
_FEW_POINTS = 30  # a line with at most this many has a mark at each
_WIDE = 4  # an option whose largest value is this many times its smallest has a logarithmic axis
DPI = 200  # of a PNG


class Palette(NamedTuple):
    """The colours of a plot."""

    ink: str
    rule: str
    grid: str
    lines: tuple[str, ...]


# Placeholders for matplotlib, replaced by the page's CSS variables
_PAGE = Palette("#010203", "#040506", "#070809", ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"))
_VARIABLES = {
    _PAGE.ink: "var(--soft)",
    _PAGE.rule: "var(--rule)",
    _PAGE.grid: "var(--grid)",
    **{colour: f"var(--line-{number})" for number, colour in enumerate(_PAGE.lines, start=1)},
}
# On white; the lines also differ in grey
PAPER = Palette("#24292f", "#6e7781", "#e4e7eb", ("#0a3a82", "#b9460b", "#1b978a", "#9a66e0", "#c9a227"))
# Lines also differ without colour
DASHES: tuple = ("-", (0, (6, 2)), (0, (1.2, 1.6)), (0, (7, 2, 1.2, 2)), (0, (3, 1.5)))
MARKS = ("o", "s", "^", "D", "v")


def draw(curve: Curve) -> str:
    """An <svg> element for an HTML page; its ids are unique to the curve."""
    with matplotlib.rc_context({**style_of(_PAGE), "svg.hashsalt": curve.key}):
        figure = _figure(curve, _PAGE)
        FigureCanvasSVG(figure)
        drawn = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    return _for_page(drawn.getvalue(), curve)


def draw_png(curve: Curve) -> bytes:
    """A PNG on white with the title, for slides and papers."""
    with matplotlib.rc_context(style_of(PAPER)):
        figure = _figure(curve, PAPER, title=curve.title)
        FigureCanvasAgg(figure)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return drawn.getvalue()


def thinned(x: list[float], y: list[float], most: int = _MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most this many points: the lowest and highest of each stretch, to keep every peak."""
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


def style_of(palette: Palette) -> dict[Any, Any]:
    return {
        "svg.fonttype": "none",  # keep text as text, in the page's font
        "text.parse_math": False,  # a label with $ in it is not a formula
        "font.family": "DejaVu Sans",  # comes with matplotlib, so that text has the same size everywhere
        **dict.fromkeys(("font.size", "legend.fontsize"), 11),
        **dict.fromkeys(("text.color", "axes.labelcolor"), palette.ink),
        **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), palette.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), palette.rule),
        "grid.color": palette.grid,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    }


def _figure(curve: Curve, palette: Palette, title: str = "") -> Figure:
    """Margins are fixed, so the axes of adjacent plots are aligned."""
    rows, columns = _legend_shape(curve)
    above = _ABOVE + _LEGEND_ROW * rows + (_TITLE if title else 0)
    height = HEIGHT + _LEGEND_ROW * max(0, rows - 2) + (_TITLE if title else 0)
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    axes = figure.add_axes((0.205, _BELOW / height, 0.75, (height - _BELOW - above) / height))
    for number, line in enumerate(curve.lines):
        _draw_line(axes, number, line, palette, bars=bool(curve.ticks))
    _draw_references(axes, curve, palette)
    _draw_axes(axes, curve)
    if rows:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.25, 1.02), ncols=columns, **_LEGEND)
    if title:
        figure.text(0.02, 1 - 0.7 * _TITLE / height, _printable(title, 60), fontsize=12, fontweight="bold")
    return figure


def _legend_shape(curve: Curve) -> tuple[int, int]:
    """Rows and columns; a single line needs no legend, as the title names it."""
    names = [line.label for line in curve.lines] + [level.label for level in curve.levels]
    names += [curve.band.label] if curve.band else []
    if len(names) < 2:
        return 0, 0
    longest = max(map(len, names))
    columns = next((count for count, fits in _COLUMNS.items() if longest <= fits), 1)
    return math.ceil(len(names) / columns), columns


def _draw_line(axes: Axes, number: int, line: Line, palette: Palette, bars: bool) -> None:
    turn = number // len(
        palette.lines
    )  # the sixth line has the colour of the first, with other dashes and marks
    colour = palette.lines[number % len(palette.lines)]
    mark = MARKS[(number + 2 * turn) % len(MARKS)]
    style: dict[str, Any] = {
        "color": colour,
        "linestyle": DASHES[(number + turn) % len(DASHES)],
        "linewidth": 1.8 if number == 0 else 1.4,
        "marker": mark if len(line.x) <= _FEW_POINTS else "",
        "markersize": 3,
        "label": _printable(line.label),
    }
    if line.spread is not None and bars:
        axes.errorbar(line.x, line.y, yerr=line.spread, capsize=3, elinewidth=1, capthick=1, **style)
        return
    axes.plot(*thinned(line.x, line.y), **style)
    if line.spread is not None:
        y, spread = np.array(line.y), np.array(line.spread)
        axes.fill_between(line.x, y - spread, y + spread, color=colour, alpha=0.15, linewidth=0)


def _draw_references(axes: Axes, curve: Curve, palette: Palette) -> None:
    """Draw the band and the levels."""
    if curve.band is not None:
        every = math.ceil(len(curve.band.x) / _MAX_POINTS)  # the same points of both edges
        edges: Any = [values[::every] for values in (curve.band.x, curve.band.low, curve.band.high)]
        axes.fill_between(*edges, color=palette.lines[0], alpha=0.2, linewidth=0, label=curve.band.label)
    for level in curve.levels:
        dashes = (0, (1.2, 2)) if level.dotted else (0, (6, 3))
        label = _printable(level.label)
        axes.axhline(level.value, color=palette.ink, linewidth=1.2, linestyle=dashes, label=label)


def _draw_axes(axes: Axes, curve: Curve) -> None:
    axes.set_xlabel(_printable(curve.axis, 40))
    axes.set_ylabel(_printable(curve.unit, 30))
    axes.yaxis.set_label_coords(-0.213, 0.5)
    axes.margins(x=0.08 if curve.ticks else 0.02)
    if not curve.ticks:
        axes.set_xlim(left=0)
    if curve.from_zero:
        highest = axes.dataLim.y1
        axes.set_ylim(0, 1.06 * highest if highest > 0 else 1)
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3, width=0.8)
    if curve.ticks and 0 < _WIDE * min(curve.ticks) <= max(curve.ticks):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    for axis, most in ((axes.xaxis, 6), (axes.yaxis, 5)):
        axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    if curve.ticks:
        axes.xaxis.set_major_locator(FixedLocator(curve.ticks))


def _short(value: float) -> str:
    """0.0005, 5e−6, −2, 1500, 25k, 2M: as short as possible."""
    if abs(value) < 1e-12:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}".replace("-", "−")
    text = f"{value:.4g}".replace("-", "−")
    return re.sub(r"e(−?)\+?0*", r"e\1", text)


def _printable(label: str, longest: int = _MAX_LABEL) -> str:
    """Cut to length, without characters that XML cannot hold or the leading _ that hides it from a legend."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in label).lstrip("_") or "?"
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def _for_page(svg: str, curve: Curve) -> str:
    """Adapt an SVG file to HTML: no namespaces, no global style, variables for colours."""
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
    end = f", last value {curve.latest}" if curve.latest else ""
    root.attrib |= {"role": "img", "aria-label": _printable(f"{curve.title} against {curve.axis}{end}", 200)}
    return ET.tostring(root, encoding="unicode")


def _in_page(value: str, key: str) -> str:
    """An attribute's value, with variables for colours and the ids of this page."""
    for colour, variable in _VARIABLES.items():
        value = value.replace(colour, variable)
    value = re.sub(r"\bfont: ([\d.]+)px [^;]*", r"font-size: \1px", value)
    return re.sub(r"^#|url\(#", lambda found: f"{found[0]}{key}-", value)
