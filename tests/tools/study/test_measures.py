"""Only finished runs count; means are over the same tasks everywhere; intervals equal scipy's."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from fastclip.errors import InputError
from fastclip.evaluation.suites import find_suite
from fastclip.tools.study.measures import groups, paired_difference, read_scores, summarise
from tests.tools.study.studies import fail, make_study, read_study, value_of, write_results

SHARE = st.floats(0, 1)
SEEDS = st.dictionaries(st.integers(0, 20), st.tuples(SHARE, SHARE), min_size=2, max_size=8)


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study", vary={"algorithm": ["openclip", "fastclip-v3"]})


def values(scores, measure, arm):
    """By seed, without missing ones."""
    rows = scores.frame.query("measure == @measure and arm == @arm").dropna(subset="value")
    return dict(zip(rows.seed, rows.value, strict=True))


def test_means_come_first_then_tasks_then_metrics_of_training(study):
    found = read_scores(read_study(study)).frame[["measure", "kind"]].drop_duplicates()
    assert [*found.itertuples(index=False, name=None)] == [
        ("Mean", "mean"),
        ("Retrieval", "mean"),
        ("Classification & Variants", "mean"),
        ("twemoji_retrieval", "task"),
        ("twemoji_words", "task"),
        ("hard_twemoji_categories", "task"),
        ("mean_recall@1", "training"),
    ]


def test_a_mean_is_over_its_tasks_and_hard_ones_are_variants(study):
    arm = read_study(study).arms[1]
    scores = read_scores(read_study(study))
    tasks = [value_of(arm, 2, task) for task in range(3)]
    assert values(scores, "Mean", arm.name)[2] == pytest.approx(sum(tasks) / 3)
    assert values(scores, "Retrieval", arm.name)[2] == pytest.approx(tasks[0])
    assert values(scores, "Classification & Variants", arm.name)[2] == pytest.approx(sum(tasks[1:]) / 2)


def test_a_mean_over_part_of_the_suite_is_partial(study):
    frame = read_scores(read_study(study)).frame
    assert {*frame[frame.measure == "Mean"].partial} == {f"3 of {len(find_suite('emoji').rows)} tasks"}


def test_a_run_that_lacks_a_task_has_no_mean_and_is_reported(study):
    state = read_study(study)
    write_results(state.runs[0].folder, state.runs[0].arm, 0, tasks=("twemoji_words", "twemoji_retrieval"))
    scores = read_scores(state)
    assert [*values(scores, "Mean", "openclip")] == [1, 2]
    assert [*values(scores, "Retrieval", "openclip")] == [0, 1, 2]
    assert [*values(scores, "hard_twemoji_categories", "openclip")] == [1, 2]
    sentences = [one for one in scores.missing if "openclip, seed 0" in one]
    assert any("2 of the 3 tasks of Mean" in one for one in sentences)


def test_a_failed_task_is_reported_and_not_zero(study):
    state = read_study(study)
    with (state.runs[0].folder / "evaluation" / "results.jsonl").open("a") as file:
        file.write(json.dumps({"task": "twemoji_words", "error": "0.tar ends early."}) + "\n")
    scores = read_scores(state)
    (sentence,) = [one for one in scores.missing if one.startswith("openclip-seed0 ")]
    assert "twemoji_words" in sentence
    assert "0.tar ends early." in sentence
    assert [*values(scores, "twemoji_words", "openclip")] == [1, 2]


def test_unfinished_runs_are_reported_and_not_counted(tmp_path):
    study = make_study(tmp_path / "study", done=lambda arm, seed: seed == 1)
    fail(study, "openclip-b32-seed0", "Traceback …\nValueError: too large")
    scores = read_scores(read_study(study))
    names = {run.name for run in read_study(study).runs if run.seed != 1}
    reported = {one.partition(" ")[0]: one for one in scores.missing}
    assert names <= reported.keys()
    assert "failed" in reported["openclip-b32-seed0"]
    assert reported["openclip-b32-seed0"].endswith("ValueError: too large")
    assert "failed" not in reported["openclip-b32-seed2"]
    assert {*scores.frame.seed} == {1}


def test_a_damaged_line_of_a_finished_run_is_reported(study):
    folder = read_study(study).runs[0].folder
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    (sentence,) = [one for one in read_scores(read_study(study)).missing if "openclip-seed0" in one]
    assert "metrics.jsonl" in sentence
    assert "line 10" in sentence


def test_a_study_without_finished_runs_has_no_scores(tmp_path):
    study = make_study(tmp_path / "study", done=lambda arm, seed: False)
    assert read_scores(read_study(study)).frame.empty


def test_without_a_suite_tasks_are_grouped_by_their_kind():
    found = groups({"a": "retrieval", "b": "multilabel"}, None)
    assert found == {"Mean": ("a", "b"), "Retrieval": ("a",), "Classification & Variants": ("b",)}


def test_datacomp_has_the_names_of_the_paper():
    found = groups({}, "datacomp")
    assert [*found] == ["Datacomp", "Retrieval", "IN & Variants"]
    assert len(found["Datacomp"]) == 38


def test_a_mean_that_no_run_has_is_listed_without_values(study):
    for run in read_study(study).runs:
        kept = "twemoji_words" if run.seed else "twemoji_retrieval"
        write_results(run.folder, run.arm, run.seed, tasks=(kept,))
    scores = read_scores(read_study(study))
    assert (scores.frame.measure == "Mean").any()
    assert values(scores, "Mean", "openclip") == {}


def split(pairs):
    return {seed: one for seed, (one, _) in pairs.items()}, {
        seed: other for seed, (_, other) in pairs.items()
    }


@given(st.lists(SHARE, min_size=2, max_size=9))
def test_mean_and_sd_equal_a_plain_loop(values):
    mean = sum(values) / len(values)
    sd = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    found = {"mean": pytest.approx(mean), "sd": pytest.approx(sd, abs=1e-12), "n": len(values)}
    assert summarise(values) == found


def test_a_single_value_has_no_sd():
    assert summarise([0.25]) == {"mean": 0.25, "sd": None, "n": 1}


def test_no_values_have_no_mean():
    with pytest.raises(InputError) as caught:
        summarise([])
    assert caught.value.argument == "values"


@pytest.mark.slow
@given(SEEDS)
def test_the_interval_equals_scipys(pairs):
    one, other = split(pairs)
    differences = [one[seed] - other[seed] for seed in one]
    found = paired_difference(one, other)
    if np.std(differences) < 1e-9:  # scipy divides by it
        return
    expected = ttest_rel(list(one.values()), list(other.values())).confidence_interval(0.95)
    assert (found["low"], found["high"]) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found["mean"] == pytest.approx(np.mean(differences))
    assert found["n"] == len(pairs)


@given(SEEDS)
def test_a_difference_changes_its_sign_when_the_sides_are_swapped(pairs):
    one, other = split(pairs)
    there, back = paired_difference(one, other), paired_difference(other, one)
    assert there["mean"] == pytest.approx(-back["mean"])
    assert (there["low"], there["high"]) == (pytest.approx(-back["high"]), pytest.approx(-back["low"]))


@given(SEEDS, st.dictionaries(st.integers(0, 20), st.floats(-1, 1), min_size=21, max_size=21))
@pytest.mark.slow
def test_the_effect_of_a_seed_on_both_cancels(pairs, shift):
    one, other = split(pairs)
    moved = paired_difference(
        {seed: value + shift[seed] for seed, value in one.items()},
        {seed: value + shift[seed] for seed, value in other.items()},
    )
    before = paired_difference(one, other)
    assert moved == pytest.approx(before, abs=1e-9)


def test_only_seeds_of_both_sides_are_compared():
    found = paired_difference({0: 0.5, 1: 0.7, 2: 0.9}, {1: 0.5, 2: 0.6, 3: 0.0})
    assert (found["mean"], found["n"]) == (pytest.approx(0.25), 2)
    assert paired_difference({0: 0.5}, {1: 0.5}) is None


def test_a_single_seed_gives_no_interval():
    found = paired_difference({0: 0.5}, {0: 0.25})
    assert found == {"mean": 0.25, "low": None, "high": None, "n": 1}
