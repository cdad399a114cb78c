"""The paper's tables as data, and the model of the network fitted on them."""

import pytest
from benchmarks import plan_fit
from benchmarks.plan_fit import (
    error_table,
    fit,
    fitted,
    model_errors,
    one_node,
    paper_times,
    ratio_table,
    timed_traffic,
)

from fastclip.tools.profiling.job import ONE_NODE
from fastclip.tools.profiling.network import CLUSTERS, MOST_NODES, Hiding, Network, predict_step

KNOWN = {
    "ib": Network("ib", pace=0.7, growth=0.1, inside=0.3),
    "slingshot-1": Network("slingshot-1", pace=0.3, growth=0.02, inside=0.04),
    "slingshot-2": Network("slingshot-2", pace=0.15, growth=0.05, inside=0.05),
}
KNOWN_HIDING = Hiding(0.65, 0.7)


def cell(table, nodes, algorithm):
    (timing,) = [t for t in paper_times() if (t.table, t.nodes, t.algorithm) == (table, nodes, algorithm)]
    return timing


def test_every_table_has_four_numbers_of_nodes_of_both_algorithms():
    places = [(t.table, t.nodes, t.algorithm) for t in paper_times()]
    assert len(places) == len(set(places)) == 64
    assert len({table for table, _, _ in places}) == 8
    assert {nodes for _, nodes, _ in places} == {1, 2, 4, MOST_NODES}
    assert {algorithm for _, _, algorithm in places} == {"openclip", "fastclip-v3"}


@pytest.mark.parametrize(
    ("table", "nodes", "algorithm", "part", "ms", "sd"),
    [
        ("time_cc3m", 1, "openclip", "total", 867.85, 11.04),
        ("time_cc3m", 8, "fastclip-v3", "communication", 675.43, 25.97),
        ("time_cc12m", 2, "openclip", "pure", 192.89, 129.45),
        ("time_cc12m", 4, "fastclip-v3", "computation", 892.72, 4.72),
        ("time_cc3m_delta", 2, "fastclip-v3", "overlap", 101.39, 0.04),
        ("time_cc12m_delta", 1, "fastclip-v3", "total", 329.86, 40.84),
        ("time_laion400m_delta", 8, "openclip", "others", 76.54, 2.76),
        ("time_cc3m_bigred", 4, "openclip", "pure", 62.29, 1.24),
        ("time_cc12m_bigred", 8, "openclip", "total", 387.59, 29.84),
        ("time_laion400m_bigred", 2, "fastclip-v3", "pure", 17.89, 0.62),
    ],
)
def test_times_are_those_of_the_paper(table, nodes, algorithm, part, ms, sd):
    timing = cell(table, nodes, algorithm)
    assert (getattr(timing, part), timing.sd[part]) == (ms, sd)


def test_parts_of_a_step_add_up():
    for t in paper_times():
        assert t.total == pytest.approx(t.computation + t.pure + t.others, abs=0.03), t
        assert t.communication == pytest.approx(t.pure + t.overlap, abs=0.03), t


def test_one_node_is_looked_up_in_the_same_table():
    assert one_node(cell("time_cc12m", 8, "openclip")) == cell("time_cc12m", 1, "openclip")


def test_times_on_one_node_in_the_package_are_those_of_the_paper():
    alone = {(t.table, t.recipe, t.network, t.algorithm): t for t in paper_times() if t.nodes == 1}
    assert len(alone) == 2 * len(ONE_NODE)
    for (recipe, network), (table, *times) in ONE_NODE.items():
        for algorithm, expected in zip(("openclip", "fastclip-v3"), times, strict=True):
            row = alone[table, recipe, network, algorithm]
            assert (row.computation, row.others) == expected


def made_up_times():
    """The paper's tables, as they would be on the KNOWN clusters."""
    for t in paper_times():
        step = predict_step(
            timed_traffic(t),
            t.nodes,
            KNOWN[t.network],
            computation=t.computation,
            others=t.others,
            hiding=KNOWN_HIDING,
        )
        yield t._replace(
            total=step.total, communication=step.communication, pure=step.pure, overlap=step.hidden
        )


def test_the_fit_recovers_known_networks():
    recovered = fit(list(made_up_times()))
    assert recovered.networks.keys() == KNOWN.keys()
    for name, network in KNOWN.items():
        for value in ("pace", "growth", "inside"):
            expected = pytest.approx(getattr(network, value), rel=1e-3)
            assert getattr(recovered.networks[name], value) == expected, (name, value)
    assert recovered.hiding == pytest.approx(KNOWN_HIDING, rel=1e-3)


def test_infiniband_with_its_older_gpus_is_the_slowest_cluster():
    networks = fitted().networks
    assert networks["ib"].pace > networks["slingshot-1"].pace > networks["slingshot-2"].pace > 0
    assert all(network.growth > 0 for network in networks.values())


def test_communication_hides_behind_about_two_thirds_of_the_computation():
    assert 0.6 < fitted().hiding.of_computation < 0.72
    assert 0.6 < fitted().hiding.of_weights < 0.9


def test_the_table_of_errors_has_24_cells_of_each_algorithm():
    cells = error_table()
    for algorithm in ("openclip", "fastclip-v3"):
        places = {(c.timing.table, c.timing.nodes) for c in cells if c.timing.algorithm == algorithm}
        assert len(places) == 24
    assert len(cells) == 48
    assert len(ratio_table()) == 24


def test_a_held_out_table_is_predicted_without_it():
    table = "time_laion400m_bigred"
    others = fit([t for t in paper_times() if t.table != table])
    (cell,) = [c for c in error_table() if c.timing[:5] == (table, *c.timing[1:3], 8, "openclip")]
    expected = others.networks["slingshot-2"].ms_per_megabyte(8) * timed_traffic(cell.timing).total / 1e6
    assert cell.unseen.communication == pytest.approx(expected)
    assert cell.unseen != cell.seen


def test_errors_are_as_small_as_documented():
    errors = model_errors()
    assert errors.step_seen.mean < 0.04
    assert errors.step_seen.largest < 0.10
    assert errors.step_unseen.mean < 0.06
    assert errors.step_unseen.largest < 0.14
    assert errors.ratio_unseen.mean < errors.ratio_one.mean  # or the model would be no better
    assert errors.ratio_unseen.largest < errors.ratio_one.largest


def test_errors_are_relative_to_the_measurement():
    cell = error_table()[0]
    assert cell.seen.total == pytest.approx(cell.timing.total * (1 + cell.seen_error))
    ratio = ratio_table()[0]
    assert ratio.unseen == pytest.approx(ratio.measured * (1 + ratio.unseen_error))


def test_a_constant_that_differs_from_the_fit_is_reported_with_both_values(monkeypatch):
    monkeypatch.setitem(CLUSTERS, "ib", CLUSTERS["ib"]._replace(pace=0.6))
    (difference,) = plan_fit.differences()
    assert all(fact in difference for fact in ('CLUSTERS["ib"].pace', "0.6,", "0.596"))
