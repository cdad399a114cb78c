"""The paper's tables as data."""

import pytest

from fastclip.config.parse import parse
from fastclip.tools.profiling.paper import GPUS_PER_NODE, MOST_NODES, SETTINGS, one_node, paper_times


def cell(table, nodes, algorithm):
    (found,) = [t for t in paper_times() if (t.table, t.nodes, t.algorithm) == (table, nodes, algorithm)]
    return found


def test_every_table_has_four_sizes_of_both_algorithms():
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
def test_figures_are_those_of_the_paper(table, nodes, algorithm, part, ms, sd):
    found = cell(table, nodes, algorithm)
    assert (getattr(found, part), found.sd[part]) == (ms, sd)


def test_parts_of_a_step_add_up():
    for t in paper_times():
        assert t.total == pytest.approx(t.computation + t.pure + t.others, abs=0.03), t
        assert t.communication == pytest.approx(t.pure + t.overlap, abs=0.03), t


def test_one_node_is_found_in_the_same_table():
    assert one_node(cell("time_cc12m", 8, "openclip")) == cell("time_cc12m", 1, "openclip")


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_those_of_the_recipes(name):
    config, setting = parse(["--config", name]), SETTINGS[name]
    assert config.model.name == setting.model
    assert config.batch.size == 2 * GPUS_PER_NODE * setting.local_batch  # the paper trained on two nodes
