"""What a plan means."""

import json
from pathlib import Path

import pytest

from tests.tools.profiling.plans import MODEL, as_json, write_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    return write_recipe(tmp_path, monkeypatch)


def test_a_small_batch_does_not_need_our_exchange_and_a_large_one_does(recipe, capsys):
    words = [*recipe, "--network=ib", "--nodes=2,8", "--compute-ms=50"]
    small, large = (as_json([*words, f"--batch-per-gpu={b}"], capsys)["sentences"] for b in (1, 512))
    assert any("FastCLIP's exchange does not matter" in sentence for sentence in small)
    assert any("there FastCLIP's exchange matters" in sentence for sentence in large)


def test_long_computation_hides_all_that_can_hide_and_short_does_not(recipe, capsys):
    with_many_words = MODEL | {"text_cfg": MODEL["text_cfg"] | {"vocab_size": 100_000}}
    Path("larger-plan.json").write_text(json.dumps(with_many_words))  # 6.5 MB: two of DDP's buckets
    words = [*recipe, "--network=10gbe", "--nodes=2,8", "--batch-per-gpu=8", "--model.name=larger-plan.json"]
    long, short = (as_json([*words, f"--compute-ms={ms}"], capsys)["sentences"] for ms in (5000, 0.01))
    assert any("long enough at every size" in sentence for sentence in long)
    assert any("From 2 nodes on the backward pass is too short" in sentence for sentence in short)


def test_one_bucket_of_gradients_hides_behind_nothing(recipe, capsys):
    words = [*recipe, "--network=10gbe", "--nodes=2,8", "--batch-per-gpu=8", "--compute-ms=5000"]
    told = as_json(words, capsys)["sentences"]
    assert any("one of DDP's buckets" in sentence for sentence in told)
    assert not any("long enough" in sentence for sentence in told)


def test_a_worker_alone_has_nothing_to_exchange(recipe, capsys):
    words = [*recipe, "--network=ib", "--nodes=1", "--gpus-per-node=1", "--compute-ms=50"]
    told = " ".join(as_json(words, capsys)["sentences"])
    assert "OpenCLIP's features" not in told
    assert "All measured nodes had 4 GPUs: with 1 the range may be too narrow." in told


def test_openclip_alone_is_not_compared(recipe, capsys):
    told = " ".join(as_json([*recipe, "--network=ib", "--algorithm=openclip"], capsys)["sentences"])
    assert "FastCLIP's exchange" not in told


def test_exchange_and_weights_are_equal_at_the_batch_that_is_named(recipe, capsys):
    found = as_json([*recipe, "--network=ib", "--nodes=2"], capsys)
    (told,) = [s for s in found["sentences"] if "would be as large" in s]
    equal = int(told.partition("at a batch of ")[2].partition(" ")[0].replace(",", ""))
    row = as_json([*recipe, "--network=ib", "--nodes=2", f"--batch-per-gpu={equal // 8}"], capsys)["rows"][0]
    assert row["sent"]["exchange"] == pytest.approx(row["sent"]["weights"], rel=0.05)
