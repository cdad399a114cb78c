"""What docs/results.md quotes is what the studies gave, and these are the studies of the files beside it."""

import json
import re
from pathlib import Path

import pytest

from fastclip.tools.study.definition import load_study
from fastclip.tools.study.measures import paired_difference
from fastclip.tools.study.rendering import as_markdown

ROOT = Path(__file__).parent.parent
KEPT = sorted((ROOT / "results" / "studies").glob("*/figures.json"))
RESULTS = (ROOT / "docs" / "results.md").read_text()


def test_every_study_is_kept_and_told_of():
    names = sorted(path.stem for path in (ROOT / "studies").glob("*.yaml"))
    assert names == [path.parent.name for path in KEPT]
    for name in names:
        assert f"`studies/{name}.yaml`" in RESULTS


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


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_kept_tables_are_those_of_the_kept_figures(path):
    assert as_markdown(json.loads(path.read_text())["figures"]) == (path.parent / "tables.md").read_text()


@pytest.mark.parametrize("document", ["results.md", "scaling.md"])
def test_quoted_tables_stand_in_the_kept_ones(document):
    text = (ROOT / "docs" / document).read_text()
    quoted = re.findall(r"<!-- from: (\S+) -->\n(.*?)\n\n", text + "\n", re.DOTALL)
    assert quoted
    for name, table in quoted:
        kept = (ROOT / name).read_text()
        for line in table.splitlines():
            assert line in kept, f"{name} has no line {line}"


def differences(study, arm, baseline, measure):
    """Of a study's arms by seed, in points."""
    figures = json.loads((ROOT / f"results/studies/{study}/figures.json").read_text())["figures"]
    rows = next(found["rows"] for found in figures["measures"] if found["name"] == measure)
    ours, theirs = (next(row["values"] for row in rows if row["arm"] == name) for name in (arm, baseline))
    return {seed: 100 * (ours[seed] - theirs[seed]) for seed in ours}


def as_text(by_seed):
    found = paired_difference(by_seed, dict.fromkeys(by_seed, 0.0))
    return f"{found['mean']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]".replace("-", "−")


@pytest.mark.parametrize("measure", ["Mean", "Retrieval"])
@pytest.mark.parametrize("baseline", ["openclip", "mbcl-warm", "v3-no-memory"])
def test_differences_to_the_controls(baseline, measure):
    assert as_text(differences("control", "fastclip-v3", baseline, measure)) in RESULTS


@pytest.mark.parametrize(
    ("study", "arm", "baseline", "measure"),
    [
        ("schedule", "fastclip-v3-cosine", "fastclip-v3-constant", "Retrieval"),
        ("steps", "fastclip-v3", "openclip", "Retrieval"),
        ("steps", "fastclip-v3", "openclip", "Mean"),
        ("optimizer", "sgd", "adamw", "Mean"),
        ("optimizer", "lion", "adamw", "Mean"),
        ("optimizer", "lamb", "adamw", "Mean"),
    ],
)
def test_differences_that_are_told_with_their_interval(study, arm, baseline, measure):
    assert as_text(differences(study, arm, baseline, measure)) in RESULTS


@pytest.mark.parametrize("measure", ["Mean", "Retrieval"])
def test_differences_over_all_batches(measure):
    each = [differences("batch", f"b{b}-fastclip-v3", f"b{b}-openclip", measure) for b in (16, 64, 256)]
    assert as_text({seed: sum(found[seed] for found in each) / 3 for seed in each[0]}) in RESULTS


@pytest.mark.parametrize("measure", ["Mean", "Retrieval"])
def test_differences_at_the_smallest_batch_over_the_seeds_of_two_studies(measure):
    first = differences("control", "fastclip-v3", "openclip", measure)
    fresh = differences("smallest", "fastclip-v3", "openclip", measure)
    assert not first.keys() & fresh.keys()
    assert as_text(first | fresh) in RESULTS
