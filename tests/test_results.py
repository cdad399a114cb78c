"""What docs/results.md quotes is what the studies gave, and these are the studies of the files beside it."""

import json
import re
from pathlib import Path

import pytest

from fastclip.study.plan import load_study

ROOT = Path(__file__).parent.parent
KEPT = sorted((ROOT / "results" / "studies").glob("*/figures.json"))
RESULTS = (ROOT / "docs" / "results.md").read_text()


def test_every_study_that_was_run_is_told_of():
    names = {path.stem for path in (ROOT / "studies").glob("*.yaml")}
    for name in (path.parent.name for path in KEPT):
        assert name in names
        assert f"studies/{name}.yaml" in RESULTS


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_kept_figures_are_of_the_study_as_its_file_has_it(path):
    kept = json.loads(path.read_text())
    study = load_study(ROOT / "studies" / f"{path.parent.name}.yaml")
    assert kept["seed"] == study.seeds
    assert {arm["name"]: arm["values"] for arm in kept["figures"]["arms"]} == {
        arm.name: arm.values for arm in study.all_arms()
    }
    assert not kept["figures"]["missing"]
    for measure in kept["figures"]["measures"]:
        assert all(len(row["values"]) == len(study.seeds) for row in measure["rows"])


def test_quoted_tables_stand_in_the_kept_ones():
    quoted = re.findall(r"<!-- from: (\S+) -->\n(.*?)\n\n", RESULTS + "\n", re.DOTALL)
    assert quoted
    for name, table in quoted:
        kept = (ROOT / name).read_text()
        for line in table.splitlines():
            assert line in kept, f"{name} has no line {line}"
