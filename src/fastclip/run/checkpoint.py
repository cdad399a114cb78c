"""Checkpoints that are whole or not there, without pickle, saved and loaded at any number of workers.

    RUN/checkpoints/step-00001234/worker-00000.safetensors    each worker's part of the tensors
                                  state.json                  the caller's metadata, and every file's size
                    last, best                                symlinks to a step

Workers write into `step-00001234.part` on a filesystem that all of them see; when everything is on the disk,
worker 0 renames the folder. So a folder named as a step is complete, whenever the power went. Replicated
tensors are written once, by one worker or another; DTensors by their owners.

With a process group every worker must call these functions; what fails on one is raised on all.
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
from fastclip.run.folder import STATE, complete_checkpoints, read_state

log = logging.getLogger(__name__)
T = TypeVar("T")
_LEFTOVER = re.compile(r"step-\d{8,}(\.part|\.old)+")  # what a killed run leaves behind
_OFFSETS = "DCP_SHARDING_INFO"  # where torch's reader looks for a shard's place in the whole tensor


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or marked; those that were there before are still whole."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: RUN/checkpoints; made at the first save.
        keep: how many of the newest to keep. The best, and the one saved last, are kept in any case.
    """

    def __init__(self, folder: Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1; try 2.")
        self.folder, self.keep = Path(folder), keep

    def save(self, step: int, tensors: dict[str, Tensor], metadata: dict) -> Path:
        """Write a step's state; CheckpointError on every worker if one fails. A step already there is kept.

        Args:
            tensors: replicated tensors and DTensors, under the same names on every worker.
            metadata: anything else to remember, as JSON; worker 0's are kept.
        """
        path = self.folder / f"step-{step:08d}"
        part = path.with_name(path.name + ".part")
        try:
            if _on_first(lambda: self._prepare(path, part)):
                files = _write(part, tensors)
                _on_first(lambda: self._publish(path, part, metadata, files))
        except CheckpointError as error:
            _on_first(self._clean_up)
            good = self.newest()
            hint = f"{good} is whole: resume from it" if good else "There is no earlier checkpoint"
            why = f"Step {step:,} could not be saved in {self.folder}: {error}. {hint}."
            raise CheckpointError(why) from error
        return path

    def newest(self) -> Path | None:
        """The complete checkpoint of the highest step."""
        return _on_first(lambda: next(reversed(self._complete()), None))

    def mark_best(self, step: int) -> None:
        """Let `best` point to this step's checkpoint, which is then never deleted."""
        _on_first(lambda: self._mark_best(step))

    @property
    def best(self) -> Path | None:
        """The checkpoint that was marked."""
        return _on_first(lambda: self._target("best"))

    # What follows runs on worker 0 alone.

    def _prepare(self, path: Path, part: Path) -> bool:
        """Whether there is something to write; if so, an empty folder for it."""
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
                raise OSError(f"worker 0 does not see {file} as written; do all workers share the disk?")
        (part / STATE).write_text(json.dumps({"facts": metadata, "files": files}, indent=1))
        _sync(part / STATE)
        _sync(part)
        part.rename(path)
        self._link("last", path)
        self._prune()

    def _complete(self) -> list[Path]:
        return complete_checkpoints(self.folder)

    def _target(self, name: str) -> Path | None:
        """The checkpoint that a link points to."""
        link = self.folder / name
        target = self.folder / os.readlink(link) if link.is_symlink() else None
        return target if target in self._complete() else None

    def _mark_best(self, step: int) -> None:
        path = self.folder / f"step-{step:08d}"
        if path not in self._complete():
            there = ", ".join(path.name for path in self._complete()) or "none"
            raise FileNotFoundError(f"step {step:,} has no checkpoint in {self.folder} (there: {there})")
        self._link("best", path)
        self._prune()  # of the best before it

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
        """Delete what unfinished saves and deletions left."""
        for path in sorted(self.folder.glob("step-*"), reverse=True):  # x.part.old before x.part
            if _LEFTOVER.fullmatch(path.name):
                _try_to_remove(path)


def tensor_names(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The whole shape and the dtype of each tensor of a checkpoint."""
    saved = _read_metadata(Path(path)).state_dict_metadata
    return {name: (value.size, value.properties.dtype) for name, value in saved.items()}  # type: ignore[union-attr]


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill these tensors in place: plain ones with the whole value, DTensors with this worker's shard.

    The checkpoint may hold more. If it does not fit or is broken: ValueError on every worker.
    """
    try:
        problem = _mismatch(Path(path), tensors)
    except ValueError as error:
        problem = str(error)
    if problem := next(filter(None, gather_objects(problem)), None):
        raise ValueError(problem)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _no_warning_of_one_process():
            dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(path)), planner=planner)
    except CheckpointException as error:
        raise ValueError(f"{path} could not be read: {_reasons(error)}.") from error


class _Writer(dcp.HuggingFaceStorageWriter):
    """Writes what torch's writer writes, by safetensors' own function.

    Torch's holds two more copies of everything in memory and takes several times as long as the disk needs;
    nor can it write tensors that are not contiguous or share memory (tied weights).
    """

    def __init__(self, path: Path):
        super().__init__(str(path), save_distributed=True)
        self.folder = path
        self.files: dict[str, int] = {}  # name and size of each; known on worker 0 when all have written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict] = {}
        memory: set[int] = set()
        for item in plan.items:
            name = item.index.fqn
            if item.tensor_data is None:
                raise TypeError(f"{name} is not a tensor; keep it in the facts")
            tensor = planner.resolve_data(item).detach().cpu().contiguous()  # type: ignore[union-attr]
            shared = tensor.untyped_storage().data_ptr() in memory
            tensors[name] = tensor.clone() if shared else tensor
            memory.add(tensors[name].untyped_storage().data_ptr())
            offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        size, file = 0, self.folder / f"worker-{self.rank:05d}.safetensors"
        if tensors:
            file.touch()
            mode = file.stat().st_mode
            save_file(tensors, file, {_OFFSETS: json.dumps(offsets), "format": "pt"})
            file.chmod(mode)  # safetensors' new file is for its owner alone, whatever the umask
            _sync(file)
            size = file.stat().st_size
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([WriteResult(item.index, size, (file.name, size)) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.files = dict(result.storage_data for worker in results for result in worker)


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
    """Which tensors there are, once every file is known to be there with all its bytes."""
    written = read_state(path)["files"]
    found = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    for name in sorted(written.keys() | found.keys()):
        try:
            size, size_now = written.get(name, "none"), found.get(name, "none")
            if size != size_now:
                raise ValueError(f"bytes written: {size}, found: {size_now}")
            with safe_open(path / name, "pt") as file:
                if json.loads(file.metadata()[_OFFSETS]).keys() != set(file.keys()):
                    raise ValueError("its shards do not match its tensors")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(
                f"{path / name} is missing, broken or not of this checkpoint ({error}). "
                "Copy it again, or delete its folder and resume from an earlier step."
            ) from error
    return dcp.HuggingFaceStorageReader(str(path)).read_metadata()


def _mismatch(path: Path, tensors: dict[str, Tensor]) -> str | None:
    saved, problems = tensor_names(path), []
    for name, tensor in sorted(tensors.items()):
        here = f"{tuple(tensor.shape)} {tensor.dtype}"
        there = f"{tuple(saved[name][0])} {saved[name][1]}" if name in saved else "missing"
        if here != there:
            problems.append(f"{name} ({there}, wanted {here})")
    if not problems:
        return None
    more = f" and {len(problems) - 10:,} more" if len(problems) > 10 else ""
    return (
        f"{path} belongs to another model, algorithm or number of samples: {', '.join(problems[:10])}{more}. "
        "Resume with the settings that wrote it, or start a new run in another folder."
    )


def _on_first(function: Callable[[], T]) -> T:
    """What the function returns on worker 0, or CheckpointError: on every worker."""
    outcome: list = [None, None]  # what it returned, why it failed
    cause = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1], cause = _reason(error), error
    outcome = broadcast_object(outcome)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1]) from cause
    return outcome[0]


@contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    """Torch warns each time that there is no process group, though nothing is wrong."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"worker {rank}: {_reason(cause)}" for rank, (cause, _) in error.failures.items())


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a folder that ceases to look complete before the first of its files is gone."""
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
        log.warning("%s could not be deleted (%s); delete it yourself.", path, error)
