"""Atomic checkpoints without pickle, saved and loaded with any number of ranks.

    RUN/checkpoints/step-00001234/rank-00000.safetensors    each rank's part of the tensors
                                  state.json                the caller's metadata, and the size of every file
                    last, best                              symlinks to a step

Ranks write into `step-00001234.part` on a shared filesystem; once everything is on disk, rank 0 renames the
folder. So a folder named after a step is complete, even after a power cut. Each replicated tensor is written
once, by one of the ranks; DTensors are written by their owners. The part files are listed in state.json; in
older checkpoints they are called worker-00000.safetensors.

With a process group, every rank must call these functions; an error on one rank is raised on all.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from fastclip.distributed.world import broadcast_object, gather_objects
from fastclip.errors import InputError, PathError
from fastclip.run.folder import STATE, complete_checkpoints, read_state

log = logging.getLogger(__name__)
T = TypeVar("T")
_LEFTOVER = re.compile(r"step-\d{8,}(\.part|\.old)+")  # left behind by a killed run
_OFFSETS = "DCP_SHARDING_INFO"  # where torch's reader expects a shard's offset in the full tensor


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, marked or listed; earlier checkpoints are still complete.

    Args:
        step: the step that could not be saved or marked, if it is about one.
        newest: the complete checkpoint to resume from, if there is one.
    """

    def __init__(self, message: str, *, step: int | None = None, newest: Path | None = None):
        super().__init__(message)
        self.step, self.newest = step, newest


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: RUN/checkpoints; created by the first save.
        keep: number of newest checkpoints to keep. The best and the last saved one are always kept.
    """

    def __init__(self, folder: Path, keep: int = 2):
        if keep < 1:
            raise InputError("keep", f"must be at least 1, not {keep}.")
        self.folder, self.keep = Path(folder), keep

    def save(self, step: int, tensors: dict[str, Tensor], metadata: dict) -> Path:
        """Write a step's state; CheckpointError on every rank if one fails. A saved step is not rewritten.

        Args:
            tensors: replicated tensors and DTensors, under the same names on every rank.
            metadata: anything else, as JSON; rank 0's is saved.
        """
        path = self.folder / f"step-{step:08d}"
        part = path.with_name(path.name + ".part")
        try:
            if _on_first(lambda: self._prepare(path, part)):
                files = _write(part, tensors)
                _on_first(lambda: self._publish(path, part, metadata, files))
        except CheckpointError as error:
            _on_first(self._clean_up)
            newest = self.newest()
            hint = f"The run can be resumed from {newest}." if newest else "There is no earlier checkpoint."
            message = f"Step {step:,} could not be saved in {self.folder}: {error}. {hint}"
            raise CheckpointError(message, step=step, newest=newest) from error
        return path

    def newest(self) -> Path | None:
        """The complete checkpoint with the highest step."""
        return _on_first(lambda: next(reversed(self._complete()), None))

    def mark_best(self, step: int) -> None:
        """Point `best` at this step's checkpoint, which is then never deleted."""
        _on_first(lambda: self._mark_best(step), step)

    @property
    def best(self) -> Path | None:
        """The checkpoint that was marked as best."""
        return _on_first(lambda: self._target("best"))

    # The methods below run on rank 0 only.

    def _prepare(self, path: Path, part: Path) -> bool:
        """Return whether there is something to write; if so, make an empty folder for it."""
        if path in self._complete():
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean_up()
        if path.exists():
            _remove(path)
        part.mkdir()
        return True

    def _publish(self, path: Path, part: Path, metadata: dict, files: dict[str, int]) -> None:
        for name, size in files.items():
            file = part / name
            if not file.exists() or file.stat().st_size != size:
                raise OSError(f"rank 0 cannot see {file} as written; all ranks must share a filesystem")
        (part / STATE).write_text(json.dumps({"facts": metadata, "files": files}, indent=1))
        _sync(part / STATE)
        _sync(part)
        part.rename(path)
        self._link("last", path)
        self._prune()

    def _complete(self) -> list[Path]:
        return complete_checkpoints(self.folder)

    def _target(self, name: str) -> Path | None:
        """The complete checkpoint that a link points to."""
        link = self.folder / name
        target = self.folder / os.readlink(link) if link.is_symlink() else None
        return target if target in self._complete() else None

    def _mark_best(self, step: int) -> None:
        path = self.folder / f"step-{step:08d}"
        if path not in self._complete():
            saved = ", ".join(path.name for path in self._complete()) or "none"
            raise FileNotFoundError(f"step {step:,} has no checkpoint in {self.folder} (saved: {saved})")
        self._link("best", path)
        self._prune()  # the previous best

    def _prune(self) -> None:
        linked = (self._target("last"), self._target("best"))
        for old in self._complete()[: -self.keep]:
            if old not in linked:
                _try_to_remove(old)

    def _link(self, name: str, target: Path) -> None:
        new = self.folder / f"{name}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(target.name)
        new.replace(self.folder / name)
        _sync(self.folder)

    def _clean_up(self) -> None:
        """Delete the remains of unfinished saves and deletions."""
        for path in sorted(self.folder.glob("step-*"), reverse=True):  # x.part.old before x.part
            if _LEFTOVER.fullmatch(path.name):
                _try_to_remove(path)


def tensor_names(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The full shape and dtype of each tensor in a checkpoint."""
    saved = _read_metadata(Path(path)).state_dict_metadata
    return {name: (value.size, value.properties.dtype) for name, value in saved.items()}  # type: ignore[union-attr]


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill these tensors in place: plain ones with the full value, DTensors with this rank's shard.

    The checkpoint may hold more tensors. PathError on every rank if it does not fit or is damaged.
    """
    failed: tuple[str, str] | None = None  # path and problem
    try:
        _check_fits(Path(path), tensors)
    except PathError as error:
        failed = error.path, error.problem
    except ValueError as error:
        failed = str(path), f"could not be read: {error}"
    if failed := next(filter(None, gather_objects(failed)), None):
        raise PathError(*failed)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _no_warning_of_one_process():
            dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(path)), planner=planner)
    except CheckpointException as error:
        raise PathError(path, f"could not be read: {_reasons(error)}.") from error


class _Writer(dcp.HuggingFaceStorageWriter):
    """Write the same files as torch's writer, with safetensors' own function.

    Torch's writer holds two more copies of everything in memory, takes several times as long as the disk
    needs, and cannot write tensors that are not contiguous or share memory (tied weights).
    """

    def __init__(self, path: Path):
        super().__init__(str(path), save_distributed=True)
        self.folder = path
        self.files: dict[str, int] = {}  # size by name; known on rank 0 once all ranks have written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict] = {}
        memory: set[int] = set()
        for item in plan.items:
            name = item.index.fqn
            if item.tensor_data is None:
                raise TypeError(f"{name} is not a tensor; pass it in the metadata")
            tensor = planner.resolve_data(item).detach().cpu().contiguous()  # type: ignore[union-attr]
            shared = tensor.untyped_storage().data_ptr() in memory
            tensors[name] = tensor.clone() if shared else tensor
            memory.add(tensors[name].untyped_storage().data_ptr())
            offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        size, file = 0, self.folder / f"rank-{self.rank:05d}.safetensors"
        if tensors:
            file.touch()
            mode = file.stat().st_mode
            save_file(tensors, file, {_OFFSETS: json.dumps(offsets), "format": "pt"})
            file.chmod(mode)  # safetensors ignores the umask and makes files private to their owner
            _sync(file)
            size = file.stat().st_size
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([WriteResult(item.index, size, (file.name, size)) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.files = dict(result.storage_data for of_rank in results for result in of_rank)


def _write(part: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    writer = _Writer(part)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _no_warning_of_one_process():
            dcp.save(tensors, storage_writer=writer, planner=planner)
    except CheckpointException as error:
        raise CheckpointError(_reasons(error)) from error
    return writer.files


def _read_metadata(path: Path) -> Metadata:
    """The list of tensors, after checking that every file is present and has its full size."""
    written = read_state(path)["files"]
    on_disk = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    for name in sorted(written.keys() | on_disk.keys()):
        try:
            size, size_now = written.get(name, "none"), on_disk.get(name, "none")
            if size != size_now:
                raise ValueError(f"bytes written: {size}, bytes on disk: {size_now}")
            with safe_open(path / name, "pt") as file:
                if json.loads(file.metadata()[_OFFSETS]).keys() != set(file.keys()):
                    raise ValueError("its shards do not match its tensors")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise PathError(
                path / name,
                f"is missing, damaged or from another checkpoint ({error}). "
                "Restore it from a copy, or delete its folder to resume from an earlier checkpoint.",
            ) from error
    return dcp.HuggingFaceStorageReader(str(path)).read_metadata()


def _check_fits(path: Path, tensors: dict[str, Tensor]) -> None:
    saved, problems = tensor_names(path), []
    for name, tensor in sorted(tensors.items()):
        here = f"{tuple(tensor.shape)} {tensor.dtype}"
        there = f"{tuple(saved[name][0])} {saved[name][1]}" if name in saved else "missing"
        if here != there:
            problems.append(f"{name} ({there}, expected {here})")
    if not problems:
        return
    more = f" and {len(problems) - 10:,} more" if len(problems) > 10 else ""
    raise PathError(
        path,
        f"belongs to another model, algorithm or number of samples: {', '.join(problems[:10])}{more}. "
        "Resume with the settings that wrote it, or start a new run in another folder.",
    )


def _on_first(function: Callable[[], T], step: int | None = None) -> T:
    """Call the function on rank 0; return its result, or raise CheckpointError, on every rank."""
    outcome: list = [None, None]  # result, reason of a failure
    cause = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1], cause = _reason(error), error
    outcome = broadcast_object(outcome)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1], step=step) from cause
    return outcome[0]


@contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    """Silence torch's warning that there is no process group: a single rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {_reason(cause)}" for rank, (cause, _) in error.failures.items())


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a folder, renaming it first: one that is half deleted must not look complete."""
    if not path.name.endswith(".old"):
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        _sync(path.parent)
        path = old
    shutil.rmtree(path)


def _try_to_remove(path: Path) -> None:
    try:
        _remove(path)
    except OSError as error:
        log.warning("%s could not be deleted (%s). Delete it by hand.", path, error)
