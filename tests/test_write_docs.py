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
RESULTS = "".join((ROOT / "docs" / name).read_text() for name in ("results.md", "short-studies.md"))
NOT_RUN = RESULTS.partition("## Not yet run")[2].partition("# Short studies")[0]
DONE = [name for name in STUDY_NAMES if f"`studies/{name}.yaml`" not in NOT_RUN]


def test_every_generated_table_is_up_to_date():
    outdated = [str(path.relative_to(ROOT)) for path in write_docs.outdated()]
    assert not outdated, f"run `make docs`: {', '.join(outdated)}"


def test_a_table_that_is_out_of_date_is_found():
    marked = "before\n<!-- generated: rho-rules -->\n| old |\n<!-- end -->\nafter\n"
    filled = write_docs.fill(marked)
    assert "| old |" not in filled
    assert filled.startswith("before\n<!-- generated: rho-rules -->\n| ρ by |")
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
    assert sorted(path.parent.name for path in STUDIES.glob("*/figures.json")) == DONE
    for name in STUDY_NAMES:
        assert f"`studies/{name}.yaml`" in RESULTS


@pytest.mark.parametrize("name", DONE)
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
        ("batch-32", "fastclip-v3", "openclip", "Retrieval"),
        ("batch-32", "fastclip-v3", "openclip", "Classification & Variants"),
        ("batch-128", "fastclip-v3", "openclip", "Retrieval"),
        ("batch-128", "fastclip-v3", "openclip", "Classification & Variants"),
        ("optimizer", "sgd", "adamw", "Mean"),
        ("optimizer", "lion", "adamw", "Mean"),
        ("optimizer", "lamb", "adamw", "Mean"),
    ],
)
def test_intervals_in_the_text_are_those_of_the_study(study, arm, baseline, metric):
    assert interval(differences(study, arm, baseline, metric)) in RESULTS


@pytest.mark.parametrize("study", ["batch-32", "batch-128"])
def test_intervals_without_the_tasks_near_chance_are_those_of_the_study(study):
    figures = json.loads((STUDIES / study / "figures.json").read_text())["figures"]
    tasks = [m["name"] for m in figures["measures"] if m["kind"] == "task"]
    nine = [name for name in tasks if "retrieval" not in name and not name.startswith("hard_")]
    by_task = [differences(study, "fastclip-v3", "openclip", name) for name in nine]
    assert len(nine) == 9
    assert interval({seed: sum(task[seed] for task in by_task) / 9 for seed in by_task[0]}) in RESULTS


def test_errors_of_the_network_model_in_the_text_are_those_of_its_fit():
    text = " ".join((ROOT / "docs" / "scaling.md").read_text().split())
    for size in (ERRORS.step_seen, ERRORS.step_unseen, ERRORS.ratio_unseen, ERRORS.ratio_one):
        assert f"{100 * size.mean:.1f} % (at most {100 * size.largest:.1f} %)" in text
