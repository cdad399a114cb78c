"""A new run from a checkpoint: exact with the same options, and only what has a meaning can be changed."""

import shutil

import pytest
import torch
import yaml

from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.errors import OptionError, UnknownOption
from fastclip.run.folder import MissingCheckpoint
from fastclip.run.start_from import CannotStart, parse_from
from fastclip.run.state_file import read_metadata
from tests.training.runs import Lab, final_state, metrics


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A finished run of 12 steps with checkpoints of steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("source")
    lab = Lab(folder / "lab", epochs=2)
    options = {"evaluate__pairs": "null", "data__workers": 0, "checkpoint__keep": 9}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCLIP_CACHE", str(folder / "cache"))
        assert main(["train", *lab.options(folder / "run", "fastclip-v3", **options)]) == 0
    return folder / "run"


@pytest.fixture
def train(source, monkeypatch, capsys):
    """`fastclip train`, and the last line of what it printed."""
    monkeypatch.setenv("FASTCLIP_CACHE", str(source.parent / "cache"))

    def run(*words):
        code = main(["train", *map(str, words)])
        return code, capsys.readouterr().err

    return run


def parsed(*words):
    return parse_from([str(word) for word in words])


@pytest.mark.slow
def test_with_no_option_changed_the_new_run_ends_like_the_old_one(source, train, tmp_path):
    first, out = source / "checkpoints" / "step-00000004", tmp_path / "new"
    assert train("--from", first, "--out", out)[0] == 0
    one, other = final_state(source), final_state(out)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics(out) == metrics(source)[4:]
    start = yaml.safe_load((out / "config.yaml").read_text())["start"]
    assert (start["checkpoint"], start["step"]) == (str(first), 4)
    assert train("--config", out / "config.yaml", "--out", tmp_path / "again")[0] == 0  # it repeats the run
    assert metrics(tmp_path / "again") == metrics(out)


@pytest.mark.slow
def test_a_started_run_resumes_with_the_same_command_even_if_the_source_is_gone(source, train, tmp_path):
    moved, out = tmp_path / "source", tmp_path / "new"
    shutil.copytree(source, moved, symlinks=True)
    shutil.rmtree(moved / "checkpoints" / "step-00000012")
    command = ["--from", moved, "--optim.lr", "1e-4", "--epochs", "3", "--out", out]
    assert train(*command)[0] == 0
    assert [record["step"] for record in metrics(out)] == list(range(9, 19))  # 6 steps more
    shutil.rmtree(moved)
    (out / "model").rename(out / "exported")
    assert train(*command)[0] == 0
    assert (out / "model").is_dir()
    code, error = train(*command[:2], "--optim.lr", "1e-3", "--epochs", "3", "--out", out)
    assert code == 1
    assert "optim.lr: 0.0001 in the run, 0.001 now" in error
    assert read_metadata(out / "checkpoints" / "last")["step"] == 18


def test_options_of_the_source_are_the_defaults_and_many_may_change(source, tmp_path):
    changes = ["--optim.lr", "1e-4", "--optim.clip", "0.5", "--precision", "bfloat16", "--loss.gamma", "0.5"]
    config = resolve(parsed("--from", source / "checkpoints" / "step-8", *changes, "--out", tmp_path / "new"))
    before = resolve(parse(["--config", str(source / "config.yaml")]))
    assert config.optim.lr == pytest.approx(1e-4 * before.batch.size / before.batch.reference)
    assert (config.optim.clip, config.precision, config.loss.gamma) == (0.5, "bfloat16", 0.5)
    assert (config.data, config.batch, config.model) == (before.data, before.batch, before.model)
    assert config.optim.weight_decay == before.optim.weight_decay
    assert (config.out, config.start.step) == (str(tmp_path / "new"), 8)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", 3),
        ("batch.size", 8),
        ("algorithm", "fastclip-v1"),
        ("optimizer", "lamb"),
        ("model.name", "vit-scenes"),
        ("model.freeze", "image"),
        ("loss.tau", 0.05),
        ("data.shuffle", "blocks"),
        ("precision", "float64"),
    ],
)
def test_what_the_checkpoint_determines_is_refused_by_name(source, tmp_path, option, value):
    with pytest.raises(CannotStart) as caught:
        parsed("--from", source / "checkpoints" / "step-8", f"--{option}", value, "--out", tmp_path / "new")
    assert [difference.option for difference in caught.value.differences] == [option]


def test_a_new_folder_and_steps_to_train_are_needed(source, tmp_path):
    first = source / "checkpoints" / "step-4"
    for words, option in (
        (["--from", first], "from"),
        (["--from", first, "--out", source], "out"),
        (["--from", source, "--out", tmp_path / "new"], "epochs"),  # it is finished
        (["--from", "--out", tmp_path / "new"], "from"),
    ):
        with pytest.raises(OptionError) as caught:
            parsed(*words)
        assert caught.value.option == option
    for missing in (tmp_path / "none", source / "checkpoints" / "step-5"):
        with pytest.raises(MissingCheckpoint):
            parsed("--from", missing, "--out", tmp_path / "new")


def test_other_commands_do_not_have_it():
    with pytest.raises(UnknownOption):
        parse(["--config", "scenes", "--from", "runs/mine"])
