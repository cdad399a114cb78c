"""Rows of a plan: each algorithm at each size."""

from itertools import pairwise

import pytest

from tests.tools.profiling.plans import as_json, write_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    return write_recipe(tmp_path, monkeypatch)


def test_a_fixed_global_batch_is_divided_and_computed_in_proportion(recipe, capsys):
    found = as_json([*recipe, "--network=ib", "--nodes=2,4", "--compute-ms=50", "--algorithm=mbcl"], capsys)
    two, four = found["rows"]
    assert (two["local_batch"], four["local_batch"]) == (32, 16)
    assert (two["time"]["computation"], four["time"]["computation"]) == (50, 25)
    assert any("taken in proportion" in sentence for sentence in found["sentences"])


def test_options_of_our_losses_do_not_trouble_the_peers(recipe, capsys):
    words = [*recipe, "--network=ib", "--nodes=2", "--algorithm=openclip,fastclip-v3"]
    plain, short = (as_json([*words, *more], capsys) for more in ([], ["--loss.wire_dtype=float16"]))
    assert plain["rows"][0]["sent"] == short["rows"][0]["sent"]
    assert plain["rows"][1]["sent"]["features"] == 2 * short["rows"][1]["sent"]["features"]


def test_speed_up_is_over_one_node_though_it_is_not_asked_for(recipe, capsys):
    words = [*recipe, "--network=slingshot-1", "--batch-per-gpu=16", "--compute-ms=50", "--algorithm=mbcl"]
    one, two = as_json([*words, "--nodes=1,2"], capsys)["rows"]
    (alone,) = as_json([*words, "--nodes=2"], capsys)["rows"]
    assert one["time"]["speed_up"] == 1
    assert alone["time"] == two["time"]
    ratio = two["time"]["pairs_per_second"] / one["time"]["pairs_per_second"]
    assert two["time"]["speed_up"] == pytest.approx(ratio)


def test_more_nodes_send_more_and_take_longer_at_the_same_local_batch(recipe, capsys):
    words = [*recipe, "--network=ib", "--nodes=2,4,8,16", "--batch-per-gpu=16", "--compute-ms=5"]
    found = as_json(words, capsys)["rows"]
    for algorithm in ("openclip", "fastclip-v3"):
        rows = [row for row in found if row["algorithm"] == algorithm]
        for few, many in pairwise(rows):
            assert many["sent"]["total"] > few["sent"]["total"]
            assert many["time"]["step"] > few["time"]["step"]
            assert many["time"]["pairs_per_second"] > few["time"]["pairs_per_second"]
