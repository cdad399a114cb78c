"""Plots are reproducible, use the page's colours, and do not clash with anything on the page."""

import io
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from math import nan

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from PIL import Image

from fastclip.run.folder import read_run
from fastclip.tools.report.curves import Band, Curve, Level, Line, curves
from fastclip.tools.report.plots import PAPER, _figure, _short, draw, draw_png, style_of, thinned
from tests.tools.report.folders import make_run


def curve(key="loss", labels=("a",), y=(3.0, 2.0, 1.0), **more):
    lines = [Line(label, [float(i) for i in range(len(y))], list(y)) for label in labels]
    return Curve(key, "Loss", "nats", "caption", lines, latest="1", **more)


RICH = curve(
    labels=("a", "b"), band=Band("band", [0.0, 1.0], [0.0, 0.0], [1.0, 2.0]), levels=(Level("ρ", 2.0),)
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """All plots of a run."""
    run = read_run(make_run(tmp_path_factory.mktemp("runs") / "a"))
    return [draw(curve) for curve in curves(run)]


def test_the_same_curve_gives_the_same_bytes():
    assert draw(RICH) == draw(RICH)


@pytest.mark.slow
def test_plots_on_one_page_share_no_id(page):
    ids = [found for svg in page for found in re.findall(r'\bid="([^"]+)"', svg)]
    assert ids
    assert len(ids) == len(set(ids))


def test_every_reference_has_its_target(page):
    for svg in page:
        targets = set(re.findall(r'\bid="([^"]+)"', svg))
        used = set(re.findall(r"url\(#([^)]+)\)", svg)) | set(re.findall(r'href="#([^"]+)"', svg))
        assert used
        assert used <= targets


def test_colours_are_the_pages_variables(page):
    for svg in page:
        assert not re.search(r"#[0-9a-fA-F]{6}\b", svg)
        assert "var(--line-1)" in svg


def test_a_plot_has_no_links_and_no_style_that_leaks_into_the_page(page):
    for svg in page:
        assert "http" not in svg
        assert "<style" not in svg
        assert "<metadata" not in svg


def test_a_plot_has_a_label_for_screen_readers():
    root = ET.fromstring(draw(curve()))
    assert root.get("role") == "img"
    assert re.fullmatch("Loss .*epochs.* 1", root.get("aria-label"))


def test_labels_of_axes_and_lines_are_text():
    svg = draw(RICH)
    texts = [element.text for element in ET.fromstring(svg).iter("text")]
    assert {"epochs", "nats", "a", "b", "band", "ρ"} <= set(texts)


def test_a_single_line_has_no_legend():
    texts = [element.text for element in ET.fromstring(draw(curve(labels=("alone",)))).iter("text")]
    assert "alone" not in texts


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 10, 11, 19, 20, 44, 60])
@pytest.mark.parametrize("lines", [2, 3, 10])
def test_the_legend_is_within_the_figure_and_above_the_axes(length, lines):
    names = tuple(f"{number}-{2 * 'openclip-b16-lr0.0005-epsilon1e-06'}"[:length] for number in range(lines))
    with matplotlib.rc_context(style_of(PAPER)):
        figure = _figure(curve(labels=names), PAPER, title="A title")
        canvas, (axes,) = FigureCanvasAgg(figure), figure.axes
        legend = axes.get_legend().get_window_extent(canvas.get_renderer())
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    assert legend.y0 >= axes.bbox.y1
    assert legend.y1 <= figure.bbox.y1


def test_labels_are_never_markup_or_formulas():
    names = ("<script>1</script>", "$a_1$ & b", "__hidden", "bell\x07\ud800", 60 * "x")
    texts = [element.text for element in ET.fromstring(draw(curve(labels=names))).iter("text")]
    assert {"<script>1</script>", "$a_1$ & b", "hidden", "bell��", f"{43 * 'x'}…"} <= set(texts)


def test_lines_differ_without_colour():
    svg = draw(curve(labels=("a", "b", "c", "d", "e")))
    assert len(set(re.findall(r"stroke-dasharray: ([^;\"]+)", svg))) >= 4


def test_a_single_point_is_visible():
    assert "<use" in draw(curve(y=(1.0,)))


def test_a_line_with_gaps_can_be_drawn():
    assert draw(curve(y=(1.0, nan, 2.0))).startswith("<svg")


def test_a_thinned_line_keeps_its_ends_and_its_peaks():
    x = [float(i) for i in range(10_000)]
    y = [0.0] * 10_000
    y[1234], y[8765] = 99.0, -99.0
    kept_x, kept_y = thinned(x, y)
    assert len(kept_x) <= 600
    assert kept_x == sorted(kept_x)
    assert {(1234.0, 99.0), (8765.0, -99.0)} <= set(zip(kept_x, kept_y, strict=True))
    assert (kept_x[0], kept_x[-1]) == (0.0, 9999.0)


def test_a_long_run_gives_a_small_plot():
    y = [float(i * 7919 % 1000) for i in range(50_000)]
    assert len(draw(curve(y=y))) < 60_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (2.5e-4, "0.00025"),
        (5e-6, "5e−6"),
        (-2.0, "−2"),
        (1500.0, "1500"),
        (25e3, "25k"),
        (2e6, "2M"),
    ],
)
def test_tick_labels_are_short(value, text):
    assert _short(value) == text


def test_a_spread_is_a_band_around_a_curve_and_error_bars_at_the_values_of_an_option():
    line = Line("a", [16.0, 64.0, 256.0], [1.0, 2.0, 3.0], [0.5, 0.5, 0.5])
    band = draw(Curve("k", "T", "%", "c", [line]))
    option = draw(Curve("k", "T", "%", "c", [line], axis="batch.size", ticks=(16.0, 64.0, 256.0)))
    assert "opacity: 0.15" in band
    assert "opacity: 0.15" not in option
    texts = [element.text for element in ET.fromstring(option).iter("text")]
    assert {"16", "64", "256", "batch.size"} <= set(texts)


def test_an_option_with_a_wide_range_has_a_logarithmic_axis():
    def middle(ticks):
        line = Line("a", list(ticks), [1.0, 1.0, 1.0], [0.1] * 3)
        root = ET.fromstring(draw(Curve("k", "T", "%", "c", [line], ticks=ticks)))
        texts = {e.text: e for e in root.iter("text")}
        left, centre, right = (_x(texts[f"{place:g}"]) for place in ticks)
        return (centre - left) / (right - left)

    assert middle((16.0, 64.0, 256.0)) == pytest.approx(0.5, abs=0.02)
    assert middle((10.0, 15.0, 30.0)) == pytest.approx(0.25, abs=0.02)


def _x(text):
    """The horizontal position of a text."""
    where = text.get("x") or re.search(r"translate\(([-\d.]+)", text.get("transform", ""))[1]
    return float(where)


def test_ten_lines_differ_in_dashes_or_colours():
    svg = draw(curve(labels=[f"line {i}" for i in range(10)]))
    styles = re.findall(r'<path[^>]*style="(fill: none; [^"]*stroke: var\(--line-\d\)[^"]*)"', svg)
    assert len(set(styles)) >= 10


def test_a_png_is_reproducible_and_on_white():
    first = draw_png(RICH)
    assert first == draw_png(RICH)
    image = np.asarray(Image.open(io.BytesIO(first)).convert("RGB"))
    assert image.shape[1] > 900
    assert (image[0, 0] == 255).all()
    assert image.std() > 5


def test_lines_of_a_png_differ_in_grey():
    greys = sorted(np.dot(to_rgb(colour), (0.299, 0.587, 0.114)) for colour in PAPER.lines)
    assert all(b - a > 0.05 for a, b in pairwise(greys))
