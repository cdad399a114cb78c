"""Figures in the documents are those of results/, and these are the studies of the files in studies/."""

import json
from pathlib import Path

import pytest
from benchmarks import write_docs
from benchmarks.write_docs import STUDIES, differences, interval

from fastclip.tools.profiling.network import ERRORS
from fastclip.tools.study.definition import load_study

ROOT = Path(__file__).parent.parent
STUDY_NAMES = sorted(path.stem for path in (ROOT / "studies").glob("*.yaml"))
RESULTS = (ROOT / "docs" / "results.md").read_text()


def test_every_generated_table_is_up_to_date():
    outdated = [str(path.relative_to(ROOT)) for path in write_docs.outdated()]
    assert not outdated, f"run `make docs`: {', '.join(outdated)}"


def test_a_table_that_is_out_of_date_is_found():
    marked = "before\n<!-- generated: rho-at-256 -->\n| old |\n<!-- end -->\nafter\n"
    filled = write_docs.fill(marked)
    assert "| old |" not in filled
    assert filled.startswith("before\n<!-- generated: rho-at-256 -->\n| ρ |")
    assert filled.endswith("\n<!-- end -->\nafter\n")
    assert write_docs.fill(filled) == filled


def test_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match="no-such-table"):
        write_docs.fill("<!-- generated: no-such-table -->\n<!-- end -->\n")


@pytest.mark.parametrize(
    "document", ["README.md", "docs/results.md", "docs/scaling.md", "docs/benchmarks.md"]
)
def test_documents_have_generated_tables(document):
    assert "<!-- generated: " in (ROOT / document).read_text()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_study_has_figures_and_a_section():
    assert sorted(path.parent.name for path in STUDIES.glob("*/figures.json")) == STUDY_NAMES
    for name in STUDY_NAMES:
        assert f"`studies/{name}.yaml`" in RESULTS


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_figures_belong_to_the_study_in_its_file(name):
    stored = json.loads((STUDIES / name / "figures.json").read_text())
    study = load_study(ROOT / "studies" / f"{name}.yaml")
    assert stored["seed"] == study.seeds
    assert {arm["name"]: arm["values"] for arm in stored["figures"]["arms"]} == {
        arm.name: arm.values for arm in study.all_arms()
    }
    assert not stored["figures"]["missing"]
    for metric in stored["figures"]["measures"]:
        assert all(len(row["values"]) == len(study.seeds) for row in metric["rows"])


@pytest.mark.parametrize(
    ("study", "arm", "baseline", "metric"),
    [
        ("schedule", "fastclip-v3-cosine", "fastclip-v3-constant", "Retrieval"),
        ("steps", "fastclip-v3", "openclip", "Retrieval"),
        ("steps", "fastclip-v3", "openclip", "Mean"),
        ("optimizer", "sgd", "adamw", "Mean"),
        ("optimizer", "lion", "adamw", "Mean"),
        ("optimizer", "lamb", "adamw", "Mean"),
    ],
)
def test_intervals_in_the_text_are_those_of_the_study(study, arm, baseline, metric):
    assert interval(differences(study, arm, baseline, metric)) in RESULTS


@pytest.mark.parametrize("metric", ["Mean", "Retrieval"])
def test_the_interval_over_all_batches(metric):
    each = [differences("batch", f"b{b}-fastclip-v3", f"b{b}-openclip", metric) for b in (16, 64, 256)]
    assert interval({seed: sum(found[seed] for found in each) / 3 for seed in each[0]}) in RESULTS


def test_two_studies_of_one_comparison_have_different_seeds():
    first, second = (differences(name, "fastclip-v3", "openclip", "Mean") for name in ("control", "smallest"))
    assert not first.keys() & second.keys()


def test_errors_of_the_network_model_in_the_text_are_those_of_its_fit():
    text = " ".join((ROOT / "docs" / "scaling.md").read_text().split())
    for size in (ERRORS.step_seen, ERRORS.step_unseen, ERRORS.ratio_unseen, ERRORS.ratio_one):
        assert f"{100 * size.mean:.1f} % (at most {100 * size.largest:.1f} %)" in text
