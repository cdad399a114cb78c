"""Runs with LoRA: killed and resumed bit for bit, small checkpoints, and exports without adapters."""

import random

import open_clip
import pytest
import torch

from fastclip.cli import main
from fastclip.errors import PathError
from fastclip.lora import is_adapter
from fastclip.model import build_model
from fastclip.run.folder import find_checkpoint, read_metadata
from fastclip.run.load import load
from fastclip.training.export import export
from tests.training.runs import Lab, assert_same_run, final_state

LORA = {"model__lora": "{rank: 2, alpha: 4}", "optim__layer_decay": 0.5, "optim__text_lr": 1e-4}
TEXTS = ["a red thing", "a small blue thing number 7"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lora"), epochs=2)


@pytest.fixture(scope="module")
def start(lab):
    """Pretrained weights in a folder."""
    return export(build_model(str(lab.model), device="cpu", seed=7), lab.folder / "start", tau=0.07)


@pytest.fixture(scope="module")
def run(lab, start):
    """The folder of an undisturbed run of 12 steps."""
    lab.start(lab.folder / "run", model__pretrained=start, **LORA).finish()
    return lab.folder / "run"


@pytest.mark.slow
def test_a_run_killed_and_resumed_ends_like_an_uninterrupted_one(lab, start, run, tmp_path):
    for moment in ("step", "save"):
        killed = lab.start(tmp_path / "run", model__pretrained=start, **LORA)
        killed.kill_during(moment, random.Random(moment))
    lab.start(tmp_path / "run", model__pretrained=start, **LORA).finish()
    assert_same_run(tmp_path / "run", run)


@pytest.mark.slow
def test_two_ranks_train_the_adapters_alike(lab, start, tmp_path):
    lab.start(tmp_path / "run", 2, model__pretrained=start, **LORA).finish()
    loaded = load(tmp_path / "run")
    assert loaded.towers.adapted == ["image", "text"]


@pytest.mark.slow
def test_a_checkpoint_has_adapters_and_projections_and_their_moments_only(run, start):
    tensors = final_state(run)
    weights = {name for name in tensors if name.startswith("model.")}
    assert {name for name in weights if not is_adapter(name)} == {
        "model.clip.text_projection",
        "model.clip.visual.proj",
        "model.clip.logit_scale",
    }
    moments = {name.removeprefix("optimizer.").rpartition(".")[0] for name in tensors if "optimizer." in name}
    assert moments == weights - {"model.clip.logit_scale"} | {"loss.log_scale"}
    record = read_metadata(find_checkpoint(run, "last"))["start"]
    assert record["source"] == str(start)


@pytest.mark.slow
def test_the_export_is_a_plain_model_with_the_features_of_the_adapted_one(run):
    adapted = load(run)
    plain = open_clip.create_model(f"local-dir:{run / 'model'}").eval()
    assert not any(is_adapter(name) for name in plain.state_dict())
    images = torch.randn(4, 3, 32, 32)
    tokens = adapted.towers.tokenizer()(TEXTS)
    with torch.no_grad():
        ours = adapted.towers(images, tokens)
        theirs = plain.encode_image(images, normalize=True), plain.encode_text(tokens, normalize=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_other_weights_at_the_start_are_refused_by_name(lab, start, run, capsys):
    away = start.with_name("away")
    export(build_model(str(lab.model), device="cpu", seed=8), away, tau=0.07)
    start.rename(start.with_name("kept"))
    away.rename(start)
    try:
        with pytest.raises(PathError) as caught:
            load(run)
        assert caught.value.path == str(start)
        assert main(["train", *lab.options(run, "fastclip-v3", model__pretrained=start, **LORA)]) == 1
        assert str(start) in capsys.readouterr().err
    finally:
        start.rename(away)
        start.with_name("kept").rename(start)
