"""The same profile with one worker, with two, …: started here, on this machine, none of them left behind.

Every worker keeps its batch, as in the paper: the global batch grows with the number of workers. A worker
ends with this process, even with one that is killed: see study/leash.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastclip.terminal import progress
from fastclip.tools.study.jobs import PROGRAM

_PAUSE = 0.1  # seconds between two looks at the processes
_PATIENCE = 5.0  # seconds that a worker has to end by itself
_LAST_LINES = 4  # of what a failed worker said


def profile_sizes(words: list[str], sizes: list[int], local_batch: int, out: Path, traces: int) -> list[dict]:
    """The profile.json of each size, in OUT/workers-K with its traces and what its workers printed.

    The largest comes first: what fails, such as a run that is too short for it, fails there.

    Args:
        words: options of `fastclip profile` for all sizes.
        local_batch: pairs a step on each worker.
        traces: how many each worker writes, for the display.
    """
    profiles = {}
    with progress("profiling", "algorithms and sizes") as update:
        for number, size in enumerate(sorted(sizes, reverse=True)):
            folder = _emptied(out / f"workers-{size}")

            def look(before: int = number * traces, folder: Path = folder) -> None:
                update(before + len(list(folder.glob("trace-*-rank0.json.gz"))), len(sizes) * traces)

            own = [f"--batch.size={size * local_batch}", f"--out={folder}"]
            run_workers([*PROGRAM, "profile", *words, *own], size, folder, look)
            profiles[size] = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    return [profiles[size] for size in sizes]


def run_workers(command: list[str], size: int, folder: Path, look: Callable[[], None]) -> None:
    """Run a command as so many workers; each prints to FOLDER/rankN.log. RuntimeError if one fails."""
    workers: list[subprocess.Popen] = []
    port = _free_port()
    with _stoppable():
        try:
            for rank in range(size):
                workers.append(_start(command, rank, size, port, folder))
            while any(worker.poll() is None for worker in workers) and not any(w.poll() for w in workers):
                look()
                time.sleep(_PAUSE)
            if failed := [rank for rank, worker in enumerate(workers) if worker.poll()]:
                raise RuntimeError(_what_they_said(failed, size, folder))
        finally:
            _end(workers)


def _start(command: list[str], rank: int, size: int, port: int, folder: Path) -> subprocess.Popen:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # the same for every size
    with open(folder / f"rank{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fastclip.processes", str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | threads | {name: str(value) for name, value in place.items()},
            process_group=0,  # Ctrl-C reaches this process alone, which ends them
        )


def _end(workers: list[subprocess.Popen]) -> None:
    """There is nothing to save: who still runs is told to end, and killed if it does not."""
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + _PATIENCE
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def _what_they_said(failed: list[int], size: int, folder: Path) -> str:
    lines = [f"With {size} worker{'s' if size > 1 else ''} the profile failed."]
    for rank in failed:
        path = folder / f"rank{rank}.log"
        said = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        lines += [f"worker {rank} ({path}):", *(f"  {line}" for line in said[-_LAST_LINES:] or ["(nothing)"])]
    return "\n".join(lines)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: workers are cleaned up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _emptied(folder: Path) -> Path:
    """The folder, without what an earlier profile left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("trace-*.json.gz", "rank*.log", "profile.*"):
        for path in folder.glob(name):
            path.unlink()
    return folder


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
