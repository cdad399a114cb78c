"""Reading a run's folder: it gives the trained model, and never executes code planted in it."""

import json
import os
import pickle
import shutil
from math import exp
from pathlib import Path

import pytest
import torch

from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.run.folder import MissingCheckpoint, evaluation_pairs, find_checkpoint, formats_of
from fastclip.run.load import load_model
from fastclip.training.trainer import train as train_run
from tests.training.runs import Lab

ALONE = World(0, 1, 0, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), epochs=1)


@pytest.fixture(scope="module")
def train(lab):
    """Train in this process; return the trainer in its final state."""

    def run(name, algorithm="fastclip-v3", **changed):
        options = {"evaluate__pairs": "null", "checkpoint__every_steps": 3} | changed
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
            return train_run(resolve(parse(lab.options(lab.folder / name, algorithm, **options))), ALONE)

    return run


@pytest.fixture(scope="module")
def run(train):
    """The folder of a run of 6 steps, with checkpoints of steps 3 and 6."""
    return train("run").folder


# The model.


@pytest.mark.slow
def test_the_last_checkpoint_has_the_trained_model(train):
    trainer = train("last")
    model, tau = load_model(trainer.folder)
    assert not model.training
    for name, tensor in trainer.train_step.towers.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert tau == pytest.approx(exp(-trainer.train_step.loss.log_scale.item()), rel=1e-6)


@pytest.mark.slow
def test_a_float64_run_is_loaded_as_float32(train):
    trainer = train("double", precision="float64", epochs=0.5)
    model, tau = load_model(trainer.folder)
    trained = trainer.train_step.towers.state_dict()
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert all(torch.equal(tensor, trained[name].float()) for name, tensor in model.state_dict().items())
    assert tau == trainer.train_step.loss.mean_tau()


@pytest.mark.slow
def test_siglips_bias_and_scale_are_loaded_with_the_model(train):
    trainer = train("siglip", "siglip", optim__lr=0.1)
    model, tau = load_model(trainer.folder)
    assert tau is None
    assert model.clip.logit_bias.item() == trainer.train_step.towers.clip.logit_bias.item() != -10
    assert model.clip.logit_scale.item() == trainer.train_step.towers.clip.logit_scale.item()


@pytest.mark.slow
def test_a_temperature_beyond_its_limit_is_loaded_as_the_limit(train):
    """The last step may leave the range; the next one would have clamped it."""
    trainer = train("limit", loss__tau=0.0101, loss__rho=4, loss__tau_lr=0.5, epochs=0.2)
    assert exp(-trainer.train_step.loss.log_scale.item()) < 0.01
    assert load_model(trainer.folder)[1] == trainer.train_step.loss.mean_tau() == 0.01


@pytest.mark.slow
def test_a_missing_checkpoint_is_an_error_with_the_folder(run, tmp_path):
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    for folder, which in (
        (tmp_path / "none", "last"),
        (tmp_path, "best"),
        (tmp_path / "new", "last"),
        (run, "best"),
    ):
        with pytest.raises(MissingCheckpoint) as caught:
            load_model(folder, which)
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.path == str(folder)
        assert ("best" in caught.value.problem) == (folder == run)
    assert find_checkpoint(run, "last") == run / "checkpoints" / "step-00000006"


@pytest.mark.parametrize("link", ["missing", "step-00000003"])
def test_the_last_checkpoint_is_the_newest_one_whatever_a_killed_run_left(run, tmp_path, link):
    """A kill between the rename of a checkpoint and its link."""
    copy = Path(shutil.copytree(run, tmp_path / "copy", symlinks=True))
    (copy / "checkpoints" / "last").unlink()
    if link != "missing":
        (copy / "checkpoints" / "last").symlink_to(link)
    assert find_checkpoint(copy, "last") == copy / "checkpoints" / "step-00000006"
    (copy / "checkpoints" / "best").symlink_to("step-00000005")
    with pytest.raises(MissingCheckpoint) as caught:
        find_checkpoint(copy, "best")
    assert caught.value.path == str(copy)


# An untrusted folder.


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """A folder that exists once code from a file has run."""
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists()  # so execution would be noticed
    mark.rmdir()
    return mark


def poisons(mark):
    """Files that run code when they are unpickled, by pickle or by torch."""
    torch.save({"state_dict": {"weight": Evil(mark)}}, mark.with_name("torch.pt"))
    return {"pickle": pickle.dumps(Evil(mark), protocol=2), "torch": mark.with_name("torch.pt").read_bytes()}


@pytest.fixture
def poison(lab, run, mark, tmp_path, monkeypatch, capsys):
    """Plant a file in a copy of the run, export it and resume it; return exit codes and last lines."""
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])

    def put(file, kind):
        copy = tmp_path / "copy"
        shutil.copytree(run, copy, symlinks=True)
        checkpoint = (copy / "checkpoints" / "last").resolve()
        (checkpoint / file).write_bytes(poisons(mark)[kind])
        if file.endswith(".safetensors"):  # as in earlier versions: the sizes are right, there are no digests
            state = json.loads((checkpoint / "state.json").read_text())
            sizes = state["files"] | {file: (checkpoint / file).stat().st_size}
            (checkpoint / "state.json").write_text(json.dumps({"facts": state["facts"], "files": sizes}))
        resume = lab.options(copy, "fastclip-v3", evaluate__pairs="null", checkpoint__every_steps=3)
        outcomes = []
        for arguments in (["export", str(copy), str(tmp_path / "out")], ["train", *resume]):
            code = main(arguments)
            outcomes.append((code, "".join(capsys.readouterr().err.splitlines()[-1:])))
        return outcomes

    return put


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("file", ["state.json", "rank-00000.safetensors", "rank-00001.safetensors"])
def test_a_poisoned_checkpoint_is_refused_and_never_executed(file, kind, poison, mark):
    for code, line in poison(file, kind):
        assert code == 1
        assert f"step-00000006/{file} " in line
    assert not mark.exists()


@pytest.mark.slow
def test_the_file_that_torch_would_unpickle_is_not_read(poison, mark):
    for code, _ in poison(".metadata", "pickle"):
        assert code == 0
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_poisoned_pretrained_weights_are_never_executed(kind, lab, mark, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    for file in ("evil.pt", "evil.bin", "evil.safetensors", "folder/open_clip_pytorch_model.bin"):
        (tmp_path / file).write_bytes(poisons(mark)[kind])
        given = tmp_path / file if file.startswith("evil") else tmp_path / "folder"
        options = lab.options(tmp_path / "run", "fastclip-v3", model__pretrained=given)
        assert main(["train", *options]) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"{tmp_path / file} " in line
        assert not mark.exists()


def test_a_model_config_cannot_request_remote_code(lab, run, tmp_path, capsys):
    """transformers would run the code of a tokenizer if the config asked for it."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    config = json.loads((copy / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"] |= {
        "hf_tokenizer_name": "evil/tokenizer",
        "tokenizer_kwargs": {"trust_remote_code": True},
    }
    (copy / "open_clip_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.json").write_text(json.dumps(config["model_cfg"]))
    for arguments in (
        ["export", str(copy), str(tmp_path / "out")],
        ["train", *lab.options(tmp_path / "new", "fastclip-v3", model__name=tmp_path / "evil.json")],
    ):
        assert main(arguments) == 1
        assert "trust_remote_code" in capsys.readouterr().err.splitlines()[-1]


def test_the_formats_of_a_run_are_those_of_its_config(tmp_path):
    assert formats_of(tmp_path) == formats_of("ViT-B-32") == ()
    for text, formats in (
        ("data: {train: a}", ()),
        ("data: {formats: avif}", ("avif",)),
        ("data: {formats: [ppm, avif]}", ("ppm", "avif")),
        ("data: {formats: 3}", ()),
        ("[", ()),
    ):
        (tmp_path / "config.yaml").write_text(text)
        assert formats_of(str(tmp_path)) == formats


def test_evaluation_pairs_are_found_from_here_and_from_where_the_run_was_trained(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (tmp_path / "held-out.csv").write_text("filepath,title\na.png,a\n")
    (run / "config.yaml").write_text("out: runs/mine\nevaluate: {pairs: held-out.csv}\n")
    monkeypatch.chdir(tmp_path)
    assert evaluation_pairs(Path("runs/mine")).paths == ["held-out.csv"]
    monkeypatch.chdir(run)
    assert evaluation_pairs(run).paths == [str(tmp_path / "held-out.csv")]
    (tmp_path / "held-out.csv").unlink()
    assert evaluation_pairs(run).paths == [
        "held-out.csv"
    ]  # missing: errors about it name the path in the config
    (run / "config.yaml").write_text("out: runs/mine\nevaluate: {pairs: [a.tar, b.tar]}\n")
    assert evaluation_pairs(run).paths == ["a.tar", "b.tar"]
    (run / "config.yaml").write_text("evaluate: {pairs: null}\n")
    assert evaluation_pairs(run).paths == []
    columns = "data: {image_column: photo, caption_column: text, encoding: latin-1}"
    (run / "config.yaml").write_text(f"{columns}\nevaluate: {{pairs: a.csv}}\n")
    assert evaluation_pairs(run) == (["a.csv"], ("photo", "text", "latin-1"))
