import json
import logging
import os
import pickle
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

from fastclip.objective.exchange import Exchange
from fastclip.objective.sample_state import SampleState
from fastclip.run import checkpoint
from fastclip.run.checkpoint import CheckpointError, Checkpoints, load, tensor_names
from fastclip.run.folder import read_metadata
from tests.workers import run_workers


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


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert found[name].shape == expected[name].shape
        assert bits(found[name]) == bits(expected[name]), name


def small(step):
    return {"weight": torch.full((50, 3), float(step)), "steps": torch.tensor(step)}


def assert_whole(path, step):
    found = {"weight": torch.zeros(50, 3), "steps": torch.tensor(0)}
    load(path, found)
    assert_same(found, small(step))
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


# One process


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path, recwarn):
    saved = tensors_of_every_kind()
    metadata = {"step": 12, "run": {"name": "τ", "values": [1.5, None, True]}}
    path = Checkpoints(tmp_path / "run" / "checkpoints").save(12, saved, metadata)
    found = {name: torch.empty_like(tensor).detach() for name, tensor in saved.items()}
    found["not.contiguous"] = torch.empty(4, 6).t()
    load(path, found)
    assert_same(found, saved)
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
    found = {"weight": torch.zeros(50, 3)}
    load(path, found)
    assert found["weight"].eq(5).all()


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
    assert_whole(tmp_path / "there" / "last", 2)
    assert_whole(tmp_path / "there" / "best", 1)


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


def test_what_was_saved_last_is_kept_though_higher_steps_are_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(9, small(9), {})
    checkpoints.save(3, small(3), {"step": 3})
    assert_whole(tmp_path / "last", 3)


def test_a_step_that_is_not_there_cannot_be_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {})
    with pytest.raises(CheckpointError, match=r"step 7 has no checkpoint .*step-00000001"):
        checkpoints.mark_best(7)


def test_a_step_is_written_once(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, small(1), {"step": 1})
    before = (path / "state.json").stat().st_mtime_ns
    assert checkpoints.save(1, small(2), {"step": 2}) == path
    assert (path / "state.json").stat().st_mtime_ns == before
    assert_whole(path, 1)


def test_what_killed_runs_left_is_deleted_at_the_next_save(tmp_path):
    leftovers = ["step-00000001.part", "step-00000001.part.old", "step-00000002.old", "step-00000003"]
    for name in leftovers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "worker-00000.safetensors").write_bytes(b"half of a file")
    path = Checkpoints(tmp_path).save(3, small(3), {"step": 3})
    assert names(tmp_path) == ["last", "step-00000003"]
    assert_whole(path, 3)


def test_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = Checkpoints(tmp_path).save(1, small(1), {})
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {"0o640"}


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


# Kills and full disks


def test_a_kill_before_any_change_of_the_folder_leaves_a_whole_newest_checkpoint(tmp_path):
    """Saves step after step in children, each of which dies one change of the filesystem later."""
    checkpoints, change, published, finished = Checkpoints(tmp_path, keep=1), 0, 0, False
    checkpoints.save(1, small(1), {"step": 1})
    while not finished:
        before = int(checkpoints.newest().name[5:])
        finished = _save_in_child(checkpoints, before + 1, die_at=change)
        path = checkpoints.newest()
        after = int(path.name[5:])
        assert after in (before, before + 1)
        for complete in tmp_path.glob("step-" + "[0-9]" * 8):
            assert_whole(complete, int(complete.name[5:]))
        assert (tmp_path / "last").exists()
        published += after > before
        change += 1
    assert change > 10
    assert 3 < published < change - 3  # deaths on both sides of the rename
    assert names(tmp_path) == ["last", path.name]


def _save_in_child(checkpoints, step, die_at):
    """Whether a child that would be killed before its change number `die_at` came to the end of its save."""
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

    monkeypatch.setattr(checkpoint, "save_file", write_half)
    assert not _save_in_child(checkpoints, 2, die_at=-1)
    monkeypatch.undo()
    assert (tmp_path / "step-00000002.part" / "worker-00000.safetensors").stat().st_size == 100
    assert_whole(checkpoints.newest(), 1)
    assert_whole(checkpoints.save(2, small(2), {"step": 2}), 2)


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
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


def test_a_failed_write_leaves_the_previous_checkpoint_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {"step": 1})
    big = {"weight": torch.zeros(1_000_000)}
    said = r"Step 2 could not be saved .*File too large.*step-00000001 is whole"
    with files_no_larger_than(1_000_000), pytest.raises(CheckpointError, match=said):
        checkpoints.save(2, big, {"step": 2})
    assert names(tmp_path) == ["last", "step-00000001"]
    assert_whole(checkpoints.newest(), 1)
    checkpoints.save(2, big, {"step": 2})


def test_a_first_save_that_fails_says_that_there_is_no_other(tmp_path):
    with files_no_larger_than(1000), pytest.raises(CheckpointError, match="no earlier checkpoint"):
        Checkpoints(tmp_path).save(2, {"weight": torch.zeros(1000)}, {})
    assert names(tmp_path) == []


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        checkpoints = Checkpoints(disk / "checkpoints")
        checkpoints.save(1, small(1), {"step": 1})
        with pytest.raises(CheckpointError, match=r"No space left on device.*step-00000001 is whole"):
            checkpoints.save(2, {"weight": torch.randn(1_000_000)}, {})
        assert names(disk / "checkpoints") == ["last", "step-00000001"]
        assert_whole(checkpoints.newest(), 1)
        assert_whole(checkpoints.save(3, small(3), {"step": 3}), 3)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_checkpoint_that_cannot_be_deleted_is_only_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(path, **_):
        raise PermissionError("not yours")

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1), {})
    monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
    monkeypatch.setattr(Path, "rename", _refuse_old(Path.rename))
    with caplog.at_level(logging.WARNING):
        path = checkpoints.save(2, small(2), {"step": 2})
    assert "could not be deleted (not yours)" in caplog.text
    assert_whole(path, 2)


def _refuse_old(rename):
    def refuse(path, target):
        if target.name.endswith(".old"):
            raise PermissionError("not yours")
        return rename(path, target)

    return refuse


@pytest.mark.parametrize(
    ("tensors", "facts", "said"),
    [({}, {"a": torch.ones(1)}, "not JSON serializable"), ({"a": {"lr": 1}}, {}, "a is not a tensor")],
)
def test_what_is_neither_tensor_nor_json_is_refused(tmp_path, tensors, metadata, said):
    with pytest.raises(CheckpointError, match=said):
        Checkpoints(tmp_path).save(1, tensors, metadata)
    assert names(tmp_path) == []


# Broken and foreign checkpoints


def test_another_model_is_named_tensor_by_tensor(tmp_path):
    path = Checkpoints(tmp_path).save(1, {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)}, {})
    wanted = {"a": torch.zeros(4), "b": torch.zeros(2).double(), "c": torch.zeros(1), "d": torch.zeros(1)}
    with pytest.raises(ValueError, match="another model, algorithm or number of samples") as error:
        load(path, wanted)
    for said in ("a ((3,) torch.float32, wanted (4,)", "wanted (2,) torch.float64)", "d (missing"):
        assert said in str(error.value)
    assert " c (" not in str(error.value)
    assert wanted["c"].eq(0).all()


def _truncate(file):
    os.truncate(file, file.stat().st_size - 8)


def _overwrite_header(file):
    with file.open("r+b") as stream:
        stream.write(b"\xff" * 20)


def _rename_a_tensor(file):
    file.write_bytes(file.read_bytes().replace(b'"steps":', b'"stops":', 1))


@pytest.mark.parametrize("damage", [_truncate, _overwrite_header, _rename_a_tensor, Path.unlink])
def test_a_broken_file_is_named(tmp_path, damage):
    path = Checkpoints(tmp_path).save(1, small(1), {})
    damage(path / "worker-00000.safetensors")
    for read in (tensor_names, lambda path: load(path, small(2))):
        with pytest.raises(ValueError, match=r"worker-00000\.safetensors is missing, broken or not of this"):
            read(path)


def test_a_file_of_another_checkpoint_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    one, two = (checkpoints.save(step, small(step), {}) for step in (1, 2))
    shutil.copy(one / "worker-00000.safetensors", two / "worker-00001.safetensors")
    with pytest.raises(ValueError, match=r"worker-00001.safetensors .* not of this checkpoint"):
        load(two, small(3))


@pytest.mark.parametrize("content", [None, b"", b'{"facts": {"step"', b"[1]", b'{"facts": 1, "files": {}}'])
def test_a_broken_state_file_says_what_to_do(tmp_path, content):
    path = Checkpoints(tmp_path).save(1, small(1), {})
    (path / "state.json").unlink() if content is None else (path / "state.json").write_bytes(content)
    for read in (read_metadata, tensor_names, lambda path: load(path, small(2))):
        with pytest.raises(ValueError, match=r"state.json is missing or broken .* resume from an earlier"):
            read(path)


class _Planted:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize(
    "name",
    ["state.json", "worker-00000.safetensors", "x.safetensors", ".metadata", "model.safetensors.index.json"],
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


# Several workers


SIZES = (5, 2, 16)  # of 4 workers, one has no row of 5; two have none of 2


def tables():
    """What the samples' state holds, whole."""
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(n, 2, generator=generator) for n in SIZES}


def state_of(rows_of):
    """Replicated tensors, and the samples' state as the loss shards it; `rows_of` says what a table holds."""
    tensors = {f"model.{i}": torch.full((1000,), float(i)) for i in range(20)}
    tensors |= {"number": torch.tensor(7), "turned": torch.arange(6.0).reshape(2, 3).t()}
    for n in SIZES:
        state = SampleState(n, Exchange(None), None, torch.device("cpu"), torch.float32)
        state.columns["log_u"][: state.held] = rows_of(n)[state.start : state.start + state.held]
        tensors |= {f"{name}.{n}": tensor for name, tensor in state.state_dict().items()}
    return tensors


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def regrouped(rank, world_size, store):
    """The first workers in a new process group; one worker alone has none."""
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
    found = state_of(lambda n: torch.zeros(n, 2))
    for tensor in found.values():
        local(tensor).zero_()
    load(path, found)
    assert_same({n: local(t) for n, t in found.items()}, {n: local(t) for n, t in expected.items()})
    assert tensor_names(path) == {name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
    assert read_metadata(path)["rank"] == 0


def refuse_what_fits_one_worker_only(rank, path):
    wanted = {"log_u.5": torch.zeros(5 + rank, 2)}
    with pytest.raises(ValueError, match=r"log_u.5 \(\(5, 2\)"):
        load(path, wanted)


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
                    refuse_what_fits_one_worker_only(rank, path)
    dist.init_process_group("gloo", init_method=f"file://{stores}/end", rank=rank, world_size=4)


def test_a_checkpoint_of_four_workers_goes_to_two_to_one_and_to_four(tmp_path):
    folder, stores = tmp_path / "checkpoints", tmp_path / "stores"
    stores.mkdir()
    run_workers(save_at_four_two_one_and_four, 4, folder, stores)
    assert names(folder) == ["last", "step-00000003", "step-00000004"]
    load_here(folder / "last")
    assert_no_pickle(folder)

    files = list((folder / "last").glob("*.safetensors"))
    assert len(files) == 4
    whole = sum(tensor.nbytes for tensor in state_of(tables().get).values())
    assert sum(map(_bytes_of_tensors, files)) == whole  # each replicated tensor once,
    assert max(map(_bytes_of_tensors, files)) < whole / 2  # and not all by the same worker


def _bytes_of_tensors(file):
    with safe_open(file, "pt") as opened:
        return sum(opened.get_tensor(name).nbytes for name in sorted(opened.keys()))


def fail_on_one(rank, world_size, folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, small(1), {"step": 1})
    checkpoints.mark_best(1)
    big = {f"weight.{i}": torch.zeros(500_000) for i in range(2)}
    limit = 1_000_000 if rank == 1 else resource.RLIM_INFINITY
    with files_no_larger_than(limit), pytest.raises(CheckpointError) as error:
        checkpoints.save(2, big, {})
    assert checkpoints.best == checkpoints.newest()
    assert_whole(checkpoints.newest(), 1)
    with pytest.raises(CheckpointError) as unknown:
        checkpoints.mark_best(7)
    with pytest.raises(CheckpointError) as apart:  # as if each worker had a disk of its own
        Checkpoints(folder / str(rank)).save(2, big, {})
    dist.barrier()
    return str(error.value), str(unknown.value), str(apart.value)


def test_what_fails_on_one_worker_is_raised_on_all(tmp_path):
    said = run_workers(fail_on_one, 2, tmp_path)
    for failed, unknown, apart in said:
        assert "worker 1: " in failed
        assert "worker 0: " not in failed
        assert "File too large" in failed
        assert "step-00000001 is whole" in failed
        assert "step 7 has no checkpoint" in unknown
        assert "do all workers share the disk?" in apart
    assert names(tmp_path) == ["0", "1", "best", "last", "step-00000001"]
