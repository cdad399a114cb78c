"""Files that are whole or not there, folders that one process builds, the cache, and work on all cores."""

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
_FEW = 4  # chunks that are not worth starting processes for


def cache_folder(*parts: str) -> Path:
    """A folder below $FASTCLIP_CACHE, by default ~/.cache/fastclip; made if missing."""
    root = os.environ.get("FASTCLIP_CACHE") or Path.home() / ".cache" / "fastclip"
    folder = Path(root).expanduser().joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_writable(folder: Path, advice: str = "Choose another --out.") -> None:
    """Make the folder, and find out now whether files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"The folder {folder} cannot be written: {error.strerror}. {advice}") from None


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` while one process builds it; others wait and find it built."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        yield


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `folder` when all is written, and goes away if not."""
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
    """A text file that is there whole, or as it was before."""
    part = aside(path)
    part.write_text(text, encoding="utf-8", newline="\n")
    part.replace(path)


def aside(path: Path) -> Path:
    """Where this process writes what will take the place of `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[Chunk], Result], chunks: Iterable[Chunk], jobs: int) -> Iterator[Result]:
    """work(chunk) of each chunk; `work` is a function of a module, or a partial of one. Few wait at once."""
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
