"""Templates escape what they are given, and a name that is missing is an error."""

import pytest
from jinja2 import UndefinedError

from fastclip import __version__
from fastclip.tools.report.curves import Curve, Line
from fastclip.tools.report.template import drawn, fill


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
