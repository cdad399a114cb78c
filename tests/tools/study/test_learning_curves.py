"""Learning curves take the clock of their records; effort equals that of a plain loop."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.run.folder import read_run
from fastclip.tools.study.learning_curves import (
    Point,
    effort_to_match,
    first_reaching,
    main_measures,
    measured,
    points,
)
from tests.tools.study.studies import make_study, read_study

SCORES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@pytest.fixture
def run(tmp_path):
    study = make_study(tmp_path / "study", vary={"algorithm": ["openclip"]}, seeds=[0])
    return read_run(read_study(study).runs[0].folder, settings=False)


def curve(scores, seconds=2.0, every=100):
    return [Point(every * i, seconds * i, score) for i, score in enumerate(scores)]


def test_points_have_the_clock_of_the_first_record_at_or_after_them(run):
    run.evaluations[1]["step"] = 5
    found = points(run, "mean_recall@1")
    assert [point.seconds for point in found] == [0.0, 30.0, 60.0, 90.0, 120.0]
    assert found[-1].samples == 40 * 64
    assert points(run, "unknown") == []


def test_runs_are_compared_by_the_usual_metrics_or_by_any(run):
    run.evaluations[0]["evaluation"] = {"words/acc1": 0.5, "tasks_mean": 0.5}
    assert measured([run]) == ["words/acc1", "tasks_mean", "mean_recall@1"]
    assert main_measures([run]) == ["mean_recall@1", "tasks_mean"]
    for record in run.evaluations:
        record["evaluation"] = {"words/acc1": 0.5, "words/acc5": 0.5}
    assert main_measures([run]) == ["words/acc1"]
    assert main_measures([]) == []


def test_the_first_evaluation_that_reaches_a_score_counts_without_interpolation():
    found = curve([0.0, 0.2, 0.4, 0.3, 0.6])
    assert first_reaching(found, 0.21).samples == 200
    assert first_reaching(found, 0.2).samples == 100
    assert first_reaching(found, 0.61) is None


@given(SCORES, st.floats(0, 1))
def test_first_reaching_equals_a_plain_loop_in_any_order(scores, target):
    expected = None
    for number, score in enumerate(scores):
        if score >= target:
            expected = 100 * number
            break
    found = first_reaching(curve(scores)[::-1], target)
    assert (found and found.samples) == expected


def test_effort_is_relative_to_the_baseline():
    baseline = curve([0.0, 0.1, 0.2, 0.3, 0.4])
    quick = curve([0.0, 0.3, 0.5], seconds=3.0)
    assert effort_to_match(quick, baseline) == (0.5, 0.75)


def test_a_baseline_counts_up_to_its_first_evaluation_at_its_final_score():
    assert effort_to_match(curve([0.0, 0.4]), curve([0.0, 0.4, 0.5, 0.4])) == (1.0, 1.0)


def test_effort_without_a_clock_has_only_samples():
    arm = [Point(100, None, 0.5)]
    assert effort_to_match(arm, curve([0.0, 0.1, 0.2])) == (0.5, None)


@pytest.mark.parametrize(
    ("arm", "baseline"),
    [
        ([0.0, 0.1], [0.0, 0.2]),
        ([0.5], []),
        ([0.5], [0.4, 0.3]),
        ([nan], [0.0, 0.1]),
        ([inf], [0.0, 0.1]),
        ([], [0.0, 0.1]),
    ],
)
def test_a_score_that_is_never_reached_or_needs_no_training_has_no_effort(arm, baseline):
    assert effort_to_match(curve(arm), curve(baseline)) is None


@given(SCORES)
def test_a_run_has_an_effort_of_one_relative_to_itself(scores):
    found = effort_to_match(curve(scores), curve(scores))
    assert found is None or found == (1.0, 1.0)
