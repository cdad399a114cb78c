"""Items that loader workers make, on torch's DataLoader: every error is one line, with its cause and advice.

torch reports a dead loader worker by an exception wherever the program happens to be: inside a save, or at
its exit. Here a death is noticed where items are awaited, and nowhere else. An error of ours in a loader
worker arrives as it was raised, not as text that holds a traceback.
"""

from __future__ import annotations

import errno
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from fastclip.data.machine import SHARED_MEMORY
from fastclip.data.prefetch import SmallSharedMemory
from fastclip.files import open_files_limit

_LOOK_EVERY = 1.0  # seconds between two looks at the loader workers, should a death have gone unheard
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_FEWER = "use fewer loader workers: --data.workers"
_LARGER = f"In a container, enlarge it with `docker run --shm-size` or pass --ipc=host; or {_FEWER}."
_OF_LAUNCHERS = {signal.SIGTERM, signal.SIGINT}  # sent to whole process groups
_OPEN_FILES = (errno.EMFILE, errno.ENFILE)


class StalledLoaderWorker(RuntimeError):
    """A loader worker has sent nothing for too long."""


class DeadLoaderWorker(RuntimeError):
    """A loader worker has exited before its work was done.

    `exitcode` is that of its process, negative for a signal; None if only its connection is known to be gone.
    """

    def __init__(self, message: str, exitcode: int | None = None):
        super().__init__(message)
        self.exitcode = exitcode


class TooManyOpenFiles(RuntimeError):
    """A process has as many open files as it may have."""

    def __init__(self, process: str):
        super().__init__(
            f"{process} has too many open files; {open_files_limit():,} are allowed. Raise the limit "
            f"(`ulimit -n 65536`, or LimitNOFILE of a service), or {_FEWER}."
        )
        self.process = process

    def __reduce__(self):
        return type(self), (self.process,)


class LoaderWorkers:
    """Iterates over the items of a dataset, in order.

    Args:
        items: their numbers.
        workers: loader workers; 0 makes the items in this process.
        per_worker: items in flight for each.
        timeout: seconds to wait for an item; 0 waits forever.
        stalled: the message after that time, for the n-th item of this iteration.
        reading: what a loader worker was reading, "sample 17 of a.tar", for the message about its crash.
    """

    def __init__(
        self,
        dataset: Dataset,
        items: range,
        *,
        workers: int,
        per_worker: int,
        pin_memory: bool,
        timeout: float = 0,
        stalled: Callable[[int], str] | None = None,
        reading: Callable[[int], str] | None = None,
    ):
        self.items, self.timeout, self.stalled, self.reading = items, timeout, stalled, reading
        self.loader = DataLoader(
            _Reporting(dataset),
            sampler=items,
            batch_size=None,  # the dataset makes whole items
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            timeout=_LOOK_EVERY if workers else 0,
            prefetch_factor=per_worker if workers else None,
            generator=torch.Generator(),  # otherwise it draws from the process's own
            worker_init_fn=_begin,
        )

    def __iter__(self) -> Iterator[Any]:
        if not self.loader.num_workers:
            yield from self.loader
            return
        kills = _memory_kills()
        received, processes = _start(self.loader)

        def died() -> DeadLoaderWorker | None:
            return _death(processes, self.reading, lambda: _memory_kills() > kills)

        try:
            for number in range(len(self.items)):
                yield self._next(received, number, died, processes)
        except Exception:
            _abandon(received, processes)
            raise

    def _next(self, received: Iterator[Any], number: int, died: Died, processes: Sequence[Any]) -> Any:
        deadline = time.monotonic() + (self.timeout or inf)
        while True:
            try:
                with _noticing(died):
                    item = next(received)
                break
            except DeadLoaderWorker:
                raise
            except (RuntimeError, OSError, EOFError) as error:
                if "DataLoader timed out" not in str(error):
                    raise self._translated(error, died, processes) from None
                if time.monotonic() > deadline:
                    text = "" if self.stalled is None else self.stalled(number)
                    raise StalledLoaderWorker(f"No batch for {self.timeout:g} s{text}") from None
        if isinstance(item, _Failure):
            item.error.add_note(item.traceback)
            raise item.error
        return item

    def _translated(self, error: Exception, died: Died, processes: Sequence[Any]) -> Exception:
        """What an error of torch or of the connection to a loader worker is about."""
        if _is_open_files(error):
            return TooManyOpenFiles("This process")
        if "in DataLoader worker process" in str(error):
            return error  # of a library, with its traceback
        if not isinstance(error, RuntimeError):  # a connection broke: its process may be just about to end
            wait([process.sentinel for process in processes], timeout=5)
        if (death := died()) is not None:
            return death
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in str(error):
            return error
        return DeadLoaderWorker(f"A loader worker died ({str(error).strip() or type(error).__name__}).")


Died = Callable[[], DeadLoaderWorker | None]


def _start(loader: DataLoader) -> tuple[Iterator[Any], list[Any]]:
    """Start the loader workers; torch's handler of SIGCHLD, which raises anywhere, is removed again."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if in_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_LAUNCHERS)  # inherited, until they leave the group
    try:
        received = iter(loader)
    except (RuntimeError, OSError) as error:
        if _is_open_files(error):
            raise TooManyOpenFiles("This process") from None
        if "DataLoader worker (pid" in str(error):  # torch's handler, in the few lines where it acts
            raise DeadLoaderWorker(f"A loader worker died at its start ({str(error).strip()}).") from None
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)
    return received, received._workers  # type: ignore[attr-defined]


@contextmanager
def _noticing(died: Died) -> Iterator[None]:
    """Raise DeadLoaderWorker as soon as a loader worker has died, also one that died before."""
    armed = True

    def on_child(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed and (death := died()) is not None:
            armed = False
            raise death
        if callable(before):
            before(number, frame)

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, on_child) if in_main else None
    try:
        if armed and (death := died()) is not None:
            raise death
        yield
    finally:
        armed = False
        if in_main:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


def _death(
    processes: Sequence[Any], reading: Callable[[int], str] | None, out_of_memory: Callable[[], bool]
) -> DeadLoaderWorker | None:
    """The error about the first loader worker that is gone."""
    for worker, process in enumerate(processes):
        code = process.exitcode
        if code is not None:
            sample = reading(worker) if reading is not None else ""
            return DeadLoaderWorker(f"A loader worker {_cause(code, sample, out_of_memory)}", code)
    return None


def _cause(code: int, sample: str, out_of_memory: Callable[[], bool]) -> str:
    at = f" at {sample}" if sample else ""
    if code >= 0:
        if code in _OPEN_FILES:
            return f"ended: it had too many open files. Raise the limit (`ulimit -n 65536`), or {_FEWER}."
        if code == errno.ENOSPC:
            return f"ended: {SHARED_MEMORY} is full. {_LARGER}"
        return f"ended with exit code {code}{at}. Its own message is above."
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        likely = "" if out_of_memory() else "most likely "
        return (
            f"was killed ({name}), {likely}because memory ran out. Give the job more memory, or {_FEWER}. "
            "The same command resumes."
        )
    if number == signal.SIGBUS:
        return f"died of {name}: {SHARED_MEMORY} may be full. {_LARGER}"
    if number in _CRASHES:
        return (
            f"crashed ({name}){at}: an image library is damaged, or cannot stand that file. Inspect the "
            "collection with `fastclip data check`, or reinstall Pillow and torchvision."
        )
    return f"was ended by {name}, which this run did not send. The same command resumes."


def _memory_kills() -> int:
    """How many processes of this cgroup were killed because memory ran out; 0 if that cannot be read."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return 0
    root = Path("/sys/fs/cgroup")
    for _, controllers, group in groups:
        if controllers and "memory" not in controllers.split(","):
            continue
        base, file = (root / "memory", "memory.oom_control") if controllers else (root, "memory.events")
        for folder in (base / group.lstrip("/"), base):
            try:
                rows = dict(line.split() for line in (folder / file).read_text().splitlines())
                return int(rows["oom_kill"])
            except (OSError, ValueError, KeyError):
                continue
    return 0


def _abandon(received: Any, processes: Sequence[Any]) -> None:
    """Kill the loader workers: torch's shutdown would wait, for one that stalls or a lock of a dead one."""
    received._shutdown = True
    _remove_worker_pids(id(received))
    received._worker_pids_set = False
    for process in processes:
        process.kill()


# In loader workers.


class _Failure(NamedTuple):
    """An error, sent in place of an item."""

    error: Exception
    traceback: str


class _Reporting(Dataset):
    """The same items; in a loader worker an error that needs no traceback is sent, not raised."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitem__(self, number: int) -> Any:
        try:
            return self.dataset[number]
        except Exception as error:
            clear = None if get_worker_info() is None else _clear(error)
            if clear is None:
                raise
            return _Failure(clear, traceback.format_exc())


def _clear(error: Exception) -> Exception | None:
    """An error that says all in one line and can be sent; None for others."""
    text = str(error)
    if _is_open_files(error):
        return TooManyOpenFiles("A loader worker")
    if isinstance(error, RuntimeError) and "allocate shared memory" in text:
        return SmallSharedMemory(SHARED_MEMORY, f"is full. {_LARGER}")
    if not isinstance(error, OSError | MemoryError) and not type(error).__module__.startswith("fastclip."):
        return None
    try:
        same = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error if str(same) == text else None


def _is_open_files(error: Exception) -> bool:
    """torch has several texts for it, and Python's own connections lose the descriptor silently."""
    if isinstance(error, OSError):
        return error.errno in _OPEN_FILES
    texts = ("Too many open files", "items of ancdata")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _unchanged(item: Any) -> Any:
    return item


def _begin(worker: int) -> None:
    """Leave the process group: signals of a launcher or Ctrl-C are for the trainer alone, which ends us."""
    os.setpgid(0, 0)
    while pending := signal.sigpending() & _OF_LAUNCHERS:  # those that came before
        signal.sigwait(pending)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_LAUNCHERS)
    Queue._on_queue_feeder_error = staticmethod(_end_with)  # type: ignore[attr-defined]


def _end_with(error: Exception, item: object) -> None:
    """An item that could not be sent would be awaited forever: end with an exit code that says why."""
    full = "No space left" in str(error) or "allocate shared memory" in str(error)
    code = errno.EMFILE if _is_open_files(error) else errno.ENOSPC if full else 1
    if code == 1:
        traceback.print_exception(error)
    os._exit(code)
