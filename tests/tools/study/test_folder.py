"""The state of a run follows from its newest complete checkpoint, model, scores and last failure."""

import json

import pytest

from fastclip.tools.study.folder import is_trained, state_of_run


def save(folder, step=30, **metadata):
    """A checkpoint of a run of 30 steps."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    config = {"epochs": 1.5, "batch": {"size": 5}}
    saved = {"step": step, "config": config, "num_samples": 102} | metadata
    (path / "state.json").write_text(json.dumps({"facts": saved, "files": {}}))


@pytest.fixture
def run(tmp_path):
    """A run that is trained but not scored."""
    save(tmp_path / "run")
    (tmp_path / "run" / "model").mkdir()
    return tmp_path / "run"


@pytest.fixture
def failure(tmp_path):
    (tmp_path / "run.failed").write_text("out of memory\n")
    return tmp_path / "run.failed"


def test_an_incomplete_checkpoint_does_not_count(run):
    assert is_trained(run)
    (run / "checkpoints" / "step-00000030").rename(run / "checkpoints" / "step-00000030.part")
    assert not is_trained(run)


def test_a_failure_counts_until_the_run_is_done(run, failure):
    assert state_of_run(run, failure) == ("done", "")
    assert state_of_run(run, failure, tests=True) == ("failed", "out of memory")
    (run / "evaluation").mkdir()
    (run / "evaluation" / "scores.json").write_text("{}")
    assert state_of_run(run, failure, tests=True) == ("done", "")


def test_a_damaged_checkpoint_is_reported_unless_there_is_a_failure(run, failure):
    (run / "checkpoints" / "step-00000030" / "state.json").write_text("{")
    assert state_of_run(run, failure) == ("failed", "out of memory")
    failure.unlink()
    state, error = state_of_run(run, failure)
    assert state == "unfinished"
    assert str(run / "checkpoints" / "step-00000030" / "state.json") in error
