import errno
import json
import logging
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastclip.errors import InputError, PathError
from fastclip.files import file_digest
from fastclip.objective.exchange import Exchange
from fastclip.objective.sample_state import SampleState
from fastclip.objective.saved_state import sharded
from fastclip.run import checkpoint, tensor_writer
from fastclip.run.checkpoint import CheckpointError, Checkpoints, check, load, tensor_names
from fastclip.run.folder import read_metadata
from fastclip.run.state_file import DamagedCheckpoint, write_state
from fastclip.run.tensor_writer import OFFSETS
from tests.ranks import run_ranks


def tensors_of_every_kind():
    rows = torch.arange(24.0).reshape(4, 6)
    tied = torch.randn(7)
    tensors = {
        "not.contiguous": rows.t(),
        "slice": rows[1:3, 2:5],
        "expanded": torch.ones(1).expand(5),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "tied.a": tied,
        "tied.b": tied,
        "tied.part": tied[2:5],
        "no_rows": torch.zeros(0, 2),
        "number": torch.tensor(3.25),
        "count": torch.tensor(2**60 + 1),
        "flag": torch.tensor(True),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "not_finite": torch.tensor([-torch.inf, torch.nan, -0.0]),
    }
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.float64, torch.bfloat16, torch.float16):
        tensors[f"table.{dtype}"] = torch.randn(5, 3).mul(9).abs().to(dtype)
    return tensors


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(loaded, expected):
    assert loaded.keys() == expected.keys()
    for name in expected:
        assert loaded[name].dtype == expected[name].dtype
        assert loaded[name].shape == expected[name].shape
        assert bits(loaded[name]) == bits(expected[name]), name


def small(step):
    return {"weight": torch.full((50, 3), float(step)), "steps": torch.tensor(step)}


def assert_complete(path, step):
    loaded = {"weight": torch.zeros(50, 3), "steps": torch.tensor(0)}
    load(path, loaded)
    assert_same(loaded, small(step))
    assert read_metadata(path) == {"step": step}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_no_pickle(folder):
    for path in (path for path in folder.rglob("*") if path.is_file()):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                assert file.keys()
        else:
            assert path.name == "state.json"
            json.loads(path.read_text())


# A single rank


def test_every_kind_of_tensor_is_restored_bit_for_bit(tmp_path, recwarn):
    saved = tensors_of_every_kind()
    metadata = {"step": 12, "run": {"name": "τ", "values": [1.5, None, True]}}
    path = Checkpoints(tmp_path / "run" / "checkpoints").save(12, saved, metadata)
    loaded = {name: torch.empty_like(tensor).detach() for name, tensor in saved.items()}
    loaded["not.contiguous"] = torch.empty(4, 6).t()
    load(path, loaded)
    assert_same(loaded, saved)
    assert read_metadata(path) == metadata
    assert path.name == "step-00000012"
    assert_no_pickle(tmp_path)
    assert not recwarn.list


def test_a_parameter_is_filled_in_place(tmp_path):
    path = Checkpoints(tmp_path).save(1, {"w": torch.ones(3)}, {})
    weight = torch.nn.Parameter(torch.zeros(3))
    load(path, {"w": weight})
    assert weight.tolist() == [1, 1, 1]
    assert weight.requires_grad


def test_names_shapes_and_dtypes_can_be_read_without_the_tensors(tmp_path):
    saved = tensors_of_every_kind()
    path = Checkpoints(tmp_path).save(1, saved, {})
    assert tensor_names(path) == {name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()}


def test_a_part_of_a_checkpoint_can_be_loaded(tmp_path):
    path = Checkpoints(tmp_path).save(5, small(5), {})
    loaded = {"weight": torch.zeros(50, 3)}
    load(path, loaded)
    assert loaded["weight"].eq(5).all()


def test_files_are_named_after_ranks_and_older_names_load_as_well(tmp_path):
    path = Checkpoints(tmp_path).save(1, tensors_of_every_kind(), {"step": 1})
    state = json.loads((path / "state.json").read_text())
    assert list(state["files"]) == ["rank-00000.safetensors"]
    expected = load_all(path)
    (path / "rank-00000.safetensors").rename(path / "worker-00000.safetensors")
    sizes = {name.replace("rank-", "worker-"): size for name, size in state["files"].items()}
    (path / "state.json").write_text(json.dumps({"facts": state["facts"], "files": sizes}))
    assert_same(load_all(path), expected)
    assert read_metadata(path) == {"step": 1}


def load_all(path):
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in tensor_names(path).items()}
    load(path, tensors)
    return tensors


def test_the_newest_is_the_highest_complete_step(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    assert checkpoints.newest() is None
    for step in (9, 100_000_000, 20_000_000):
        checkpoints.save(step, small(step), {"step": step})
    for other in ("step-00000300.part", "step-00000300.old", "step-00000300", "step-x", "notes"):
        (tmp_path / other).mkdir()
    assert checkpoints.newest() == tmp_path / "step-100000000"


def test_links_are_relative_and_survive_a_move(tmp_path):
    checkpoints = Checkpoints(tmp_path / "here")
    for step in (1, 2):
        checkpoints.save(step, small(step), {"step": step})
    checkpoints.mark_best(1)
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert_complete(tmp_path / "there" / "last", 2)
    assert_complete(tmp_path / "there" / "best", 1)


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, small(step), {"step": step})
    assert checkpoints.best is None
    checkpoints.mark_best(1)
    for step in (3, 4, 5):
        checkpoints.save(step, small(step), {"step": step})
    assert names(tmp_path) == ["best", "last", "step-00000001", "step-00000004", "step-00000005"]
    assert checkpoints.best == tmp_path / "step-00000001"
    checkpoints.mark_best(4)
    assert names(tmp_path) == ["best", "last", "step-00000004", "step-00000005"]
    checkpoints.save(6, small(6), {"step": 6})
    assert names(tmp_path) == ["best", "last", "step-00000004", "step-00000005", "step-00000006"]


def test_the_last_saved_checkpoint_is_kept_even_if_there_are_higher_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(9, small(9), {})
    checkpoints.save(3, small(3), {"step": 3})
    assert_complete(tmp_path / "last", 3)


def test_a_step_without_a_checkpoint_cannot_be_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {})
    with pytest.raises(CheckpointError) as caught:
        checkpoints.mark_best(7)
    assert caught.value.step == 7
    assert checkpoints.best is None


def test_a_step_is_written_once(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, small(1), {"step": 1})
    before = (path / "state.json").stat().st_mtime_ns
    assert checkpoints.save(1, small(2), {"step": 2}) == path
    assert (path / "state.json").stat().st_mtime_ns == before
    assert_complete(path, 1)


def test_leftovers_of_killed_runs_are_deleted_at_the_next_save(tmp_path):
    leftovers = ["step-00000001.part", "step-00000001.part.old", "step-00000002.old", "step-00000003"]
    for name in leftovers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half of a file")
    path = Checkpoints(tmp_path).save(3, small(3), {"step": 3})
    assert names(tmp_path) == ["last", "step-00000003"]
    assert_complete(path, 3)


def test_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = Checkpoints(tmp_path).save(1, small(1), {})
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {"0o640"}


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(InputError) as caught:
        Checkpoints(tmp_path, keep=0)
    assert caught.value.argument == "keep"


# Kills and full disks


@pytest.mark.slow
def test_a_kill_before_any_change_of_the_folder_leaves_a_complete_checkpoint(tmp_path):
    """Save step after step in child processes, each killed one filesystem change later than the last."""
    checkpoints, change, published, finished = Checkpoints(tmp_path, keep=1), 0, 0, False
    checkpoints.save(1, small(1), {"step": 1})
    while not finished:
        before = int(checkpoints.newest().name[5:])
        finished = _save_in_child(checkpoints, before + 1, die_at=change)
        path = checkpoints.newest()
        after = int(path.name[5:])
        assert after in (before, before + 1)
        for complete in tmp_path.glob("step-" + "[0-9]" * 8):
            assert_complete(complete, int(complete.name[5:]))
        assert (tmp_path / "last").exists()
        published += after > before
        change += 1
    assert change > 10
    assert 3 < published < change - 3  # deaths on both sides of the rename
    assert names(tmp_path) == ["last", path.name]


def _save_in_child(checkpoints, step, die_at):
    """Save in a child that is killed before change number `die_at`; return whether it finished."""
    changes = 0

    def count(event, args):
        nonlocal changes
        changing = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod")
        if changing or (event == "open" and str(args[0]).endswith(("state.json", ".safetensors"))):
            if changes == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1

    child = os.fork()
    if child == 0:
        sys.addaudithook(count)
        checkpoint.os.fsync = lambda descriptor: None  # a kill does not wait for the disk
        checkpoints.save(step, small(step), {"step": step})
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_kill_in_the_middle_of_a_file_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {"step": 1})

    def write_half(tensors, file, metadata):
        Path(file).write_bytes(bytes(100))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(tensor_writer, "save_file", write_half)
    assert not _save_in_child(checkpoints, 2, die_at=-1)
    monkeypatch.undo()
    assert (tmp_path / "step-00000002.part" / "rank-00000.safetensors").stat().st_size == 100
    assert_complete(checkpoints.newest(), 1)
    assert_complete(checkpoints.save(2, small(2), {"step": 2}), 2)


def test_everything_is_on_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    synced, at_rename = [], []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(path, target):
        at_rename.append({file.stat().st_ino for file in (path, *path.iterdir())} <= set(synced))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    Checkpoints(tmp_path).save(1, small(1), {})
    assert at_rename == [True]
    assert synced[-1] == tmp_path.stat().st_ino  # the new names too


@contextmanager
def files_no_larger_than(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failed_write_leaves_the_previous_checkpoint_complete(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {"step": 1})
    big = {"weight": torch.zeros(1_000_000)}
    with files_no_larger_than(1_000_000), pytest.raises(CheckpointError) as caught:
        checkpoints.save(2, big, {"step": 2})
    assert (caught.value.step, caught.value.newest) == (2, tmp_path / "step-00000001")
    assert os.strerror(errno.EFBIG) in str(caught.value)
    assert names(tmp_path) == ["last", "step-00000001"]
    assert_complete(checkpoints.newest(), 1)
    checkpoints.save(2, big, {"step": 2})


def test_a_first_save_that_fails_has_no_checkpoint_to_resume_from(tmp_path):
    with files_no_larger_than(1000), pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).save(2, {"weight": torch.zeros(1000)}, {})
    assert (caught.value.step, caught.value.newest) == (2, None)
    assert names(tmp_path) == []


def test_a_full_disk_leaves_the_previous_checkpoint_complete(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted")
    try:
        checkpoints = Checkpoints(disk / "checkpoints")
        checkpoints.save(1, small(1), {"step": 1})
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(2, {"weight": torch.randn(1_000_000)}, {})
        assert (caught.value.step, caught.value.newest) == (2, disk / "checkpoints" / "step-00000001")
        assert os.strerror(errno.ENOSPC) in str(caught.value)
        assert names(disk / "checkpoints") == ["last", "step-00000001"]
        assert_complete(checkpoints.newest(), 1)
        assert_complete(checkpoints.save(3, small(3), {"step": 3}), 3)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_checkpoint_that_cannot_be_deleted_is_only_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(path, **_):
        raise PermissionError("not yours")

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1), {})
    monkeypatch.setattr("shutil.rmtree", refuse)
    monkeypatch.setattr(Path, "rename", _refuse_old(Path.rename))
    with caplog.at_level(logging.WARNING):
        path = checkpoints.save(2, small(2), {"step": 2})
    (record,) = [record for record in caplog.records if record.name == checkpoint.log.name]
    assert record.levelname == "WARNING"
    assert record.args[0] == tmp_path / "step-00000001"
    assert str(record.args[1]) == "not yours"
    assert_complete(path, 2)


def _refuse_old(rename):
    def refuse(path, target):
        if target.name.endswith(".old"):
            raise PermissionError("not yours")
        return rename(path, target)

    return refuse


@pytest.mark.parametrize(
    ("tensors", "metadata", "cause"),
    [({}, {"a": torch.ones(1)}, "Tensor is not JSON"), ({"a": {"lr": 1}}, {}, "a is not a tensor")],
)
def test_only_tensors_and_json_can_be_saved(tmp_path, tensors, metadata, cause):
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).save(1, tensors, metadata)
    assert caught.value.step == 1
    assert cause in str(caught.value)
    assert names(tmp_path) == []


# Damaged checkpoints, and those of other runs


def test_every_tensor_that_does_not_fit_is_listed(tmp_path):
    path = Checkpoints(tmp_path).save(1, {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)}, {})
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2).double(), "c": torch.zeros(1), "d": torch.zeros(1)}
    with pytest.raises(PathError) as caught:
        load(path, tensors)
    assert caught.value.path == str(path)
    mismatches = dict(re.findall(r"\b(\w) \((.*?torch\.\w+)\)", caught.value.problem))
    assert list(mismatches) == ["a", "b", "d"]
    for name, shapes in {
        "a": ["(3,)", "(4,)"],
        "b": ["float32", "float64"],
        "d": ["missing", "(1,)"],
    }.items():
        assert all(shape in mismatches[name] for shape in shapes)
    assert tensors["c"].eq(0).all()


def _truncate(file):
    os.truncate(file, file.stat().st_size - 8)


def _overwrite_header(file):
    with file.open("r+b") as stream:
        stream.write(b"\xff" * 20)


def _rename_a_tensor(file):
    file.write_bytes(file.read_bytes().replace(b'"steps":', b'"stops":', 1))


@pytest.mark.parametrize("damage", [_truncate, _overwrite_header, _rename_a_tensor, Path.unlink])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = Checkpoints(tmp_path).save(1, small(1), {})
    damage(path / "rank-00000.safetensors")
    for read in (tensor_names, lambda path: load(path, small(2))):
        with pytest.raises(PathError) as caught:
            read(path)
        assert caught.value.path == str(path / "rank-00000.safetensors")


def test_a_header_that_is_nested_too_deeply_is_damage(tmp_path):
    path = Checkpoints(tmp_path).save(1, small(1), {})
    file = path / "rank-00000.safetensors"
    save_file(load_file(file), file, metadata={OFFSETS: "[" * 100_000})
    write_state(path, {"step": 1}, {file.name: file.stat().st_size}, {file.name: file_digest(file)})
    with pytest.raises(DamagedCheckpoint) as caught:
        tensor_names(path)
    assert caught.value.path == str(file)


def flip(file, bit):
    """Flip a bit in place."""
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def header_size(file):
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def some_bits(file):
    """60 bits of the header and 60 of the tensors, evenly spread."""
    header, size = 8 * header_size(file), 8 * file.stat().st_size
    return [*range(0, header, header // 59), *range(header + 5, size, (size - header) // 59)]


def without_digests(path):
    """Make it a checkpoint of an earlier version."""
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({"facts": state["facts"], "files": state["files"]}))


def test_every_flipped_bit_of_a_file_is_refused_by_name(tmp_path):
    path = Checkpoints(tmp_path).save(1, small(1), {"step": 1})
    file = path / "rank-00000.safetensors"
    bits = some_bits(file)
    assert len(bits) >= 120
    for bit in bits:
        flip(file, bit)
        for read in (check, lambda path: load(path, small(2))):
            with pytest.raises(DamagedCheckpoint) as caught:
                read(path)
            assert caught.value.path == str(file)
        flip(file, bit)
    assert_complete(path, 1)


@pytest.mark.slow
def test_without_digests_a_damaged_header_is_named_and_the_rest_loads_as_before(tmp_path):
    path = Checkpoints(tmp_path).save(1, small(1), {"step": 1})
    without_digests(path)
    file = path / "rank-00000.safetensors"
    assert_complete(path, 1)
    refused = []
    for bit in range(0, 8 * header_size(file), 5):
        flip(file, bit)
        for read in (tensor_names, lambda path: load(path, small(2))):
            try:
                read(path)
            except PathError as error:
                refused.append(error.path)
        flip(file, bit)
    assert len(refused) > 100
    assert set(refused) <= {str(file), str(path)}
    assert_complete(path, 1)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def fail(path, progress=None):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = Checkpoints(tmp_path).save(1, small(1), {"step": 1})
    monkeypatch.setattr("fastclip.run.state_file.file_digest", fail)
    with pytest.raises(DamagedCheckpoint) as caught:
        load(path, small(2))
    assert caught.value.path == str(path / "rank-00000.safetensors")
    assert os.strerror(errno.EIO) in caught.value.reason


def test_the_newest_undamaged_one_is_found_and_later_ones_are_set_aside(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, small(step), {"step": step})
    checkpoints.mark_best(3)
    assert checkpoints.newest_undamaged() == tmp_path / "step-00000003"
    flip(tmp_path / "step-00000003" / "rank-00000.safetensors", 4000)
    flip(tmp_path / "step-00000002" / "state.json", 700)
    assert checkpoints.newest_undamaged() == tmp_path / "step-00000001"
    named = [record.args[0] for record in caplog.records if record.name == checkpoint.log.name]
    assert named == [
        str(tmp_path / "step-00000003" / "rank-00000.safetensors"),
        str(tmp_path / "step-00000002" / "state.json"),
    ]
    (tmp_path / "step-00000003.damaged").mkdir()  # of an earlier time
    checkpoints.start_at(1, 1)
    aside = ["step-00000002.damaged", "step-00000003.damaged", "step-00000003.damaged-2"]
    assert names(tmp_path) == ["best", "last", "step-00000001", *aside]
    assert checkpoints.newest() == checkpoints.best == tmp_path / "step-00000001"
    assert_complete(tmp_path / "last", 1)
    checkpoints.save(2, small(2), {"step": 2})
    assert set(aside) < set(names(tmp_path))  # never deleted


def test_the_newest_checkpoint_before_the_decay_is_never_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, decay_from=4)
    saved = []
    for step in (2, 3, 5, 6, 7):
        checkpoints.save(step, small(step), {"step": step})
        saved.append([name for name in names(tmp_path) if name.startswith("step")])
    assert saved == [[f"step-{step:08d}" for step in steps] for steps in ([2], [3], [3, 5], [3, 6], [3, 7])]
    assert checkpoints.newest(until=4) == checkpoints.newest(until=3) == tmp_path / "step-00000003"
    assert checkpoints.newest(until=2) is None
    checkpoints.start_at(3, None, "decayed")
    assert names(tmp_path) == ["last", "step-00000003", "step-00000007.decayed"]
    checkpoints.save(7, small(7), {"step": 7})
    assert names(tmp_path) == ["last", "step-00000003", "step-00000007", "step-00000007.decayed"]


def test_only_damaged_checkpoints_are_an_error_and_stay_as_they_are(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_undamaged() is None
    for step in (1, 2):
        path = checkpoints.save(step, small(step), {"step": step})
        flip(path / "rank-00000.safetensors", 4000)
    with pytest.raises(PathError) as caught:
        checkpoints.newest_undamaged()
    assert caught.value.path == str(path / "rank-00000.safetensors")
    assert names(tmp_path) == ["last", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("stale", ["missing", "step-00000001", "step-00000009"])
def test_links_that_a_killed_run_left_behind_are_corrected_at_the_start(tmp_path, stale):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, small(step), {"step": step})
    for link in ("last", "best"):
        (tmp_path / link).unlink(missing_ok=True)
        if stale != "missing":
            (tmp_path / link).symlink_to(stale)
        (tmp_path / f"{link}.new").symlink_to("step-00000002")
    for leftover in ("step-00000001.old", "step-00000003.part", "step-00000003.part.old"):
        (tmp_path / leftover).mkdir()
    checkpoints.start_at(2, 2)
    assert names(tmp_path) == ["best", "last", "step-00000001", "step-00000002"]
    assert_complete(tmp_path / "last", 2)
    assert_complete(tmp_path / "best", 2)


def test_a_link_to_nothing_is_removed_at_the_start(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none")
    checkpoints.start_at(0, None)  # a new run: there is no folder yet
    (tmp_path / "none").mkdir()
    for link in ("last", "best"):
        (tmp_path / "none" / link).symlink_to("step-00000001")
    checkpoints.start_at(0, None)
    assert names(tmp_path / "none") == []


def test_a_file_of_another_checkpoint_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    one, two = (checkpoints.save(step, small(step), {}) for step in (1, 2))
    shutil.copy(one / "rank-00000.safetensors", two / "rank-00001.safetensors")
    with pytest.raises(PathError) as caught:
        load(two, small(3))
    assert caught.value.path == str(two / "rank-00001.safetensors")


@pytest.mark.parametrize("content", [None, b"", b'{"facts": {"step"', b"[1]", b'{"facts": 1, "files": {}}'])
def test_a_damaged_state_file_is_named(tmp_path, content):
    path = Checkpoints(tmp_path).save(1, small(1), {})
    (path / "state.json").unlink() if content is None else (path / "state.json").write_bytes(content)
    for read in (read_metadata, tensor_names, lambda path: load(path, small(2))):
        with pytest.raises(PathError) as caught:
            read(path)
        assert caught.value.path == str(path / "state.json")


class _Planted:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize(
    "name",
    ["state.json", "rank-00000.safetensors", "x.safetensors", ".metadata", "model.safetensors.index.json"],
)
def test_a_planted_pickle_never_runs(tmp_path, name, protocol):
    checkpoints, marker = Checkpoints(tmp_path / "run"), tmp_path / "marker"
    planted = pickle.dumps(_Planted(marker), protocol)
    pickle.loads(planted)
    marker.rmdir()  # it would have worked
    path = checkpoints.save(1, small(1), {})
    (path / name).write_bytes(planted)
    assert checkpoints.newest() == path
    for use in (read_metadata, tensor_names, lambda path: load(path, small(1))):
        with suppress(ValueError):
            use(path)
    checkpoints.save(2, small(2), {})
    assert not marker.exists()


# Several ranks


SIZES = (5, 2, 16)  # of 4 ranks, one has no row of 5; two have none of 2


def tables():
    """The full state of the samples."""
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(n, 2, generator=generator) for n in SIZES}


def state_of(rows_of):
    """Replicated tensors, and the samples' state as the loss shards it, with rows from `rows_of`."""
    tensors = {f"model.{i}": torch.full((1000,), float(i)) for i in range(20)}
    tensors |= {"number": torch.tensor(7), "turned": torch.arange(6.0).reshape(2, 3).t()}
    for n in SIZES:
        state = SampleState(n, Exchange(None), None, torch.device("cpu"), torch.float32)
        state.columns["log_u"][: state.held] = rows_of(n)[state.start : state.start + state.held]
        tensors |= {f"{name}.{n}": tensor for name, tensor in sharded(state).items()}
    return tensors


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def regrouped(rank, world_size, store):
    """Put the first ranks in a new process group; a single rank has none."""
    if rank < world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    yield rank < world_size
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def save_here(rank, folder, step):
    return Checkpoints(folder).save(step, state_of(tables().get), {"step": step, "rank": rank})


def load_here(path):
    expected = state_of(tables().get)
    loaded = state_of(lambda n: torch.zeros(n, 2))
    for tensor in loaded.values():
        local(tensor).zero_()
    load(path, loaded)
    assert_same({n: local(t) for n, t in loaded.items()}, {n: local(t) for n, t in expected.items()})
    assert tensor_names(path) == {name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
    assert read_metadata(path)["rank"] == 0


def refuse_tensors_that_fit_one_rank_only(rank, path):
    with pytest.raises(PathError) as caught:
        load(path, {"log_u.5": torch.zeros(5 + rank, 2)})
    assert caught.value.path == str(path)
    assert "log_u.5 ((5, 2)" in caught.value.problem


def save_at_four_two_one_and_four(rank, _, folder, stores):
    save_here(rank, folder, 1)
    dist.barrier()
    dist.destroy_process_group()
    for step, world_size in ((2, 2), (3, 1), (4, 4)):
        with regrouped(rank, world_size, stores / str(step)) as takes_part:
            if takes_part:
                checkpoints = Checkpoints(folder, keep=9)
                load_here(checkpoints.newest())
                path = save_here(rank, folder, step)
                assert checkpoints.newest() == path
                if world_size > 1:
                    refuse_tensors_that_fit_one_rank_only(rank, path)
    dist.init_process_group("gloo", init_method=f"file://{stores}/end", rank=rank, world_size=4)


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_loads_on_two_one_and_four(tmp_path):
    folder, stores = tmp_path / "checkpoints", tmp_path / "stores"
    stores.mkdir()
    run_ranks(save_at_four_two_one_and_four, 4, folder, stores)
    assert names(folder) == ["last", "step-00000003", "step-00000004"]
    load_here(folder / "last")
    assert_no_pickle(folder)

    files = sorted((folder / "last").glob("*.safetensors"))
    assert [file.name for file in files] == [f"rank-{rank:05d}.safetensors" for rank in range(4)]
    total = sum(tensor.nbytes for tensor in state_of(tables().get).values())
    assert sum(map(_bytes_of_tensors, files)) == total  # each replicated tensor once,
    assert max(map(_bytes_of_tensors, files)) < total / 2  # and not all by the same rank


def _bytes_of_tensors(file):
    with safe_open(file, "pt") as opened:
        return sum(opened.get_tensor(name).nbytes for name in sorted(opened.keys()))


def load_with_a_damaged_file(rank, world_size, folder):
    checkpoints = Checkpoints(folder)
    paths = [save_here(rank, folder, step) for step in (1, 2)]
    if rank == 0:
        flip(paths[1] / "rank-00001.safetensors", 8 * header_size(paths[1] / "rank-00001.safetensors") + 77)
    dist.barrier()
    caught = []
    for read in (check, load_here):
        with pytest.raises(DamagedCheckpoint) as error:
            read(paths[1])
        caught.append(error.value.path)
    assert checkpoints.newest_undamaged() == paths[0]
    checkpoints.start_at(1, None)
    load_here(checkpoints.newest())
    return caught


@pytest.mark.slow
def test_a_damaged_file_of_one_rank_stops_all_and_they_agree_on_the_one_before(tmp_path):
    damaged = str(tmp_path / "step-00000002" / "rank-00001.safetensors")
    assert run_ranks(load_with_a_damaged_file, 2, tmp_path) == [[damaged, damaged]] * 2
    assert names(tmp_path) == ["last", "step-00000001", "step-00000002.damaged"]


def fail_on_one(rank, world_size, folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, small(1), {"step": 1})
    checkpoints.mark_best(1)
    big = {f"weight.{i}": torch.zeros(500_000) for i in range(2)}
    limit = 1_000_000 if rank == 1 else resource.RLIM_INFINITY
    with files_no_larger_than(limit), pytest.raises(CheckpointError) as failed:
        checkpoints.save(2, big, {})
    assert checkpoints.best == checkpoints.newest()
    assert_complete(checkpoints.newest(), 1)
    with pytest.raises(CheckpointError) as unknown:
        checkpoints.mark_best(7)
    with pytest.raises(CheckpointError) as apart:  # as if each rank had its own disk
        Checkpoints(folder / str(rank)).save(2, big, {})
    dist.barrier()
    return [(str(error.value), error.value.step, error.value.newest) for error in (failed, unknown, apart)]


@pytest.mark.slow
def test_an_error_on_one_rank_is_raised_on_all(tmp_path):
    for failed, unknown, apart in run_ranks(fail_on_one, 2, tmp_path):
        assert failed[1:] == (2, tmp_path / "step-00000001")
        assert "rank 1: " in failed[0]
        assert "rank 0: " not in failed[0]
        assert os.strerror(errno.EFBIG) in failed[0]
        assert unknown[1] == 7
        assert apart[1:] == (2, None)
        assert f"{tmp_path / '0' / 'step-00000002.part' / 'rank-00001.safetensors'}" in apart[0]
    assert names(tmp_path) == ["0", "1", "best", "last", "step-00000001"]
