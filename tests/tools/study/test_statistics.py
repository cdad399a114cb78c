"""Means, intervals and efforts are those of plain loops and of scipy."""

from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from fastclip.tools.study.statistics import (
    Point,
    effort_to_match,
    first_reaching,
    paired_difference,
    summarise,
)

SHARE = st.floats(0, 1)
SEEDS = st.dictionaries(st.integers(0, 20), st.tuples(SHARE, SHARE), min_size=2, max_size=8)
COURSE = st.lists(SHARE, min_size=1, max_size=8)


def points(scores, seconds=2.0, every=100):
    return [Point(every * i, seconds * i, score) for i, score in enumerate(scores)]


def split(pairs):
    return {seed: one for seed, (one, _) in pairs.items()}, {
        seed: other for seed, (_, other) in pairs.items()
    }


@given(st.lists(SHARE, min_size=2, max_size=9))
def test_mean_and_sd_are_those_of_a_plain_loop(values):
    mean = sum(values) / len(values)
    sd = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    assert summarise(values) == (pytest.approx(mean), pytest.approx(sd, abs=1e-12), len(values))


def test_one_value_has_no_spread():
    assert summarise([0.25]) == (0.25, None, 1)


def test_no_values_have_no_mean():
    with pytest.raises(ValueError, match="no mean of no values"):
        summarise([])


@given(SEEDS)
def test_the_interval_is_scipys(pairs):
    one, other = split(pairs)
    differences = [one[seed] - other[seed] for seed in one]
    found = paired_difference(one, other)
    if np.std(differences) < 1e-9:  # scipy divides by it
        return
    expected = ttest_rel(list(one.values()), list(other.values())).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found.mean == pytest.approx(np.mean(differences))
    assert found.n == len(pairs)


@given(SEEDS)
def test_a_difference_turns_its_sign_with_its_sides(pairs):
    one, other = split(pairs)
    there, back = paired_difference(one, other), paired_difference(other, one)
    assert there.mean == pytest.approx(-back.mean)
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))


@given(SEEDS, st.dictionaries(st.integers(0, 20), st.floats(-1, 1), min_size=21, max_size=21))
def test_what_a_seed_does_to_both_drops_out(pairs, shift):
    one, other = split(pairs)
    moved = paired_difference(
        {seed: value + shift[seed] for seed, value in one.items()},
        {seed: value + shift[seed] for seed, value in other.items()},
    )
    before = paired_difference(one, other)
    assert moved == tuple(pytest.approx(value, abs=1e-9) for value in before)


def test_seeds_that_one_side_lacks_are_not_compared():
    found = paired_difference({0: 0.5, 1: 0.7, 2: 0.9}, {1: 0.5, 2: 0.6, 3: 0.0})
    assert (found.mean, found.n) == (pytest.approx(0.25), 2)
    assert paired_difference({0: 0.5}, {1: 0.5}) is None


def test_one_seed_gives_no_interval_and_says_so():
    found = paired_difference({0: 0.5}, {0: 0.25})
    assert found == (0.25, None, None, 1)
    assert found.note == "one seed gives no interval"
    assert paired_difference({0: 0.5, 1: 0.5}, {0: 0.25, 1: 0.2}).note == ""


def test_the_first_evaluation_that_reaches_a_score_counts_and_nothing_between_two():
    course = points([0.0, 0.2, 0.4, 0.3, 0.6])
    assert first_reaching(course, 0.21).samples == 200
    assert first_reaching(course, 0.2).samples == 100
    assert first_reaching(course, 0.61) is None


@given(COURSE, SHARE)
def test_reaching_is_that_of_a_plain_loop_in_any_order(scores, target):
    expected = None
    for number, score in enumerate(scores):
        if score >= target:
            expected = 100 * number
            break
    found = first_reaching(points(scores)[::-1], target)
    assert (found and found.samples) == expected


def test_effort_is_a_share_of_the_baselines_own():
    baseline = points([0.0, 0.1, 0.2, 0.3, 0.4])
    quick = points([0.0, 0.3, 0.5], seconds=3.0)
    assert effort_to_match(quick, baseline) == (0.5, 0.75)


def test_a_baseline_that_had_its_score_before_its_end_is_not_counted_to_its_end():
    assert effort_to_match(points([0.0, 0.4]), points([0.0, 0.4, 0.5, 0.4])) == (1.0, 1.0)


def test_effort_without_a_clock_has_samples_only():
    arm = [Point(100, None, 0.5)]
    assert effort_to_match(arm, points([0.0, 0.1, 0.2])) == (0.5, None)


@pytest.mark.parametrize(
    ("arm", "baseline"),
    [([0.0, 0.1], [0.0, 0.2]), ([0.5], []), ([0.5], [0.4, 0.3]), ([nan], [0.0, 0.1]), ([], [0.0, 0.1])],
)
def test_what_is_never_reached_or_never_trained_for_has_no_effort(arm, baseline):
    assert effort_to_match(points(arm), points(baseline)) is None


@given(COURSE)
def test_a_run_takes_as_long_as_itself(scores):
    found = effort_to_match(points(scores), points(scores))
    assert found is None or found == (1.0, 1.0)
