"""A study's page shows its tables and curves, tells what is missing, and needs nothing but itself."""

import json

import pytest

from fastclip.tools.report import template as template_module
from fastclip.tools.report.study_page import progress_of, render_study
from tests.tools.report.test_page import EVIL, Tags
from tests.tools.study.studies import fail, make_study, read_study

pytestmark = pytest.mark.usefixtures("_counted_captions")


@pytest.fixture
def _quick_plots(monkeypatch):
    monkeypatch.setattr(template_module, "draw", lambda curve: "<svg></svg>")


def text_of(study):
    tags = Tags(render_study(read_study(study)).html)
    assert (tags.unbalanced, tags.open) == ([], [])
    return " ".join(tags.text.split())


def test_the_page_is_self_contained_and_has_every_plot(tmp_path):
    page = render_study(read_study(make_study(tmp_path / "study")))
    tags = Tags(page.html)
    assert "http://" not in page.html
    assert "https://" not in page.html
    assert not {"script", "link", "iframe", "a"} & {tag for tag, _ in tags.tags}
    assert len(tags.all("svg")) == len(page.curves) == 5
    ids = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(ids) == len({*ids})


@pytest.mark.usefixtures("_quick_plots")
def test_tables_have_the_best_in_bold_and_the_gain_stands_on_top(tmp_path):
    study = make_study(tmp_path / "study")
    text = text_of(study)
    assert "A study: 4 arms · 3 seeds · recipe scenes · suite emoji" in text
    assert "all 12 runs are done" in text
    assert "Classification & Variants" in text
    assert "largest gain +10.00" in text
    assert "<b>46.32 (1.00)</b>" in render_study(read_study(study)).html


@pytest.mark.usefixtures("_quick_plots")
def test_missing_and_failed_runs_are_told(tmp_path):
    study = make_study(tmp_path / "study", done=lambda arm, seed: seed == 0)
    fail(study, "openclip-b32-seed1", f"ValueError: {EVIL}")
    text = text_of(study)
    assert "4 of 12 runs done, 1 failed; the same command goes on" in text
    assert "openclip-b32-seed1 failed and is not counted. ValueError: <script>" in text
    assert "fastclip-v3-b64-seed2 has not finished" in text
    assert "one seed gives no interval" in text


@pytest.mark.usefixtures("_quick_plots")
def test_an_empty_study_has_a_page(tmp_path):
    text = text_of(make_study(tmp_path / "study", done=lambda arm, seed: False))
    assert "0 of 12 runs done" in text
    assert "There are no scores yet" in text


@pytest.mark.usefixtures("_quick_plots")
def test_a_broken_line_of_one_run_leaves_the_rest(tmp_path):
    study = make_study(tmp_path / "study")
    with (study / "runs" / "openclip-b32-seed0" / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    text = text_of(study)
    assert "openclip-b32-seed0: metrics.jsonl: line 10 is no record and was left out." in text
    assert "all 12 runs are done" in text


@pytest.mark.usefixtures("_quick_plots")
def test_tuning_is_shown_with_its_choice(tmp_path):
    study = make_study(tmp_path / "study", vary={"algorithm": ["openclip"]})
    tried = [{"values": {"optim.lr": lr}, "score": lr, "error": ""} for lr in (0.25, 0.5)]
    chosen = {"arm": "openclip", "chosen": {"optim.lr": 0.5}, "tried": tried}
    (study / "tuning.json").write_text(json.dumps({"arms": [chosen]}))
    assert "optim.lr 0.5 openclip 25.00 50.00 ✓" in text_of(study)


@pytest.mark.usefixtures("_quick_plots")
def test_names_from_a_study_are_text_and_never_markup(tmp_path):
    arms = [{"algorithm": "openclip", "data.train": EVIL}]
    study = make_study(tmp_path / "<i>study", vary={}, arms=arms, baseline={})
    page = render_study(read_study(study)).html
    assert not Tags(page).all("script")
    assert not Tags(page).all("i")


@pytest.mark.usefixtures("_quick_plots")
def test_who_logs_in_where_stays_out_of_the_settings(tmp_path):
    study = make_study(tmp_path / "study", set={"data.train": "https://me:secret@host/data.tar?token=abc"})
    page = render_study(read_study(study)).html
    assert "https://host/data.tar" in page
    assert "secret" not in page
    assert "token" not in page


@pytest.mark.usefixtures("_quick_plots")
def test_the_same_study_gives_the_same_page(tmp_path):
    state = read_study(make_study(tmp_path / "study"))
    assert render_study(state).html == render_study(state).html


def test_progress_counts_runs(tmp_path):
    state = read_study(make_study(tmp_path / "study", done=lambda arm, seed: seed < 2))
    assert progress_of(state) == ("in progress", "8 of 12 runs done; the same command goes on")
