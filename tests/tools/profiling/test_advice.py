"""The notes on a plan."""

import json
from pathlib import Path

import pytest

from fastclip.tools.profiling.network import ERRORS
from tests.tools.profiling.plans import MODEL, advice_on, as_json, write_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    return write_recipe(tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("recipe")
def test_the_exchange_matters_with_a_large_batch_and_not_with_a_small_one():
    small, large = (advice_on(nodes="2,8", compute_ms=50, batch_per_gpu=b) for b in (1, 512))
    assert "exchange negligible" in small
    assert "exchange matters" not in small
    assert large["exchange matters"].value == 8
    assert "exchange negligible" not in large


@pytest.mark.usefixtures("recipe")
def test_a_long_backward_pass_hides_all_that_can_hide_and_a_short_one_does_not():
    large_vocabulary = MODEL | {"text_cfg": MODEL["text_cfg"] | {"vocab_size": 100_000}}
    Path("larger-plan.json").write_text(json.dumps(large_vocabulary))  # 6.5 MB: two of DDP's buckets
    options = {"network": "10gbe", "nodes": "2,8", "batch_per_gpu": 8}
    long, short = (
        advice_on("--model.name=larger-plan.json", compute_ms=ms, **options) for ms in (5000, 0.01)
    )
    assert "backward pass long enough" in long
    assert "backward pass too short" not in long
    assert short["backward pass too short"].value == 2
    assert "backward pass long enough" not in short


@pytest.mark.usefixtures("recipe")
def test_a_single_bucket_of_gradients_does_not_hide():
    notes = advice_on(network="10gbe", nodes="2,8", batch_per_gpu=8, compute_ms=5000)
    assert "one bucket" in notes
    assert "backward pass long enough" not in notes


@pytest.mark.usefixtures("recipe")
def test_a_single_rank_has_no_exchange():
    notes = advice_on(nodes="1", gpus_per_node=1, compute_ms=50)
    assert not {"exchange", "break-even batch", "exchange matters", "exchange negligible"} & notes.keys()
    assert notes["gpus per node not measured"].value == 1


@pytest.mark.usefixtures("recipe")
def test_openclip_alone_is_not_compared():
    notes = advice_on(algorithm="openclip", compute_ms=50)
    assert not {"exchange", "break-even batch", "exchange matters", "exchange negligible"} & notes.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("recipe")
def test_an_automatic_micro_batch_is_announced_as_planned_whole():
    assert "micro-batch unknown" in advice_on("--batch.micro=auto")
    assert "micro-batch unknown" not in advice_on("--batch.micro=4")


def test_exchange_and_weights_are_equal_at_the_break_even_batch(recipe, capsys):
    note = advice_on(nodes="2")["break-even batch"]
    assert f"{note.value:,}" in note.text
    options = [*recipe, "--network=ib", "--nodes=2", f"--batch_per_gpu={note.value // 8}"]
    row = as_json(options, capsys)["rows"][0]
    assert row["sent"]["exchange"] == pytest.approx(row["sent"]["weights"], rel=0.05)


@pytest.mark.usefixtures("recipe")
def test_the_model_error_is_reported_with_every_estimated_time():
    text = advice_on(nodes="2", compute_ms=50)["model error"].text
    for size in (ERRORS.step_seen, ERRORS.step_unseen, ERRORS.ratio_unseen, ERRORS.ratio_one):
        assert f"{100 * size.mean:.1f} % (at most {100 * size.largest:.1f} %)" in text
    assert "model error" not in advice_on(nodes="2")
