"""Templates escape what they are given; pages and pictures are written whole or not at all."""

import errno
import os
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from fastclip import __version__
from fastclip.tools.report.curves import Curve, Line
from fastclip.tools.report.output import drawn, fill, pictures_folder, write, write_pictures


def test_every_curve_is_a_picture_beside_the_page(tmp_path):
    lines = [Line("a", [0.0, 1.0], [1.0, 2.0])]
    curves = [Curve(key, "Loss", "nats", "It falls.", lines) for key in ("loss", "tau")]
    write_pictures(curves, tmp_path / "report")
    assert sorted(os.listdir(tmp_path / "report")) == ["loss.png", "tau.png"]
    assert (tmp_path / "report" / "tau.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("page", "folder"), [("a/report.html", "a/report"), ("a/page", "a/page-pictures")])
def test_pictures_have_a_folder_by_the_pages_name(page, folder):
    assert pictures_folder(Path(page)) == Path(folder)


def test_a_page_is_written_whole_and_replaces_the_one_before(tmp_path):
    out = tmp_path / "new" / "page.html"
    write("one", out)
    write("two ✓ \ud800", out)
    assert out.read_text() == "two ✓ ?"
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path, monkeypatch):
    out = tmp_path / "page.html"
    out.write_text("before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"page\.html cannot be written: No space left on device\. .*--out"):
        write("after", out)
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.glob("*.html*")] == ["page.html"]


def test_a_folder_as_out_says_what_to_give(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder; give a file, e\.g\. .*report\.html"):
        write("page", tmp_path)


def test_values_are_escaped_and_the_version_is_told():
    page = fill("runs.html", names=["<b>a"], missing=[], grids=[], plots=[], configs=[])
    assert "&lt;b&gt;a" in page
    assert f"Made by fastclip {__version__}." in page


def test_a_value_that_was_forgotten_is_an_error():
    with pytest.raises(UndefinedError):
        fill("runs.html", names=[])


def test_drawings_are_not_escaped_again():
    curve = Curve("k", "T", "u", "c", [Line("a", [0.0, 1.0], [0.0, 1.0])])
    page = fill("runs.html", names=["a"], missing=[], grids=[], plots=drawn([curve]), configs=[])
    assert "<svg" in page
