"""A finished run, and pages without plots."""

from copy import deepcopy

import pytest

from fastclip.run.folder import read_run
from tests.tools.report.folders import make_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return read_run(make_run(tmp_path_factory.mktemp("runs") / "a"))


@pytest.fixture
def run(finished):
    """A finished run of fastclip-v3 that a test may change."""
    return deepcopy(finished)


@pytest.fixture
def _quick_plots(monkeypatch):
    """Drawing takes most of a page's time, and plots have their own tests."""
    monkeypatch.setattr("fastclip.tools.report.output.draw", lambda curve: "<svg></svg>")
