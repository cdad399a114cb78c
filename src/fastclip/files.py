"""Atomic writes, digests, folders that one process builds, the cache, and work on all cores."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

from filelock import BaseFileLock, FileLock, Timeout
from xxhash import xxh3_128

from fastclip.errors import PathError

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
_CACHE_ADVICE = "Set $FASTCLIP_CACHE to a folder that can be written, with room for the cache."
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of all cores, and of the period that they are for
_FEW = 4  # chunks too few to start processes for
_MOST_OPEN = 1 << 16  # descriptors: more than the shards of most collections
_BEAT = 1.0  # seconds between calls of those who wait


def cache_path(*parts: str) -> Path:
    """A path below $FASTCLIP_CACHE (default: ~/.cache/fastclip)."""
    root = os.environ.get("FASTCLIP_CACHE") or Path.home() / ".cache" / "fastclip"
    return Path(root).expanduser().joinpath(*parts)


def cache_folder(*parts: str) -> Path:
    """A folder below $FASTCLIP_CACHE, created if missing."""
    folder = cache_path(*parts)
    with _writing(folder, _CACHE_ADVICE):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_writable(folder: Path, advice: str = "Choose another --out.") -> None:
    """Create the folder and check that files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may be checking too
    except OSError as error:
        raise OSError(f"The folder {folder} cannot be written: {error.strerror}. {advice}") from None


@contextmanager
def build_lock(folder: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of `folder` while building it; other processes wait and find it built.

    Args:
        waiting: called every second while another process holds the lock; may raise.
    """
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    while not _acquire(lock, folder, _BEAT if waiting else -1):
        assert waiting is not None  # without a limit, the lock is acquired
        waiting()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether no other process holds this lock file, which this one holds inside, at most until it dies.

    A file system without locks grants every claim. FileNotFoundError if the folder is gone: filelock's locks
    would make it again.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            claimed = True
        except OSError as error:
            claimed = error.errno not in (errno.EAGAIN, errno.EACCES)
        yield claimed
    finally:
        os.close(descriptor)


def _acquire(lock: BaseFileLock, folder: Path, seconds: float) -> bool:
    cached = folder.is_relative_to(cache_path())
    with _writing(folder.parent, _CACHE_ADVICE if cached else "Choose another --out."):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=seconds)
        except Timeout:
            return False
    return True


@contextmanager
def _writing(folder: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PathError(folder, f"cannot be written: {error.strerror}. {advice}") from None


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; it replaces `folder` when complete, and is removed on an error.

    After a kill at any moment, `folder` is the complete old or new one, or the old one is complete in
    `.NAME.old`, from where the next call restores it. What is called `NAME.part` is never needed again.
    """
    part, old = folder.with_name(f"{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    _finish_replacing(folder, part, old)
    part.mkdir(parents=True)
    try:
        yield part
        for path in [*part.rglob("*"), part]:
            sync(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    sync(folder.parent)
    _finish_replacing(folder, part, old)


def _finish_replacing(folder: Path, part: Path, old: Path) -> None:
    """Restore the old folder if there is no new one, and delete what is not needed."""
    shutil.rmtree(part, ignore_errors=True)
    if not old.exists():
        return
    if not folder.exists():
        old.rename(folder)
        return
    old.rename(part)  # `old` must be complete whenever it exists, and deleting it takes several operations
    shutil.rmtree(part, ignore_errors=True)


def free_name(path: Path) -> Path:
    """The path, or path-2, path-3, … if it exists."""
    names = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000)))
    return next(name for name in names if not name.exists())


def remove_folder(path: Path) -> None:
    """Delete a folder, renaming it first: one that is half deleted must not look complete."""
    if not path.name.endswith(".old"):
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        sync(path.parent)
        path = old
    shutil.rmtree(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, text: str) -> None:
    """Write a text file completely, or leave the previous one unchanged."""
    part = temporary_path(path)
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError:  # a full disk
        part.unlink(missing_ok=True)
        raise


def temporary_path(path: Path) -> Path:
    """The file that this process writes before renaming it to `path`."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")


def file_digest(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """The XXH3 digest of a file's bytes, 128 bits in hex, as `xxh128sum` prints it.

    The file is read, not mapped into memory: a disk that cannot read a sector raises OSError, and does not
    kill the process.

    Args:
        progress: called with the number of bytes read since the last call.
    """
    digest, buffer = xxh3_128(), bytearray(1 << 20)  # fits a core's cache
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
            if progress is not None:
                progress(size)
    return digest.hexdigest()


@cache
def open_files_limit() -> int:
    """The number of descriptors that this process may have, after raising it as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_OPEN
    wanted = _MOST_OPEN if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN)
    if soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a system with a lower limit than it reports
        return soft
    return wanted


def cores() -> int:
    """The number of cores that this process may use; in a container, at most the time it was given."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        return allowed


def parallel_map(
    work: Callable[[Chunk], Result],
    chunks: Iterable[Chunk],
    jobs: int,
    *,
    few: int = _FEW,
    ahead: int | None = None,
    waiting: Callable[[], None] | None = None,
) -> Iterator[Result]:
    """Yield work(chunk) in the order of the chunks, computed by `jobs` processes with few chunks in flight.

    The processes end when this one does, however it ends, and when the caller fails or takes no more results.

    Args:
        work: a function of a module, or a partial of one.
        few: chunks that this process works on itself.
        ahead: results that may wait while an earlier chunk takes long; default: one per process.
        waiting: called every second while a result is awaited; may raise.
    """
    remaining = iter(chunks)
    first = list(islice(remaining, few + 1))
    if jobs == 1 or len(first) <= few:
        yield from map(work, first)
        yield from map(work, remaining)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_obey_parent)
    try:
        pending = deque(pool.submit(work, chunk) for chunk in [*first, *islice(remaining, ahead or jobs)])
        while pending:
            while waiting and not wait(list(pending)[:1], _BEAT).done:
                waiting()
            yield pending.popleft().result()
            pending.extend(pool.submit(work, chunk) for chunk in islice(remaining, 1))
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _obey_parent() -> None:
    """End when the parent is gone; on Ctrl-C, which reaches all processes of a terminal, wait for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
