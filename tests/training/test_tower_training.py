"""Runs of towers that others trained: they resume, evaluate, load and export without the towers' sources."""

import os
import shutil
from math import inf

import open_clip
import pytest
import torch

import fastclip
from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.errors import OptionError
from fastclip.run.folder import read_metadata
from fastclip.training.build import build_towers
from fastclip.training.trainer import train
from tests.towers.encoders import write_encoder
from tests.towers.test_timm_image import save_model
from tests.training.runs import Lab, assert_same_run, metrics

CAPTIONS = ["a red heart", "two very long dog"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"), epochs=2)
    write_encoder(lab.folder / "encoder", {"pooling_mode_mean_tokens": True}, hidden_dropout_prob=0.1)
    save_model(lab.folder / "vit.safetensors", "test_vit")
    return lab


def run_training(lab, out, **changed):
    towers = {
        "model__image": "timm:test_vit",
        "model__image_weights": lab.folder / "vit.safetensors",
        "model__text": f"hf:{lab.folder / 'encoder'}",
        "model__image_size": 32,
        "model__embed_dim": 24,
    }
    options = lab.options(out, "fastclip-v3", checkpoint__keep=5, **towers | changed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
        return train(resolve(parse(options)), World.alone())


@pytest.fixture(scope="module")
def reference(lab):
    """A run of 12 steps, whose sources are gone afterwards."""
    trainer = run_training(lab, lab.folder / "reference")
    for source in ("encoder", "vit.safetensors"):
        os.rename(lab.folder / source, lab.folder / f"{source}.gone")
    return trainer.folder


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_without_the_sources(lab, reference, tmp_path):
    run = shutil.copytree(reference, tmp_path / "run", symlinks=True)
    for step in (8, 12):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    shutil.rmtree(run / "model")
    run_training(lab, run)
    assert_same_run(run, reference)
    assert [record["step"] for record in metrics(run) if "loss" in record] == [*range(1, 13)]


@pytest.mark.slow
def test_a_new_run_needs_the_sources(lab, reference, tmp_path):
    with pytest.raises(OptionError) as caught:
        run_training(lab, tmp_path / "run")
    assert caught.value.option == "model.text"


@pytest.mark.slow
def test_a_run_its_export_and_plain_open_clip_are_one_model(lab, reference, tmp_path, monkeypatch, capsys):
    assert main(["export", str(reference), str(tmp_path / "export")]) == 0
    assert "local-dir:." in capsys.readouterr().out
    card = (tmp_path / "export" / "README.md").read_text()
    assert "inside this folder" in card
    assert "test_vit and encoder" in card
    assert str(lab.folder) not in card
    monkeypatch.chdir(tmp_path / "export")
    theirs = open_clip.create_model("local-dir:.").eval()
    tokens = open_clip.get_tokenizer("local-dir:.")(CAPTIONS)
    monkeypatch.chdir(tmp_path)
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = theirs.encode_image(images, normalize=True), theirs.encode_text(tokens, normalize=True)
        for source in (reference, reference / "model", tmp_path / "export"):
            model = fastclip.load(source)
            assert torch.equal(model.towers.clip.encode_image(images, normalize=True), expected[0])
            torch.testing.assert_close(model.encode_text(CAPTIONS), expected[1])


@pytest.mark.slow
def test_a_finish_at_full_size_starts_from_the_run(lab, reference, tmp_path):
    options = {"model__name": reference, "model__pretrained": reference, "model__image_size": 64}
    unset = {"model__image": "null", "model__text": "null", "model__image_weights": "own"}
    finished = run_training(lab, tmp_path / "full", epochs=1, model__embed_dim="null", **options | unset)
    towers = fastclip.load(finished.folder).towers
    assert (towers.image_size, towers.model_cfg["vision_cfg"]["image_size"]) == (64, 64)
    assert read_metadata(finished.folder / "checkpoints" / "last")["step"] == 6
    assert min(record["loss"] for record in metrics(finished.folder) if "loss" in record) < inf


@pytest.mark.slow
def test_weights_that_a_checkpoint_lacks_are_read_from_their_source_again(reference, monkeypatch):
    config = resolve(parse(["--config", str(reference / "config.yaml")]))
    whole = reference / "checkpoints" / "last"
    assert build_towers(config, World.alone(), whole).name.startswith("local-dir:")
    monkeypatch.setattr("fastclip.training.build.tensor_names", lambda checkpoint: {"model.clip.logit_scale"})
    with pytest.raises(OptionError) as caught:
        build_towers(config, World.alone(), whole)
    assert caught.value.option == "model.text"  # the source is gone
