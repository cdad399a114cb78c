"""A folder of the first schema, which has no run.json, resumes, evaluates, exports and is reported.

folder-v1.tar.xz holds a run of fastclip-v2 over 12 steps with all but its checkpoint of step 4 taken away,
the pairs it was trained and evaluated on, and what its whole metrics.jsonl was.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from fastclip.cli import main
from fastclip.run.folder import SCHEMA, check_schema, read_metadata, read_run
from fastclip.run.load import load
from fastclip.run.metrics_file import read_metrics

ARCHIVE = Path(__file__).with_name("folder-v1.tar.xz")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def records(path):
    return [{name: value for name, value in r.items() if name != "time"} for r in read_metrics(path)]


def test_it_resumes_to_the_same_numbers(folder):
    assert not (folder / "run.json").exists()
    assert main(["train", "--config", "run/config.yaml"]) == 0
    assert read_metadata(folder / "checkpoints" / "last")["step"] == 12
    assert json.loads((folder / "run.json").read_text())["schema"] == SCHEMA
    found, expected = records(folder / "metrics.jsonl"), records(Path("expected_metrics.jsonl"))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        evaluation, expected_evaluation = one.pop("evaluation", {}), other.pop("evaluation", {})
        assert one == pytest.approx(other, rel=1e-4)  # other processors round otherwise
        assert evaluation == pytest.approx(expected_evaluation)


def test_other_settings_are_still_refused(folder, capsys):
    assert main(["train", "--config", "run/config.yaml", "--loss.tau", "0.05"]) == 1
    assert "loss.tau: 0.1 there, 0.05 here" in capsys.readouterr().err
    assert not (folder / "run.json").exists()  # who is refused changes nothing


def test_settings_of_another_version_are_refused_with_the_folder_and_what_to_do(folder, capsys):
    state = folder / "checkpoints" / "step-00000004" / "state.json"
    saved = json.loads(state.read_text())
    saved["facts"]["config"]["log"]["colour"] = "blue"
    state.write_text(json.dumps(saved))
    assert main(["train", "--config", "run/config.yaml"]) == 1
    told = capsys.readouterr().err
    assert "colour" in told
    assert "step-00000004" in told
    assert "--out" in told


def test_it_is_loaded_scored_exported_and_reported(folder, capsys):
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
    with pytest.raises(ValueError, match="newer fastclip"):
        check_schema(folder)
    assert main(["train", "--config", "run/config.yaml"]) == 1
    assert main(["eval", "run", "--tasks", "held-out.tar"]) == 1
