"""The page of a study is self-contained and shows tables, curves, and what is missing."""

import json
from math import isnan
from statistics import fmean, stdev

import pytest

from fastclip.tools.report.study_page import (
    against_options,
    learning_curves,
    mean_learning_curve,
    progress_of,
    render_study,
)
from fastclip.tools.study.measures import read_scores
from fastclip.tools.study.result_tables import study_tables
from tests.tools.report.test_run_page import EVIL, Tags
from tests.tools.study.studies import fail, make_study, read_study, value_of

pytestmark = pytest.mark.usefixtures("_counted_captions")


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study")


def text_of(study):
    tags = Tags(render_study(read_study(study)).html)
    assert (tags.unbalanced, tags.open) == ([], [])
    return " ".join(tags.text.split())


@pytest.mark.slow
def test_the_page_is_self_contained_and_has_every_plot(tmp_path):
    page = render_study(read_study(make_study(tmp_path / "study")))
    tags = Tags(page.html)
    assert "http://" not in page.html
    assert "https://" not in page.html
    assert not {"script", "link", "iframe", "a"} & {tag for tag, _ in tags.tags}
    assert len(tags.all("svg")) == len(page.curves) == 5
    ids = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(ids) == len({*ids})


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_the_best_score_is_bold_and_the_largest_gain_is_a_key_figure(tmp_path):
    study = make_study(tmp_path / "study")
    text = text_of(study)
    assert "4 arms · 3 seeds · recipe scenes · suite emoji" in text
    assert "12 runs" in text
    assert "Classification & Variants" in text
    assert "largest gain +10.00" in text
    assert "<b>46.32 (1.00)</b>" in render_study(read_study(study)).html


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_missing_and_failed_runs_are_listed(tmp_path):
    study = make_study(tmp_path / "study", done=lambda arm, seed: seed == 0)
    fail(study, "openclip-b32-seed1", f"ValueError: {EVIL}")
    text = text_of(study)
    assert "4 of 12 runs done, 1 failed" in text
    sentences = study_tables(read_study(study))["missing"]
    assert all(name in " ".join(sentences) for name in ("openclip-b32-seed1", "fastclip-v3-b64-seed2"))
    assert f"ValueError: {EVIL}" in text
    assert all(" ".join(sentence.split()) in text for sentence in sentences)


@pytest.mark.usefixtures("_quick_plots")
def test_an_empty_study_has_a_page(tmp_path):
    study = make_study(tmp_path / "study", done=lambda arm, seed: False)
    assert "0 of 12 runs done" in text_of(study)
    assert not Tags(render_study(read_study(study)).html).all("svg")


@pytest.mark.usefixtures("_quick_plots")
def test_a_damaged_line_of_one_run_does_not_affect_the_others(tmp_path):
    study = make_study(tmp_path / "study")
    with (study / "runs" / "openclip-b32-seed0" / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    text = text_of(study)
    assert "openclip-b32-seed0: metrics.jsonl: line 10 " in text
    assert progress_of(read_study(study)).kind == "finished"


@pytest.mark.usefixtures("_quick_plots")
def test_tuning_shows_the_chosen_value(tmp_path):
    study = make_study(tmp_path / "study", vary={"algorithm": ["openclip"]})
    tried = [{"values": {"optim.lr": lr}, "score": lr, "error": ""} for lr in (0.25, 0.5)]
    chosen = {"arm": "openclip", "chosen": {"optim.lr": 0.5}, "tried": tried}
    (study / "tuning.json").write_text(json.dumps({"arms": [chosen]}))
    assert "optim.lr 0.5 openclip 25.00 50.00 ✓" in text_of(study)


@pytest.mark.usefixtures("_quick_plots")
def test_names_of_a_study_are_never_markup(tmp_path):
    arms = [{"algorithm": "openclip", "data.train": EVIL}]
    study = make_study(tmp_path / "<i>study", vary={}, arms=arms, baseline={})
    page = render_study(read_study(study)).html
    assert not Tags(page).all("script")
    assert not Tags(page).all("i")


@pytest.mark.usefixtures("_quick_plots")
def test_settings_are_shown_without_credentials(tmp_path):
    study = make_study(tmp_path / "study", set={"data.train": "https://me:secret@host/data.tar?token=abc"})
    page = render_study(read_study(study)).html
    assert "https://host/data.tar" in page
    assert "secret" not in page
    assert "token" not in page


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_a_page_is_reproducible(tmp_path):
    state = read_study(make_study(tmp_path / "study"))
    assert render_study(state).html == render_study(state).html


def test_progress_counts_runs(tmp_path):
    state = read_study(make_study(tmp_path / "study", done=lambda arm, seed: seed < 2))
    kind, progress = progress_of(state)
    assert kind == "in progress"
    assert progress.startswith("8 of 12 runs")


def test_a_learning_curve_is_the_mean_over_seeds_with_its_sd(study):
    state = read_study(study)
    found = {curve.key: curve for curve in learning_curves(state, read_scores(state))}
    assert list(found) == ["course-mean-recall-1-samples", "course-mean-recall-1-time"]
    finals = [100 * value_of(state.arms[3], seed) for seed in range(3)]
    line = found["course-mean-recall-1-samples"].lines[3]
    assert line.label == "fastclip-v3-b64"
    assert line.x == [0, 640, 1280, 1920, 2560]
    assert line.y[-1] == pytest.approx(fmean(finals))
    assert line.spread[-1] == pytest.approx(stdev(finals))
    by_time = found["course-mean-recall-1-time"]
    assert by_time.axis == "minutes"
    assert by_time.lines[0].x == pytest.approx([0, 0.5, 1, 1.5, 2])


def test_a_mean_has_only_points_where_all_seeds_were_evaluated(study):
    runs = list(read_scores(read_study(study)).runs["openclip-b32"].values())
    del runs[0].evaluations[2]
    del runs[1].records[-1]
    mean = mean_learning_curve(runs, "mean_recall@1")
    assert [*mean.samples] == [0, 640, 1920, 2560]
    assert [*mean.seconds[:3]] == [0, 30, 90]
    assert isnan(mean.seconds[3])  # one run has no time there


def test_the_learning_curve_of_one_run_has_no_spread(tmp_path):
    state = read_study(make_study(tmp_path / "study", done=lambda arm, seed: seed == 0))
    line = learning_curves(state, read_scores(state))[0].lines[0]
    assert line.spread == [0.0] * 5


def test_plots_show_the_first_ten_arms_and_count_the_rest(tmp_path):
    study = make_study(tmp_path / "study", vary={"batch.size": list(range(8, 20))}, baseline={}, seeds=[0])
    state = read_study(study)
    curve = learning_curves(state, read_scores(state))[0]
    assert len(curve.lines) == 10
    assert "2 more arms" in curve.caption


def test_many_arms_have_one_plot_per_baseline(tmp_path):
    vary = {"algorithm": ["openclip", "fastclip-v3"], "batch.size": [16, 32, 64]}
    state = read_study(make_study(tmp_path / "study", vary=vary))
    found = learning_curves(state, read_scores(state))
    assert [curve.title for curve in found][::2] == [
        f"Mean recall@1 against samples, batch.size {size}" for size in (16, 32, 64)
    ]
    assert [line.label for line in found[2].lines] == ["openclip-b32", "fastclip-v3-b32"]
    assert len({curve.key for curve in found}) == 6


def test_final_scores_are_drawn_against_numeric_options(study):
    found = against_options(study_tables(read_study(study)))
    assert [curve.title for curve in found] == [
        "Mean against batch.size",
        "Retrieval against batch.size",
        "Classification & Variants against batch.size",
    ]
    assert found[0].ticks == (32.0, 64.0)
    assert [line.label for line in found[0].lines] == ["openclip", "fastclip-v3"]
    assert [y > 0 for y in found[0].lines[0].spread] == [True, True]


def test_an_option_with_text_or_a_single_value_has_no_such_curve(tmp_path):
    text = make_study(tmp_path / "a", vary={"algorithm": ["openclip", "fastclip-v3"]})
    assert against_options(study_tables(read_study(text))) == []
    one = make_study(tmp_path / "b", done=lambda arm, seed: arm.values["batch.size"] == 32)
    assert against_options(study_tables(read_study(one))) == []


def test_a_study_without_tasks_shows_metrics_of_training(tmp_path):
    study = make_study(tmp_path / "study", tasks=None, suite=None)
    for path in study.glob("runs/*/evaluation/results.jsonl"):
        path.unlink()
    found = against_options(study_tables(read_study(study)))
    assert [curve.title for curve in found] == ["mean_recall@1 against batch.size"]


def test_an_empty_study_has_no_curves(tmp_path):
    state = read_study(make_study(tmp_path / "study", done=lambda arm, seed: False))
    assert learning_curves(state, read_scores(state)) == []
    assert against_options(study_tables(state)) == []
