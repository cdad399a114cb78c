"""`fastclip verify`: a run as it was written is fine, and every damaged file is named."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from fastclip.cli import main
from fastclip.errors import PathError
from fastclip.run.verify import verify_run
from tests.evaluation import replica
from tests.run.test_version1 import ARCHIVE


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return replica.tiny_run(tmp_path_factory.mktemp("verify"))


@pytest.fixture
def run(trained, tmp_path):
    copy = Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))
    (copy / "evaluation").mkdir(exist_ok=True)
    (copy / "evaluation" / "results.jsonl").write_text('{"task": "a", "scores": {}}\n')
    return copy


def states(run):
    return {finding.file: finding.state for finding in verify_run(run)}


def damaged(run):
    return [file for file, state in states(run).items() if state == "damaged"]


def newest(run):
    return (run / "checkpoints" / "last").resolve()


def test_every_file_of_a_finished_run_is_fine(run, capsys):
    found = states(run)
    assert set(found.values()) == {"fine"}
    links = {"checkpoints/last", "checkpoints/best"}
    unlisted = {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()} - found.keys()
    assert unlisted <= {"model/README.md"}
    assert links <= found.keys()
    assert main(["verify", str(run)]) == 0
    assert main(["verify", str(run), "--json"]) == 0
    printed = capsys.readouterr().out
    listed = json.loads(printed[printed.index("[\n") :])
    assert {row["file"]: row["state"] for row in listed} == found


def flip_in_the_middle(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/last/rank-00000.safetensors",
        "checkpoints/last/state.json",
        "model/open_clip_model.safetensors",
        "model/open_clip_model.pt",
    ],
)
def test_a_flipped_bit_is_found(run, name, capsys):
    file = (run / name).resolve()
    flip_in_the_middle(file)
    assert damaged(run) == [str(file.relative_to(run))]
    assert main(["verify", str(run)]) == 1
    assert str(file.relative_to(run)) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", "{"),
        ("open_clip_config.json", '{"model_cfg": '),
        ("config.yaml", "batch: [\n"),
        ("metrics.jsonl", '{"step": 1, "epoch": 0.1}\nnot a record\n{"step": 2, "epoch": 0.2}\n'),
        ("metrics.jsonl", '{"step": 7, "epoch": 0.1}\n{"step": 2, "epoch": 0.2}\n'),
        ("evaluation/results.jsonl", "[1]\n\n"),
        ("model/open_clip_config.json", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_found(run, name, content):
    (run / name).write_text(content)
    assert damaged(run) == [name]


def test_a_config_that_is_not_the_checkpoints_is_found(run):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("size: 30", "size: 31"))
    assert damaged(run) == ["config.yaml"]


def test_an_incomplete_last_line_is_left_by_a_kill_and_no_damage(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')
    assert damaged(run) == []


def test_stale_links_are_found(run):
    checkpoints = run / "checkpoints"
    shutil.copytree(newest(run), checkpoints / "step-00000001")
    for link in ("last", "best"):
        (checkpoints / link).unlink()
    (checkpoints / "last").symlink_to("step-00000001")
    (checkpoints / "best").symlink_to("step-00000003")
    assert {"checkpoints/last", "checkpoints/best"} < set(damaged(run))
    assert "checkpoints/step-00000001/state.json" in damaged(run)  # a copy under another step's name


def test_missing_files_and_checkpoints_set_aside_are_listed(run):
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000009.damaged").mkdir()
    (checkpoints / "step-00000009.part").mkdir()
    found = states(run)
    assert found["checkpoints/step-00000009.damaged"] == found["checkpoints/step-00000009.part"] == "unknown"
    assert damaged(run) == []
    file = newest(run) / "rank-00000.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert damaged(run) == [str(file.relative_to(run))]
    file.unlink()
    assert damaged(run) == [str(file.relative_to(run))]


def test_a_folder_of_an_earlier_version_has_no_digests_and_is_not_damaged(tmp_path, monkeypatch):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    found = {finding.file: finding for finding in verify_run(Path("run"))}
    weights = found["checkpoints/step-00000004/worker-00000.safetensors"]
    assert weights.state == "unknown"
    assert "no digest" in weights.about
    assert [name for name, finding in found.items() if finding.state == "damaged"] == []
    assert main(["verify", "run"]) == 0


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(PathError) as caught:
        verify_run(tmp_path)
    assert caught.value.path == str(tmp_path)
