"""Templates escape their values; pages and plots are written completely or not at all."""

import errno
import os
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from fastclip import __version__
from fastclip.errors import OptionError
from fastclip.tools.report.curves import Curve, Line
from fastclip.tools.report.output import drawn, fill, pictures_folder, write, write_plots


def test_every_curve_is_written_as_a_png(tmp_path):
    lines = [Line("a", [0.0, 1.0], [1.0, 2.0])]
    curves = [Curve(key, "Loss", "nats", "caption", lines) for key in ("loss", "tau")]
    write_plots(curves, tmp_path / "report")
    assert sorted(os.listdir(tmp_path / "report")) == ["loss.png", "tau.png"]
    assert (tmp_path / "report" / "tau.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("page", "folder"), [("a/report.html", "a/report"), ("a/page", "a/page-pictures")])
def test_the_folder_of_plots_is_named_after_the_page(page, folder):
    assert pictures_folder(Path(page)) == Path(folder)


def test_a_page_replaces_the_one_before_and_leaves_no_other_file(tmp_path):
    out = tmp_path / "new" / "page.html"
    write("one", out)
    write("two ✓ \ud800", out)
    assert out.read_text() == "two ✓ ?"
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_a_full_disk_leaves_the_previous_page(tmp_path, monkeypatch):
    out = tmp_path / "page.html"
    out.write_text("before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=re.escape(str(out))) as caught:
        write("after", out)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.glob("*.html*")] == ["page.html"]


def test_out_must_not_be_a_folder(tmp_path):
    with pytest.raises(OptionError) as caught:
        write("page", tmp_path)
    assert (caught.value.option, caught.value.value) == ("out", tmp_path)
    assert caught.value.example == tmp_path / "report.html"


def test_values_are_escaped_and_the_version_is_named():
    page = fill("runs.html", names=["<b>a"], missing=[], grids=[], plots=[], configs=[])
    assert "&lt;b&gt;a" in page
    assert f"fastclip {__version__}" in page


def test_a_missing_value_is_an_error():
    with pytest.raises(UndefinedError):
        fill("runs.html", names=[])


def test_plots_are_not_escaped():
    curve = Curve("k", "T", "u", "c", [Line("a", [0.0, 1.0], [0.0, 1.0])])
    page = fill("runs.html", names=["a"], missing=[], grids=[], plots=drawn([curve]), configs=[])
    assert "<svg" in page
