"""Learning rates: the cosine is as before; up to the decay, others do not depend on the run's length."""

from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.optim import learning_rate
from fastclip.rate_schedule import RateSchedule

PEAK = 0.3


def rates(schedule):
    return [schedule(step) for step in range(schedule.total)]


@given(total=st.integers(1, 300), warmup=st.integers(0, 40), min_lr=st.floats(0, 0.1))
def test_the_cosine_has_the_same_bits_as_before(total, warmup, min_lr):
    schedule = RateSchedule(PEAK, warmup, total, "cosine", min_lr=min_lr)
    options = {"peak": PEAK, "warmup": warmup, "total": total, "min_lr": min_lr}
    assert rates(schedule) == [learning_rate(step, **options) for step in range(total)]


@given(
    total=st.integers(1, 200),
    longer=st.integers(0, 200),
    warmup=st.integers(0, 40),
    share=st.floats(0.01, 0.99),
    kinds=st.sampled_from([("constant", "wsd"), ("wsd", "wsd"), ("constant", "constant")]),
)
def test_two_lengths_have_the_same_rates_up_to_the_first_decay(total, longer, warmup, share, kinds):
    one = RateSchedule(PEAK, warmup, total, kinds[0], share)
    other = RateSchedule(PEAK, warmup, total + longer, kinds[1], share, min_lr=0.01)
    common = min(one.decay_from, other.decay_from)
    assert rates(one)[:common] == rates(other)[:common]
    if kinds == ("wsd", "wsd"):
        assert one.decay_from <= other.decay_from


@given(total=st.integers(1, 300), warmup=st.integers(0, 40), share=st.floats(0.01, 0.99))
def test_wsd_warms_up_stays_and_falls(total, warmup, share):
    schedule = RateSchedule(PEAK, warmup, total, "wsd", share, min_lr=0.01)
    start, found = schedule.decay_from, rates(schedule)
    assert found[:warmup] == [PEAK * (step + 1) / warmup for step in range(min(warmup, total))]
    assert set(found[warmup:start]) <= {PEAK}
    assert all(a > b >= 0.01 for a, b in pairwise(found[start:]))
    assert start == total or found[start] == PEAK


def test_the_decay_takes_a_fifth_of_the_steps_as_one_minus_the_root():
    schedule = RateSchedule(PEAK, 10, 100, "wsd", min_lr=0.1)
    assert schedule.decay_from == 80
    expected = [0.1 + 0.2 * (1 - sqrt(step / 20)) for step in range(20)]
    assert rates(schedule)[80:] == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("kind", "total", "warmup", "decay_from"),
    [
        ("cosine", 100, 10, 10),
        ("constant", 100, 10, 100),
        ("wsd", 100, 10, 80),
        ("wsd", 1, 0, 0),  # at least one step is lower
        ("wsd", 100, 90, 90),  # the warm-up has priority
        ("wsd", 5, 90, 5),
    ],
)
def test_the_first_step_that_depends_on_the_length(kind, total, warmup, decay_from):
    assert RateSchedule(PEAK, warmup, total, kind).decay_from == decay_from


def test_a_constant_rate_never_falls():
    assert rates(RateSchedule(PEAK, 0, 50, "constant")) == [PEAK] * 50
