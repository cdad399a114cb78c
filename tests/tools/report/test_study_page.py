"""A study's page shows its tables and curves, tells what is missing, and needs nothing but itself."""

import json
from math import isnan
from statistics import fmean, stdev

import pytest

from fastclip.tools.report import output as output_module
from fastclip.tools.report.study_page import against_options, courses, mean_course, progress_of, render_study
from fastclip.tools.study.measures import read_scores
from fastclip.tools.study.result_tables import study_tables
from tests.tools.report.test_run_page import EVIL, Tags
from tests.tools.study.studies import fail, make_study, read_study, value_of

pytestmark = pytest.mark.usefixtures("_counted_captions")


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study")


@pytest.fixture
def _quick_plots(monkeypatch):
    monkeypatch.setattr(output_module, "draw", lambda curve: "<svg></svg>")


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


def test_a_course_is_the_mean_over_seeds_with_its_sd(study):
    state = read_study(study)
    found = {curve.key: curve for curve in courses(state, read_scores(state))}
    assert list(found) == ["course-mean-recall-1-samples", "course-mean-recall-1-time"]
    finals = [100 * value_of(state.arms[3], seed) for seed in range(3)]
    line = found["course-mean-recall-1-samples"].lines[3]
    assert line.label == "fastclip-v3-b64"
    assert line.x == [0, 640, 1280, 1920, 2560]
    assert line.y[-1] == pytest.approx(fmean(finals))
    assert line.spread[-1] == pytest.approx(stdev(finals))
    clock = found["course-mean-recall-1-time"]
    assert clock.axis == "minutes"
    assert clock.lines[0].x == pytest.approx([0, 0.5, 1, 1.5, 2])


def test_only_where_all_seeds_were_evaluated_there_is_a_mean(study):
    runs = list(read_scores(read_study(study)).runs["openclip-b32"].values())
    del runs[0].evaluations[2]
    del runs[1].records[-1]
    found = mean_course(runs, "mean_recall@1")
    assert [*found.samples] == [0, 640, 1920, 2560]
    assert [*found.seconds[:3]] == [0, 30, 90]
    assert isnan(found.seconds[3])  # one run has no clock there


def test_one_run_has_no_spread_around_its_course(tmp_path):
    state = read_study(make_study(tmp_path / "study", done=lambda arm, seed: seed == 0))
    line = courses(state, read_scores(state))[0].lines[0]
    assert line.spread == [0.0] * 5


def test_arms_that_cannot_be_told_apart_any_more_are_counted(tmp_path):
    study = make_study(tmp_path / "study", vary={"batch.size": list(range(8, 20))}, baseline={}, seeds=[0])
    state = read_study(study)
    curve = courses(state, read_scores(state))[0]
    assert len(curve.lines) == 10
    assert "2 more arms are in the tables" in curve.caption


def test_many_arms_have_a_plot_for_each_baseline(tmp_path):
    vary = {"algorithm": ["openclip", "fastclip-v3"], "batch.size": [16, 32, 64]}
    state = read_study(make_study(tmp_path / "study", vary=vary))
    found = courses(state, read_scores(state))
    assert [curve.title for curve in found][::2] == [
        f"Mean, top 1 against samples, batch.size {size}" for size in (16, 32, 64)
    ]
    assert [line.label for line in found[2].lines] == ["openclip-b32", "fastclip-v3-b32"]
    assert len({curve.key for curve in found}) == 6


def test_final_scores_stand_at_the_values_of_an_option_that_is_a_number(study):
    found = against_options(study_tables(read_study(study)))
    assert [curve.title for curve in found] == [
        "Mean against batch.size",
        "Retrieval against batch.size",
        "Classification & Variants against batch.size",
    ]
    assert found[0].places == (32.0, 64.0)
    assert [line.label for line in found[0].lines] == ["openclip", "fastclip-v3"]
    assert [y > 0 for y in found[0].lines[0].spread] == [True, True]


def test_an_option_of_words_or_with_one_value_left_has_no_such_curve(tmp_path):
    words = make_study(tmp_path / "a", vary={"algorithm": ["openclip", "fastclip-v3"]})
    assert against_options(study_tables(read_study(words))) == []
    one = make_study(tmp_path / "b", done=lambda arm, seed: arm.values["batch.size"] == 32)
    assert against_options(study_tables(read_study(one))) == []


def test_a_study_without_tasks_shows_what_was_measured_in_training(tmp_path):
    study = make_study(tmp_path / "study", tasks=None, suite=None)
    for path in study.glob("runs/*/evaluation/results.jsonl"):
        path.unlink()
    found = against_options(study_tables(read_study(study)))
    assert [curve.title for curve in found] == ["mean_recall@1 against batch.size"]


def test_an_empty_study_has_no_curves(tmp_path):
    state = read_study(make_study(tmp_path / "study", done=lambda arm, seed: False))
    assert courses(state, read_scores(state)) == []
    assert against_options(study_tables(state)) == []
