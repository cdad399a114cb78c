"""Scores are those of finished runs; means are over the same tasks everywhere; what is missing is told."""

import json

import pytest

from fastclip.evaluation.tasks import find_suite
from fastclip.tools.study.measures import groups, points, read_scores, training_measure
from tests.tools.study.studies import fail, make_study, read_study, value_of, write_results


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study", vary={"algorithm": ["openclip", "fastclip-v3"]})


def measures(study):
    return {measure.name: measure for measure in read_scores(read_study(study)).measures}


def test_means_come_first_then_tasks_then_what_was_measured_in_training(study):
    found = read_scores(read_study(study)).measures
    assert [(measure.name, measure.kind) for measure in found] == [
        ("Mean", "mean"),
        ("Retrieval", "mean"),
        ("Classification & Variants", "mean"),
        ("twemoji_retrieval", "task"),
        ("twemoji_words", "task"),
        ("hard_twemoji_categories", "task"),
        ("mean_recall@1", "training"),
    ]


def test_a_mean_is_that_of_its_tasks_and_hard_ones_are_variants(study):
    arm = read_study(study).arms[1]
    found = measures(study)
    tasks = [value_of(arm, 2, task) for task in range(3)]
    assert found["Mean"].values[arm.name][2] == pytest.approx(sum(tasks) / 3)
    assert found["Retrieval"].values[arm.name][2] == pytest.approx(tasks[0])
    assert found["Classification & Variants"].values[arm.name][2] == pytest.approx(sum(tasks[1:]) / 2)


def test_a_mean_over_a_part_of_the_suite_says_so(study):
    assert measures(study)["Mean"].partial == f"3 of {len(find_suite('emoji').rows)} tasks"


def test_a_run_that_lacks_a_task_has_no_mean_and_is_told(study):
    state = read_study(study)
    write_results(state.runs[0].folder, state.runs[0].arm, 0, tasks=("twemoji_words", "twemoji_retrieval"))
    scores = read_scores(state)
    found = {measure.name: measure for measure in scores.measures}
    assert sorted(found["Mean"].values["openclip"]) == [1, 2]
    assert sorted(found["Retrieval"].values["openclip"]) == [0, 1, 2]
    assert sorted(found["hard_twemoji_categories"].values["openclip"]) == [1, 2]
    told = [sentence for sentence in scores.missing if "openclip, seed 0" in sentence]
    assert any("2 of the 3 tasks of Mean" in sentence for sentence in told)


def test_a_task_that_failed_is_told_and_never_zero(study):
    state = read_study(study)
    with (state.runs[0].folder / "evaluation" / "results.jsonl").open("a") as file:
        file.write(json.dumps({"task": "twemoji_words", "error": "0.tar is torn."}) + "\n")
    scores = read_scores(state)
    assert "openclip-seed0 has no score of twemoji_words: 0.tar is torn." in scores.missing
    words = next(measure for measure in scores.measures if measure.name == "twemoji_words")
    assert sorted(words.values["openclip"]) == [1, 2]


def test_runs_that_are_not_done_are_told_and_not_counted(tmp_path):
    study = make_study(tmp_path / "study", done=lambda arm, seed: seed == 1)
    fail(study, "openclip-b32-seed0", "Traceback …\nValueError: too large")
    scores = read_scores(read_study(study))
    assert "openclip-b32-seed0 failed and is not counted. ValueError: too large" in scores.missing
    assert "openclip-b32-seed2 has not finished and is not counted." in scores.missing
    assert all([*seeds] == [1] for measure in scores.measures for seeds in measure.values.values())


def test_a_broken_line_of_a_finished_run_is_told(study):
    folder = read_study(study).runs[0].folder
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    missing = read_scores(read_study(study)).missing
    assert "openclip-seed0: metrics.jsonl: line 10 is no record and was left out." in missing


def test_a_study_without_any_run_has_no_measures(tmp_path):
    study = make_study(tmp_path / "study", done=lambda arm, seed: False)
    assert read_scores(read_study(study)).measures == []


def test_without_a_suite_tasks_are_told_apart_by_their_kind():
    found = {group.name: group for group in groups({"a": "retrieval", "b": "multilabel"}, None)}
    assert found["Mean"].folders == ("a", "b")
    assert found["Retrieval"].folders == ("a",)
    assert found["Classification & Variants"].folders == ("b",)


def test_datacomp_has_the_papers_own_names():
    found = groups({}, "datacomp")
    assert found[0].tasks == 38
    assert [group.name for group in found] == ["Datacomp", "Retrieval", "IN & Variants"]


def test_points_have_the_clock_of_the_first_record_at_or_after_them(study):
    run = read_scores(read_study(study)).runs["openclip"][0]
    run.evaluations[1]["step"] = 5
    found = points(run, "mean_recall@1")
    assert [point.seconds for point in found] == [0.0, 30.0, 60.0, 90.0, 120.0]
    assert found[-1].samples == 40 * 64
    assert points(run, "unknown") == []


def test_runs_are_compared_by_the_usual_measure_or_by_any(study):
    run = read_scores(read_study(study)).runs["openclip"][0]
    assert training_measure([run]) == "mean_recall@1"
    for record in run.evaluations:
        record["evaluation"] = {"words/acc1": 0.5}
    assert training_measure([run]) == "words/acc1"
    assert training_measure([]) is None
