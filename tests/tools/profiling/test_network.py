"""From bytes to milliseconds, on named networks and with ranges."""

import pytest
from benchmarks import plan_fit
from hypothesis import given
from hypothesis import strategies as st

from fastclip.tools.profiling.network import (
    CLUSTERS,
    ETHERNET,
    MEASURED,
    NETWORKS,
    Hiding,
    Network,
    bounds,
    check_network,
    line_behind,
    predict,
    predict_step,
)
from fastclip.tools.profiling.traffic import Traffic, step_traffic

HIDING = Hiding(0.6, 0.8)
CLUSTER = Network("cluster", pace=0.4, growth=0.1, inside=0.05)


def traffic(exchange=10e6, weights=500e6, buckets=5):
    return Traffic(exchange, 0.0, 0.0, weights, buckets)


def test_a_step_is_computed_by_hand():
    step = predict_step(traffic(), 4, CLUSTER, hiding=HIDING, computation=200.0, others=30.0)
    assert step.communication == pytest.approx(510 * 0.5)  # one doubling beyond two nodes
    assert step.hidden == pytest.approx(0.6 * 200)  # less than 0.8 of four fifths of the weights' 250 ms
    assert step.total == pytest.approx(200 + 30 + 255 - 120)


def test_little_communication_hides_but_for_its_end_and_the_exchange():
    step = predict_step(traffic(weights=50e6), 2, CLUSTER, hiding=HIDING, computation=200.0)
    assert step.hidden == pytest.approx(0.8 * 4 / 5 * 50 * 0.4)
    assert step.pure == pytest.approx((1 - 0.64) * 50 * 0.4 + 10 * 0.4)


def test_the_only_bucket_leaves_when_all_is_computed():
    step = predict_step(traffic(buckets=1), 2, CLUSTER, hiding=HIDING, computation=200.0)
    assert step.hidden == 0


def test_one_node_has_a_pace_of_its_own():
    assert CLUSTER.ms_per_megabyte(1) == 0.05
    assert CLUSTER.ms_per_megabyte(2) == 0.4


def test_a_line_takes_its_time_after_what_the_hosts_take():
    line = line_behind(1e9, CLUSTER, "line")
    step = predict_step(traffic(buckets=1), 4, line, hiding=HIDING, computation=0.0)
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
    def step(nodes=nodes, exchange=exchange, weights=weights):
        sent = traffic(exchange, weights)
        return predict_step(sent, nodes, CLUSTER, hiding=HIDING, computation=computation)

    assert 0 <= step().hidden <= step().communication
    assert step().total >= computation
    assert step(nodes=2 * nodes).total >= step().total
    assert step(exchange=exchange + 1e6).total > step().total
    assert step(weights=weights + 1e6).total > step().total


@given(nodes=st.integers(1, 1024))
def test_what_is_not_known_beyond_eight_nodes_lies_between_two_ways(nodes):
    ways = [CLUSTER.ms_per_megabyte(nodes, way) for way in ("no slower", "as before", "in a line")]
    assert ways == sorted(ways)
    assert nodes > 8 or len(set(ways)) == 1


def test_the_constants_are_the_fit_on_the_papers_tables():
    assert plan_fit.TOLERANCE <= 1e-6
    assert plan_fit.differences() == []
    assert CLUSTERS.keys() == MEASURED.keys() == plan_fit.fitted().networks.keys()


def predicted(network, nodes, error=0.1, algorithm="fastclip-v3"):
    sent = step_traffic(
        algorithm, workers=4 * nodes, local_batch=128, features=512, trained_bytes=400_000_000
    )
    return predict(sent, nodes, bounds(network), computation=300.0, others=20.0, error=error)


def width(prediction):
    return (prediction.high - prediction.low) / prediction.step.total


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("nodes", [1, 2, 8, 64])
def test_the_range_holds_the_likely_step_and_never_beats_computation(name, nodes):
    found = predicted(name, nodes)
    assert 320.0 <= found.low <= found.step.total <= found.high


def test_a_faster_line_is_faster_in_every_respect():
    slow, middle, fast = (predicted(name, 4) for name in ("10gbe", "25gbe", "100gbe"))
    for value in (lambda p: p.low, lambda p: p.step.total, lambda p: p.high):
        assert value(slow) > value(middle) > value(fast)


def test_a_line_used_to_the_full_bounds_ethernet():
    best = bounds("10gbe").fast
    assert best.bits_per_second == pytest.approx(10e9)
    assert best.growth == 0


def test_a_measured_cluster_is_the_fitted_one():
    assert bounds("ib").likely == CLUSTERS["ib"]


def test_what_nobody_measured_has_a_wider_range():
    assert width(predicted("25gbe", 4)) > width(predicted("slingshot-2", 4))
    assert width(predicted("ib", 32)) > width(predicted("ib", 8))


def test_the_models_own_error_widens_the_range():
    assert width(predicted("ib", 8, error=0.2)) > width(predicted("ib", 8, error=0.1))


def test_an_unknown_network_is_told_with_the_known_ones():
    with pytest.raises(ValueError, match=r"--network 10gb is unknown. Did you mean 10gbe\?") as error:
        check_network("10gb")
    assert all(name in str(error.value) for name in (*ETHERNET, *MEASURED))
