"""The model, fitted on tables."""

import pytest

from fastclip.tools.profiling.fitting import (
    error_table,
    fit,
    fitted,
    model_errors,
    ratio_table,
    timed_traffic,
)
from fastclip.tools.profiling.network import Hiding, Network, predict_step
from fastclip.tools.profiling.paper import paper_times

KNOWN = {
    "ib": Network("ib", pace=0.7, growth=0.1, inside=0.3),
    "slingshot-1": Network("slingshot-1", pace=0.3, growth=0.02, inside=0.04),
    "slingshot-2": Network("slingshot-2", pace=0.15, growth=0.05, inside=0.05),
}
KNOWN_HIDING = Hiding(0.65, 0.7)


def made_up_times():
    """The paper's tables, had its clusters been these."""
    for t in paper_times():
        step = predict_step(
            timed_traffic(t),
            t.nodes,
            KNOWN[t.network],
            KNOWN_HIDING,
            computation=t.computation,
            others=t.others,
        )
        yield t._replace(
            total=step.total, communication=step.communication, pure=step.pure, overlap=step.hidden
        )


def test_known_networks_are_found_again():
    found = fit(list(made_up_times()))
    assert found.networks.keys() == KNOWN.keys()
    for name, network in KNOWN.items():
        for value in ("pace", "growth", "inside"):
            assert getattr(found.networks[name], value) == pytest.approx(getattr(network, value), rel=1e-3), (
                name,
                value,
            )
    assert found.hiding == pytest.approx(KNOWN_HIDING, rel=1e-3)


def test_infiniband_with_its_old_gpus_is_the_slowest_cluster():
    networks = fitted().networks
    assert networks["ib"].pace > networks["slingshot-1"].pace > networks["slingshot-2"].pace > 0
    assert all(network.growth > 0 for network in networks.values())


def test_about_two_thirds_of_the_computation_can_hide_something():
    assert 0.6 < fitted().hiding.of_computation < 0.72
    assert 0.6 < fitted().hiding.of_weights < 0.9


def test_the_table_of_errors_has_24_cells_of_each_algorithm():
    cells = error_table()
    for algorithm in ("openclip", "fastclip-v3"):
        places = {(c.timing.table, c.timing.nodes) for c in cells if c.timing.algorithm == algorithm}
        assert len(places) == 24
    assert len(cells) == 48
    assert len(ratio_table()) == 24


def test_a_left_out_table_is_foretold_without_it():
    table = "time_laion400m_bigred"
    others = fit([t for t in paper_times() if t.table != table])
    (cell,) = [c for c in error_table() if c.timing[:5] == (table, *c.timing[1:3], 8, "openclip")]
    expected = others.networks["slingshot-2"].ms_per_megabyte(8) * timed_traffic(cell.timing).total / 1e6
    assert cell.unseen.communication == pytest.approx(expected)
    assert cell.unseen != cell.seen


def test_errors_are_as_small_as_the_documents_say():
    errors = model_errors()
    assert errors.step_seen.mean < 0.04
    assert errors.step_seen.largest < 0.10
    assert errors.step_unseen.mean < 0.06
    assert errors.step_unseen.largest < 0.14
    assert errors.ratio_unseen.mean < errors.ratio_one.mean  # or the model would know nothing of the exchange
    assert errors.ratio_unseen.largest < errors.ratio_one.largest


def test_errors_are_relative_to_what_was_measured():
    cell = error_table()[0]
    assert cell.seen.total == pytest.approx(cell.timing.total * (1 + cell.seen_error))
    ratio = ratio_table()[0]
    assert ratio.unseen == pytest.approx(ratio.measured * (1 + ratio.unseen_error))
