"""Rows of a plan: each algorithm on each number of nodes."""

from itertools import pairwise

import pytest

from tests.tools.profiling.plans import advice_on, as_json, write_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    return write_recipe(tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_fixed_global_batch_is_divided_and_computation_scaled(recipe, capsys):
    options = [*recipe, "--network=ib", "--nodes=2,4", "--compute_ms=50", "--algorithm=mbcl"]
    two, four = as_json(options, capsys)["rows"]
    assert (two["local_batch"], four["local_batch"]) == (32, 16)
    assert (two["time"]["computation"], four["time"]["computation"]) == (50, 25)
    scaled = advice_on(nodes="2,4", compute_ms=50, algorithm="mbcl")
    assert scaled["computation scaled"].value == 32
    fixed = advice_on(nodes="2,4", compute_ms=50, algorithm="mbcl", batch_per_gpu=32)
    assert "computation scaled" not in fixed


def test_options_of_our_losses_do_not_affect_the_peers(recipe, capsys):
    options = [*recipe, "--network=ib", "--nodes=2", "--algorithm=openclip,fastclip-v3"]
    plain, short = (as_json([*options, *more], capsys) for more in ([], ["--loss.wire_dtype=float16"]))
    assert plain["rows"][0]["sent"] == short["rows"][0]["sent"]
    assert plain["rows"][1]["sent"]["features"] == 2 * short["rows"][1]["sent"]["features"]


def test_speed_up_is_over_one_node_even_if_it_is_not_planned(recipe, capsys):
    options = [*recipe, "--network=slingshot-1", "--batch_per_gpu=16", "--compute_ms=50", "--algorithm=mbcl"]
    one, two = as_json([*options, "--nodes=1,2"], capsys)["rows"]
    (alone,) = as_json([*options, "--nodes=2"], capsys)["rows"]
    assert one["time"]["speed_up"] == 1
    assert alone["time"] == two["time"]
    ratio = two["time"]["pairs_per_second"] / one["time"]["pairs_per_second"]
    assert two["time"]["speed_up"] == pytest.approx(ratio)


def test_more_nodes_send_more_and_take_longer_at_the_same_local_batch(recipe, capsys):
    options = [*recipe, "--network=ib", "--nodes=2,4,8,16", "--batch_per_gpu=16", "--compute_ms=5"]
    all_rows = as_json(options, capsys)["rows"]
    for algorithm in ("openclip", "fastclip-v3"):
        rows = [row for row in all_rows if row["algorithm"] == algorithm]
        for few, many in pairwise(rows):
            assert many["sent"]["total"] > few["sent"]["total"]
            assert many["time"]["step"] > few["time"]["step"]
            assert many["time"]["pairs_per_second"] > few["time"]["pairs_per_second"]
