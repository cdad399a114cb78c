"""One table of collections: every module that it names builds, and importing it needs no torch."""

import subprocess
import sys
from importlib import import_module

import pytest

from fastclip.config.collections import COLLECTIONS
from fastclip.config.parse import recipe_names
from fastclip.datasets.get_command import get
from fastclip.evaluation.eval_command import evaluate


@pytest.mark.parametrize("name", COLLECTIONS)
def test_every_collection_can_be_built_and_trained_on(name):
    assert callable(import_module(COLLECTIONS[name].module).build)
    assert name in recipe_names()


def test_help_describes_every_collection_and_suite():
    for row in COLLECTIONS.values():
        assert row.description in str(row)
        assert str(row) in get.__doc__
    assert "datacomp or emoji or icons" in evaluate.__doc__


def test_the_table_needs_no_torch():
    modules = "fastclip.datasets.get_command, fastclip.evaluation.eval_command"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
