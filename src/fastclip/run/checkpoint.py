"""Atomic checkpoints without pickle, saved and loaded with any number of ranks.

    RUN/checkpoints/step-00001234/rank-00000.safetensors    each rank's part of the tensors
                                  state.json                the caller's metadata, and every file's digest
                    last, best                              symlinks to a step
                    step-00001230.damaged/                  set aside: training resumed from an earlier step
                    step-00001230.decayed/                  set aside: the run was prolonged from before it

Ranks write into `step-00001234.part` on a shared filesystem; once everything is on disk, rank 0 renames the
folder. So a folder named after a step is complete, even after a power cut. Each replicated tensor is written
once, by one of the ranks; DTensors are written by their owners. The part files are listed in state.json; in
older checkpoints they are called worker-00000.safetensors. Whatever is loaded is compared with its digest.

With a process group, every rank must call these functions; an error on one rank is raised on all.
"""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from fastclip.distributed.world import broadcast_object, gather_objects
from fastclip.errors import InputError, PathError
from fastclip.files import free_name, remove_folder, sync
from fastclip.run.check_files import check, find_damage, raise_first, share_of_files
from fastclip.run.folder import complete_checkpoints
from fastclip.run.state_file import (
    DamagedCheckpoint,
    amend_state,
    check_size,
    read_state,
    tensor_files,
    write_state,
)
from fastclip.run.suspect import newest_trusted
from fastclip.run.tensor_writer import OFFSETS, TensorWriter

log = logging.getLogger(__name__)
T = TypeVar("T")
_LEFTOVER = re.compile(r"step-\d{8,}(\.part|\.old)+")  # left behind by a killed run


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
        keep: number of newest checkpoints to keep. The best, the last saved one and the newest that is not
            suspect are always kept.
        decay_from: the newest checkpoint up to this step is always kept too; None: there is no such step.
    """

    def __init__(self, folder: Path, keep: int = 2, decay_from: int | None = None):
        if keep < 1:
            raise InputError("keep", f"must be at least 1, not {keep}.")
        self.folder, self.keep, self.decay_from = Path(folder), keep, decay_from

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
                written = _write(part, tensors)
                _on_first(lambda: self._publish(path, part, metadata, written))
        except CheckpointError as error:
            _on_first(self._clean_up)
            newest = self.newest()
            hint = f"The run can be resumed from {newest}." if newest else "There is no earlier checkpoint."
            message = f"Step {step:,} could not be saved in {self.folder}: {error}. {hint}"
            raise CheckpointError(message, step=step, newest=newest) from error
        return path

    def amend(self, step: int, changes: dict) -> bool:
        """Change these values in the metadata of a saved step, atomically; False if the step is not saved."""
        return _on_first(lambda: self._amend(step, changes), step)

    def newest(self, until: int | None = None) -> Path | None:
        """The complete checkpoint with the highest step, or with the highest one up to `until`."""
        return _on_first(lambda: self._newest(until))

    def newest_undamaged(self) -> Path | None:
        """The complete checkpoint with the highest step whose files are as written.

        PathError if there are only damaged ones, else a warning about each that is skipped.
        """
        damage: list[tuple[Path, DamagedCheckpoint]] = []
        for path in reversed(_on_first(self._complete)):
            try:
                check(path)
            except DamagedCheckpoint as error:
                damage.append((path, error))
                continue
            for damaged, found in damage:
                log.warning(
                    "%s is damaged (%s). %s is set aside, and training resumes from %s.",
                    found.path,
                    found.reason,
                    damaged,
                    path.name,
                )
            return path
        if damage:
            newest = damage[0][1]
            raise PathError(
                newest.path,
                f"is damaged: {newest.reason}. No earlier checkpoint is undamaged. "
                "Copy it again from a backup, or choose another --out.",
            )
        return None

    def start_at(self, step: int, best: int | None, later: str = "damaged") -> None:
        """Prepare the folder for a run that continues from this step, with the best evaluation at `best`.

        Later checkpoints, which are damaged or not part of this run, are renamed to step-….damaged, or what
        `later` says. What a killed run left behind is deleted, and `last` and `best` are corrected: it may
        have died before it did so.
        """
        _on_first(lambda: self._start_at(step, best, later))

    def mark_best(self, step: int) -> None:
        """Point `best` at this step's checkpoint, which is then never deleted."""
        _on_first(lambda: self._mark_best(step), step)

    def mark_suspect(self, after: int, reason: str) -> None:
        """Mark the checkpoints that were saved after this step; see `suspect`."""
        _on_first(lambda: self._mark_suspect(after, reason))

    def newest_trusted(self) -> Path | None:
        """The complete checkpoint with the highest step that is not suspect; see `suspect`."""
        return _on_first(lambda: newest_trusted(self.folder))

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
            remove_folder(path)
        part.mkdir()
        return True

    def _publish(self, path: Path, part: Path, metadata: dict, written: dict[str, tuple[int, str]]) -> None:
        for name, (size, _) in written.items():
            file = part / name
            if not file.exists() or file.stat().st_size != size:
                raise OSError(f"rank 0 cannot see {file} as written; all ranks must share a filesystem")
        sizes = {name: size for name, (size, _) in written.items()}
        digests = {name: digest for name, (_, digest) in written.items()}
        sync(write_state(part, metadata, sizes, digests))
        sync(part)
        part.rename(path)
        self._link("last", path)
        self._prune()

    def _amend(self, step: int, changes: dict) -> bool:
        path = self.folder / f"step-{step:08d}"
        return path in self._complete() and amend_state(path, changes)

    def _complete(self) -> list[Path]:
        return complete_checkpoints(self.folder)

    def _newest(self, until: int | None) -> Path | None:
        saved = reversed(self._complete())
        return next((path for path in saved if until is None or _step(path) <= until), None)

    def _target(self, name: str) -> Path | None:
        """The complete checkpoint that a link points to."""
        link = self.folder / name
        target = self.folder / os.readlink(link) if link.is_symlink() else None
        return target if target in self._complete() else None

    def _start_at(self, step: int, best: int | None, later: str) -> None:
        if not self.folder.is_dir():
            return
        for path in self._complete():
            if _step(path) > step:
                path.rename(free_name(path.with_name(f"{path.name}.{later}")))
        complete = {_step(path): path for path in self._complete()}
        links = {"last": complete.get(step), "best": complete.get(-1 if best is None else best)}
        for name, target in links.items():
            if target is not None and self._target(name) != target:
                self._link(name, target)
            elif self._target(name) is None:
                (self.folder / name).unlink(missing_ok=True)  # it points to what does not exist
            (self.folder / f"{name}.new").unlink(missing_ok=True)
        self._clean_up()
        self._prune()

    def _mark_best(self, step: int) -> None:
        path = self.folder / f"step-{step:08d}"
        if path not in self._complete():
            saved = ", ".join(path.name for path in self._complete()) or "none"
            raise FileNotFoundError(f"step {step:,} has no checkpoint in {self.folder} (saved: {saved})")
        self._link("best", path)
        self._prune()  # the previous best

    def _mark_suspect(self, after: int, reason: str) -> None:
        for path in self._complete():
            if _step(path) > after:
                amend_state(path, {"suspect": reason})

    def _prune(self) -> None:
        old = self._complete()[: -self.keep]
        if not old:
            return
        needed = [self._target("last"), self._target("best"), newest_trusted(self.folder)]
        if self.decay_from is not None:
            needed.append(self._newest(self.decay_from))
        for path in old:
            if path not in needed:
                _try_to_remove(path)

    def _link(self, name: str, target: Path) -> None:
        new = self.folder / f"{name}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(target.name)
        new.replace(self.folder / name)
        sync(self.folder)

    def _clean_up(self) -> None:
        """Delete the remains of unfinished saves and deletions."""
        for path in sorted(self.folder.glob("step-*"), reverse=True):  # x.part.old before x.part
            if _LEFTOVER.fullmatch(path.name):
                _try_to_remove(path)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def tensor_names(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The full shape and dtype of each tensor in a checkpoint, from the headers of its files."""
    saved = _read_headers(Path(path)).state_dict_metadata
    return {name: (value.size, value.properties.dtype) for name, value in saved.items()}  # type: ignore[union-attr]


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill these tensors in place: plain ones with the full value, DTensors with this rank's shard.

    The checkpoint may hold more tensors. PathError on every rank if it does not fit or, as DamagedCheckpoint,
    if it is damaged; the tensors' values are then undefined. Digests are computed while tensors are read.
    """
    path, share = Path(path), share_of_files()
    with ThreadPoolExecutor(1) as pool:
        damage = pool.submit(find_damage, path, share)
        failed = _try_to_load(path, tensors)
    raise_first(gather_objects(damage.result()))  # the cause of any other error
    if failed is not None:
        raise failed


def _try_to_load(path: Path, tensors: dict[str, Tensor]) -> PathError | None:
    """Load the tensors; return an error instead of raising it, the same on every rank."""
    failed: PathError | None = None
    try:
        _check_fits(path, tensors)
    except PathError as error:
        failed = error
    if failed := next(filter(None, gather_objects(failed)), None):
        return failed
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _no_warning_of_one_process():
            dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(path)), planner=planner)
    except CheckpointException as error:
        return PathError(path, f"could not be read: {_reasons(error)}.")
    return None


def _write(part: Path, tensors: dict[str, Tensor]) -> dict[str, tuple[int, str]]:
    """Write the tensors; on rank 0, return the size and digest of every rank's file."""
    writer = TensorWriter(part)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _no_warning_of_one_process():
            dcp.save(tensors, storage_writer=writer, planner=planner)
    except CheckpointException as error:
        raise CheckpointError(_reasons(error)) from error
    return writer.files


def _read_headers(path: Path) -> Metadata:
    """The list of tensors, after checking that every file is there, of full size, with a valid header."""
    state = read_state(path)
    for name in tensor_files(path, state):
        check_size(path, name, state)
        try:
            with safe_open(path / name, "pt") as file:
                _check_offsets(json.loads(file.metadata()[OFFSETS]), file)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise DamagedCheckpoint(path / name, f"its header cannot be read ({error})") from error
    try:
        return dcp.HuggingFaceStorageReader(str(path)).read_metadata()
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise DamagedCheckpoint(path, f"its files do not belong together ({error!r})") from error


def _check_offsets(offsets: dict, file: safe_open) -> None:
    """ValueError if the offsets in a file's header are not those of its tensors."""
    if offsets.keys() != set(file.keys()):
        raise ValueError("its shards do not match its tensors")
    for name, shard in offsets.items():
        start, shape = shard["saved_offsets"], file.get_slice(name).get_shape()
        if len(start) != len(shape) or not all(isinstance(row, int) and row >= 0 for row in start):
            raise ValueError(f"{name} has the offsets {start}")


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


def _try_to_remove(path: Path) -> None:
    try:
        remove_folder(path)
    except OSError as error:
        log.warning("%s could not be deleted (%s). Delete it by hand.", path, error)
