"""A run that most tests of pages begin with."""

from copy import deepcopy

import pytest

from fastclip.run.folder import read_run
from tests.tools.report.folders import make_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return read_run(make_run(tmp_path_factory.mktemp("runs") / "a"))


@pytest.fixture
def run(finished):
    """A finished run of fastclip-v3, to be changed."""
    return deepcopy(finished)
