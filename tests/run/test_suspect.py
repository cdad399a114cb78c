import torch

from fastclip.run.checkpoint import Checkpoints
from fastclip.run.state_file import STATE, read_metadata
from fastclip.run.suspect import newest_trusted


def save(checkpoints, step, suspect=None):
    return checkpoints.save(step, {"a": torch.ones(1)}, {"step": step, "suspect": suspect})


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def test_the_newest_checkpoint_that_is_not_suspect_is_never_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        save(checkpoints, step, "the loss is 9" if step > 3 else None)
    assert steps(tmp_path) == [3, 5, 6]
    assert checkpoints.newest_trusted() == newest_trusted(tmp_path) == tmp_path / "step-00000003"
    save(checkpoints, 7)  # the run has recovered
    assert steps(tmp_path) == [6, 7]
    assert newest_trusted(tmp_path) == tmp_path / "step-00000007"


def test_checkpoints_after_a_step_are_marked_and_load_as_before(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.mark_suspect(1, "the loss is 9")
    assert [read_metadata(path)["suspect"] for path in sorted(tmp_path.glob("step-*"))] == [
        None,
        "the loss is 9",
        "the loss is 9",
    ]
    assert newest_trusted(tmp_path) == tmp_path / "step-00000001"


def test_one_with_a_damaged_state_is_not_trusted_and_one_of_an_earlier_version_is(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    checkpoints.save(1, {"a": torch.ones(1)}, {"step": 1})
    damaged = save(checkpoints, 2)
    (damaged / STATE).write_text("{}")
    assert newest_trusted(tmp_path) == tmp_path / "step-00000001"
    assert newest_trusted(tmp_path / "none") is None
