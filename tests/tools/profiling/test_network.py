"""From bytes to milliseconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.tools.profiling.network import Hiding, Network, line_behind, predict_step
from fastclip.tools.profiling.traffic import Traffic

HIDING = Hiding(0.6, 0.8)
CLUSTER = Network("cluster", pace=0.4, growth=0.1, inside=0.05)


def traffic(exchange=10e6, weights=500e6, buckets=5):
    return Traffic(exchange, 0.0, 0.0, weights, buckets)


def test_a_step_is_computed_by_hand():
    step = predict_step(traffic(), 4, CLUSTER, HIDING, computation=200.0, others=30.0)
    assert step.communication == pytest.approx(510 * 0.5)  # one doubling beyond two nodes
    assert step.hidden == pytest.approx(0.6 * 200)  # less than 0.8 of four fifths of the weights' 250 ms
    assert step.total == pytest.approx(200 + 30 + 255 - 120)


def test_little_communication_hides_but_for_its_end_and_the_exchange():
    step = predict_step(traffic(weights=50e6), 2, CLUSTER, HIDING, computation=200.0)
    assert step.hidden == pytest.approx(0.8 * 4 / 5 * 50 * 0.4)
    assert step.pure == pytest.approx((1 - 0.64) * 50 * 0.4 + 10 * 0.4)


def test_the_only_bucket_leaves_when_all_is_computed():
    step = predict_step(traffic(buckets=1), 2, CLUSTER, HIDING, computation=200.0)
    assert step.hidden == 0


def test_one_node_has_a_pace_of_its_own():
    assert CLUSTER.ms_per_megabyte(1) == 0.05
    assert CLUSTER.ms_per_megabyte(2) == 0.4


def test_a_line_takes_its_time_after_what_the_hosts_take():
    line = line_behind(1e9, CLUSTER, "line")
    step = predict_step(traffic(buckets=1), 4, line, HIDING, computation=0.0)
    assert step.total == pytest.approx(510e6 * 8 / 1e9 * 1000 + 510 * 0.5)
    assert line.ms_per_megabyte(1) == CLUSTER.inside


@given(
    nodes=st.integers(2, 512),
    exchange=st.floats(0, 1e9),
    weights=st.floats(0, 1e10),
    computation=st.floats(0, 1e4),
)
def test_a_step_grows_with_nodes_and_bytes_and_hides_no_more_than_there_is(
    nodes, exchange, weights, computation
):
    def total(nodes=nodes, exchange=exchange, weights=weights):
        return predict_step(traffic(exchange, weights), nodes, CLUSTER, HIDING, computation=computation).total

    step = predict_step(traffic(exchange, weights), nodes, CLUSTER, HIDING, computation=computation)
    assert 0 <= step.hidden <= step.communication
    assert step.total >= computation
    assert total(nodes=2 * nodes) >= total()
    assert total(exchange=exchange + 1e6) > total()
    assert total(weights=weights + 1e6) > total()


@given(nodes=st.integers(1, 1024))
def test_what_is_not_known_beyond_eight_nodes_lies_between_two_ways(nodes):
    ways = [CLUSTER.ms_per_megabyte(nodes, way) for way in ("no slower", "as before", "in a line")]
    assert ways == sorted(ways)
    assert nodes > 8 or len(set(ways)) == 1
