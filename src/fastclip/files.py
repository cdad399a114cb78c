"""Atomic writes, folders that one process builds, the cache, and work on all cores."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
_FEW = 4  # chunks too few to start processes for


def cache_folder(*parts: str) -> Path:
    """A folder below $FASTCLIP_CACHE (default: ~/.cache/fastclip), created if missing."""
    root = os.environ.get("FASTCLIP_CACHE") or Path.home() / ".cache" / "fastclip"
    folder = Path(root).expanduser().joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_writable(folder: Path, advice: str = "Choose another --out.") -> None:
    """Create the folder and check that files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"The folder {folder} cannot be written: {error.strerror}. {advice}") from None


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` while building it; other processes wait and find it built."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        yield


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; it replaces `folder` when complete, and is removed on an error."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def atomic_write(path: Path, text: str) -> None:
    """Write a text file completely, or leave the previous one unchanged."""
    part = temporary_path(path)
    part.write_text(text, encoding="utf-8", newline="\n")
    part.replace(path)


def temporary_path(path: Path) -> Path:
    """The file that this process writes before renaming it to `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel_map(work: Callable[[Chunk], Result], chunks: Iterable[Chunk], jobs: int) -> Iterator[Result]:
    """Yield work(chunk) in the order of the chunks, computed by `jobs` processes with few chunks in flight.

    `work` is a function of a module, or a partial of one.
    """
    waiting = iter(chunks)
    first = list(islice(waiting, _FEW + 1))
    if jobs == 1 or len(first) <= _FEW:
        yield from map(work, first)
        yield from map(work, waiting)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        pending = deque(pool.submit(work, chunk) for chunk in [*first, *islice(waiting, jobs)])
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(work, chunk) for chunk in islice(waiting, 1))
