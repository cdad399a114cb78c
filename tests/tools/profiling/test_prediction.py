"""Named networks, and ranges."""

import pytest

from fastclip.tools.profiling.fitting import fitted
from fastclip.tools.profiling.prediction import ETHERNET, MEASURED, NETWORKS, bounds, check_network, predict
from fastclip.tools.profiling.traffic import step_traffic


def foretold(network, nodes, error=0.1, algorithm="fastclip-v3"):
    sent = step_traffic(
        algorithm, workers=4 * nodes, local_batch=128, features=512, trained_bytes=400_000_000
    )
    known = bounds(network, fitted())
    return predict(sent, nodes, known, fitted(), error, computation=300.0, others=20.0)


def width(prediction):
    return (prediction.high - prediction.low) / prediction.step.total


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("nodes", [1, 2, 8, 64])
def test_the_range_holds_the_likely_step_and_never_beats_computation(name, nodes):
    found = foretold(name, nodes)
    assert 320.0 <= found.low <= found.step.total <= found.high


def test_a_faster_line_is_faster_in_every_respect():
    slow, middle, fast = (foretold(name, 4) for name in ("10gbe", "25gbe", "100gbe"))
    for value in (lambda p: p.low, lambda p: p.step.total, lambda p: p.high):
        assert value(slow) > value(middle) > value(fast)


def test_a_line_used_to_the_full_bounds_ethernet():
    best = bounds("10gbe", fitted()).fast
    assert best.bits_per_second == pytest.approx(10e9)
    assert best.growth == 0


def test_a_measured_cluster_is_the_fitted_one():
    assert bounds("ib", fitted()).likely == fitted().networks["ib"]


def test_what_nobody_measured_has_a_wider_range():
    assert width(foretold("25gbe", 4)) > width(foretold("slingshot-2", 4))
    assert width(foretold("ib", 32)) > width(foretold("ib", 8))


def test_the_models_own_error_widens_the_range():
    assert width(foretold("ib", 8, error=0.2)) > width(foretold("ib", 8, error=0.1))


def test_an_unknown_network_is_told_with_the_known_ones():
    with pytest.raises(ValueError, match=r"--network 10gb is unknown. Did you mean 10gbe\?") as error:
        check_network("10gb")
    assert all(name in str(error.value) for name in (*ETHERNET, *MEASURED))
