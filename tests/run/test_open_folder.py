import shutil
from dataclasses import replace

import pytest
import torch

from fastclip.config.options import StartConfig
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.errors import OptionError, PathError
from fastclip.run.checkpoint import Checkpoints
from fastclip.run.open_folder import is_gone, open_start
from fastclip.run.start_from import tensors_digest
from fastclip.run.state_file import DamagedCheckpoint, read_state


def test_a_folder_without_its_settings_is_gone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert not is_gone(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert is_gone(tmp_path / "run")
    (tmp_path / "run").touch()
    assert is_gone(tmp_path / "run")


def test_the_checkpoint_to_start_from_must_be_the_one_that_was_chosen(tmp_path):
    path = Checkpoints(tmp_path).save(4, {"a": torch.ones(1)}, {"step": 4})
    config = resolve(parse(["--config", "scenes"]))
    assert open_start(config) is None
    start = StartConfig(str(path), 4, tensors_digest(read_state(path)))
    assert open_start(replace(config, start=start)) == path
    with pytest.raises(PathError) as other:
        open_start(replace(config, start=replace(start, digest="0" * 32)))
    assert other.value.path == str(path)
    (path / "rank-00000.safetensors").write_bytes(b"damaged")
    with pytest.raises(DamagedCheckpoint):
        open_start(replace(config, start=start))


def test_a_start_is_whole_or_absent():
    with pytest.raises(OptionError):
        StartConfig("runs/mine/checkpoints/step-00000004")
