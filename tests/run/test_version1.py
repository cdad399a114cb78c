"""A folder of schema 1, without run.json, can be resumed, evaluated, exported and reported.

folder-v1.tar.xz contains a run of fastclip-v2 over 12 steps, of which only the checkpoint of step 4 is left,
the pairs it was trained and evaluated on, and its full metrics.jsonl.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.errors import PathError
from fastclip.run.folder import SCHEMA, check_schema, read_metadata, read_run
from fastclip.run.load import load
from fastclip.run.metrics_file import read_metrics
from fastclip.training.trainer import OtherRun, open_folder

ARCHIVE = Path(__file__).with_name("folder-v1.tar.xz")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def records(path):
    return [{name: value for name, value in r.items() if name != "time"} for r in read_metrics(path)]


@pytest.mark.slow
def test_an_old_folder_resumes_to_the_same_numbers(folder):
    assert not (folder / "run.json").exists()
    assert [path.name for path in folder.glob("checkpoints/step-*/*.safetensors")] == [
        "worker-00000.safetensors"
    ]
    # that version computed the captions' padding; leaving it out changes the rounding, to which this model's
    # text tower of width 2 is very sensitive
    assert main(["train", "--config", "run/config.yaml", "--model.text_padding", "keep"]) == 0
    assert read_metadata(folder / "checkpoints" / "last")["step"] == 12
    assert json.loads((folder / "run.json").read_text())["schema"] == SCHEMA
    resumed, expected = records(folder / "metrics.jsonl"), records(Path("expected_metrics.jsonl"))
    assert len(resumed) == len(expected)
    for one, other in zip(resumed, expected, strict=True):
        evaluation, expected_evaluation = one.pop("evaluation", {}), other.pop("evaluation", {})
        one.pop("weight_norm", None)  # that version did not record it
        assert one == pytest.approx(other, rel=1e-4)  # rounding differs between processors
        assert evaluation == pytest.approx(expected_evaluation)


@pytest.mark.slow
def test_other_settings_are_still_refused(folder):
    config = resolve(parse(["--config", "run/config.yaml", "--loss.tau", "0.05"]))
    with pytest.raises(OtherRun) as caught:
        open_folder(config)
    assert [tuple(difference) for difference in caught.value.differences] == [("loss.tau", 0.1, 0.05)]
    assert main(["train", "--config", "run/config.yaml", "--loss.tau", "0.05"]) == 1
    assert not (folder / "run.json").exists()  # nothing was changed


def test_settings_of_another_version_are_refused(folder):
    state = folder / "checkpoints" / "step-00000004" / "state.json"
    saved = json.loads(state.read_text())
    saved["facts"]["config"]["log"]["colour"] = "blue"
    state.write_text(json.dumps(saved))
    with pytest.raises(PathError) as caught:
        open_folder(resolve(parse(["--config", "run/config.yaml"])))
    assert Path(caught.value.path) == folder / "checkpoints" / "step-00000004"
    assert "colour" in caught.value.problem
    assert main(["train", "--config", "run/config.yaml"]) == 1


@pytest.mark.slow
def test_an_old_folder_can_be_loaded_evaluated_exported_and_reported(folder, capsys):
    features = load(folder).encode_text("colour number 3")
    assert torch.isfinite(features).all()
    assert main(["eval", "run", "--tasks", "held-out.tar", "--workers", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["error"] == ""
    assert main(["export", "run", "exported"]) == 0
    assert torch.equal(load("exported").encode_text("colour number 3"), features)
    assert main(["report", "run", "--workers", "0"]) == 0
    run = read_run(folder)
    assert (run.config.algorithm, run.step, len(run.results)) == ("fastclip-v2", 12, 1)


def test_a_folder_of_a_later_schema_is_refused(folder):
    (folder / "run.json").write_text(json.dumps({"schema": SCHEMA + 1}))
    with pytest.raises(PathError) as caught:
        check_schema(folder)
    assert caught.value.path == str(folder)
    assert main(["train", "--config", "run/config.yaml"]) == 1
    assert main(["eval", "run", "--tasks", "held-out.tar"]) == 1
