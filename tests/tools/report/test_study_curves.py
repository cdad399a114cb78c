"""Courses of arms are means over seeds; final scores stand at the values of an option."""

from statistics import fmean, stdev

import pytest

from fastclip.tools.report.study_curves import against_options, courses, mean_course
from fastclip.tools.study.measures import read_scores
from fastclip.tools.study.tables import study_tables
from tests.tools.study.studies import make_study, read_study, value_of

pytestmark = pytest.mark.usefixtures("_counted_captions")


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study")


def test_a_course_is_the_mean_over_seeds_with_its_sd(study):
    state = read_study(study)
    found = {curve.key: curve for curve in courses(read_scores(state), state.arms, state.baseline)}
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
    x, y, _ = mean_course(runs, "mean_recall@1", clock=False)
    assert x == [0, 640, 1920, 2560]
    assert len(y) == 4


def test_one_run_has_no_spread_around_its_course(tmp_path):
    state = read_study(make_study(tmp_path / "study", done=lambda arm, seed: seed == 0))
    line = courses(read_scores(state), state.arms, state.baseline)[0].lines[0]
    assert line.spread == [0.0] * 5


def test_arms_that_cannot_be_told_apart_any_more_are_counted(tmp_path):
    study = make_study(tmp_path / "study", vary={"batch.size": list(range(8, 20))}, baseline={}, seeds=[0])
    state = read_study(study)
    curve = courses(read_scores(state), state.arms, state.baseline)[0]
    assert len(curve.lines) == 10
    assert "2 more arms are in the tables" in curve.caption


def test_many_arms_have_a_plot_for_each_baseline(tmp_path):
    vary = {"algorithm": ["openclip", "fastclip-v3"], "batch.size": [16, 32, 64]}
    state = read_study(make_study(tmp_path / "study", vary=vary))
    found = courses(read_scores(state), state.arms, state.baseline)
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
    assert courses(read_scores(state), state.arms, state.baseline) == []
    assert against_options(study_tables(state)) == []
