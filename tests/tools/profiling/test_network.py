"""Step times from bytes, on named networks, with ranges."""

import pytest
from benchmarks import plan_fit
from hypothesis import given
from hypothesis import strategies as st

from fastclip.errors import OptionError
from fastclip.tools.profiling.network import (
    CLUSTERS,
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


def test_a_step_equals_the_formula_by_hand():
    step = predict_step(traffic(), 4, CLUSTER, hiding=HIDING, computation=200.0, others=30.0)
    assert step.communication == pytest.approx(510 * 0.5)  # one doubling beyond two nodes
    assert step.hidden == pytest.approx(0.6 * 200)  # less than 0.8 of four fifths of the weights' 250 ms
    assert step.total == pytest.approx(200 + 30 + 255 - 120)


def test_little_communication_hides_except_the_last_bucket_and_the_exchange():
    step = predict_step(traffic(weights=50e6), 2, CLUSTER, hiding=HIDING, computation=200.0)
    assert step.hidden == pytest.approx(0.8 * 4 / 5 * 50 * 0.4)
    assert step.pure == pytest.approx((1 - 0.64) * 50 * 0.4 + 10 * 0.4)


def test_a_single_bucket_does_not_hide():
    step = predict_step(traffic(buckets=1), 2, CLUSTER, hiding=HIDING, computation=200.0)
    assert step.hidden == 0


def test_one_node_has_its_own_pace():
    assert CLUSTER.ms_per_megabyte(1) == 0.05
    assert CLUSTER.ms_per_megabyte(2) == 0.4


def test_a_link_adds_its_time_to_that_of_the_hosts():
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
def test_the_pace_beyond_eight_nodes_is_between_flat_and_linear(nodes):
    paces = [CLUSTER.ms_per_megabyte(nodes, beyond) for beyond in ("flat", "logarithmic", "linear")]
    assert paces == sorted(paces)
    assert nodes > 8 or len(set(paces)) == 1


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
def test_the_range_contains_the_likely_step_and_is_above_computation(name, nodes):
    prediction = predicted(name, nodes)
    assert 320.0 <= prediction.low <= prediction.step.total <= prediction.high


def test_a_faster_link_lowers_the_likely_step_and_both_ends_of_its_range():
    slow, middle, fast = (predicted(name, 4) for name in ("10gbe", "25gbe", "100gbe"))
    for value in (lambda p: p.low, lambda p: p.step.total, lambda p: p.high):
        assert value(slow) > value(middle) > value(fast)


def test_the_fastest_ethernet_is_a_fully_used_link():
    best = bounds("10gbe").fast
    assert best.bits_per_second == pytest.approx(10e9)
    assert best.growth == 0


def test_a_measured_cluster_is_the_fitted_one():
    assert bounds("ib").likely == CLUSTERS["ib"]


def test_unmeasured_networks_and_sizes_have_a_wider_range():
    assert width(predicted("25gbe", 4)) > width(predicted("slingshot-2", 4))
    assert width(predicted("ib", 32)) > width(predicted("ib", 8))


def test_the_model_error_widens_the_range():
    assert width(predicted("ib", 8, error=0.2)) > width(predicted("ib", 8, error=0.1))


def test_an_unknown_network_is_an_error_that_lists_all_and_suggests_one():
    with pytest.raises(OptionError) as caught:
        check_network("10gb")
    assert (caught.value.option, caught.value.value) == ("network", "10gb")
    assert all(name in caught.value.rule for name in NETWORKS)
    assert "10gbe" in caught.value.advice
