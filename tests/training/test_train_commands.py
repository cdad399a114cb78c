"""`fastclip export`: open_clip loads the trained model from the folder."""

import json
import shutil
from math import log

import open_clip
import pytest
import torch
from safetensors.torch import load_file

from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.training.evaluator import Evaluator
from fastclip.training.trainer import train as train_run
from tests.data.collections import picture
from tests.training.runs import Lab, final_state

ALONE = World(0, 1, 0, torch.device("cpu"), None)
MEAN, STD = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
IMAGES = [picture(i, size=(50, 40)) for i in range(3)]
CAPTIONS = ["a red thing", "a large flat thing number 7", "something else"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), epochs=1)


@pytest.fixture(scope="module")
def train(lab):
    """Train in this process with a high learning rate, once per algorithm; return the trainer."""
    done = {}

    def run(algorithm, **changed):
        if algorithm not in done:
            options = {"evaluate__every_epochs": 0.5, "checkpoint__every_steps": "null", "optim__lr": 0.01}
            options |= {"batch__reference": 16} | changed
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
                config = resolve(parse(lab.options(lab.folder / algorithm, algorithm, **options)))
                done[algorithm] = train_run(config, ALONE)
        return done[algorithm]

    return run


def features(clip, preprocess, tokenizer):
    clip.eval()
    images, tokens = torch.stack([preprocess(image) for image in IMAGES]), tokenizer(CAPTIONS)
    with torch.no_grad():
        return clip.encode_image(images, normalize=True), clip.encode_text(tokens, normalize=True)


def of_folder(folder):
    """Features and model, loaded by open_clip alone."""
    clip, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    return features(clip, preprocess, open_clip.get_tokenizer(f"local-dir:{folder}")), clip


def own_log_scale(trainer):
    """log(1/τ), from the tensor in which the algorithm stores τ."""
    state = final_state(trainer.folder)
    if "loss.tau" in state:  # one per image and text
        assert state["loss.tau"].shape == (96, 2)
        assert state["loss.tau"].std() > 0
        return -log(state["loss.tau"].double().mean())
    return state["loss.log_scale" if "loss.log_scale" in state else "model.clip.logit_scale"].item()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fastclip-v3", "fastclip-v2", "openclip", "sogclr"])
def test_open_clip_loads_the_trained_model_from_an_export_and_from_the_run(
    algorithm, train, tmp_path, capsys
):
    # with v2's ρ by rule, every τ of so short a run would move in the same direction
    trainer = train(algorithm, **({"loss__rho": 1.6} if algorithm == "fastclip-v2" else {}))
    assert main(["export", str(trainer.folder), str(tmp_path / "out")]) == 0
    assert str(tmp_path / "out") in capsys.readouterr().out
    towers = trainer.train_step.towers
    expected = features(towers.clip, towers.eval_transform(), towers.tokenizer())
    for folder in (tmp_path / "out", trainer.folder / "model"):
        found, clip = of_folder(folder)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        assert clip.logit_scale.item() == pytest.approx(own_log_scale(trainer), rel=1e-6)
    start = {"openclip": 0.07}.get(algorithm, 0.1)
    assert (own_log_scale(trainer) == pytest.approx(-log(start))) == (algorithm == "sogclr")


def test_an_export_and_the_model_of_the_run_are_identical_files(train, tmp_path):
    run = train("fastclip-v2").folder
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 0  # replaces the first
    names = sorted(path.name for path in (run / "model").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in ("open_clip_model.safetensors", "open_clip_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run / "model" / name).read_bytes()


@pytest.mark.slow
def test_mean_and_deviation_of_pretrained_weights_are_exported(train, tmp_path, lab):
    first = tmp_path / "first"
    shutil.copytree(train("fastclip-v3").folder / "model", first)
    config = json.loads((first / "open_clip_config.json").read_text())
    config["preprocess_cfg"] |= {"mean": MEAN, "std": STD}
    (first / "open_clip_config.json").write_text(json.dumps(config))
    run = train("mbcl", model__pretrained=first, epochs=0.5).folder
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    _, clip = of_folder(tmp_path / "out")
    assert (clip.visual.preprocess_cfg["mean"], clip.visual.preprocess_cfg["std"]) == (MEAN, STD)


@pytest.mark.slow
def test_the_best_checkpoint_can_be_exported(train, tmp_path, monkeypatch):
    scores = [0.0, 0.9, 0.1]  # untrained, half of the epoch, the end
    monkeypatch.setattr(Evaluator, "measure", lambda self, *_: {"mean_recall@1": scores.pop(0)})
    run = train("fastclip-v1").folder
    for which in ("best", "last"):
        assert main(["export", str(run), str(tmp_path / which), "--checkpoint", which]) == 0
        name = (run / "checkpoints" / which).resolve().name
        assert name == {"best": "step-00000003", "last": "step-00000006"}[which]
        saved = load_file(run / "checkpoints" / name / "rank-00000.safetensors")
        exported = load_file(tmp_path / which / "open_clip_model.safetensors")
        weights = {key for key in exported if key != "logit_scale"}
        assert all(torch.equal(exported[key], saved[f"model.clip.{key}"]) for key in weights)


def test_a_failed_export_prints_one_line_and_writes_nothing(train, tmp_path, capsys):
    run = train("fastclip-v3").folder
    capsys.readouterr()  # what training printed
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    for source, target, path in (
        (tmp_path / "mine", tmp_path / "out", tmp_path / "mine"),
        (run, tmp_path / "mine", tmp_path / "mine"),
        (run, tmp_path / "mine" / "notes.txt", tmp_path / "mine" / "notes.txt"),
    ):
        assert main(["export", str(source), str(target)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"fastclip export: {path} ")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
