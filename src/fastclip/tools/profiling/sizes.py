"""The same profile with one rank, with two, …: started here, on this machine, none of them left behind.

Every rank keeps its batch, as in the paper: the global batch grows with the number of ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from fastclip.processes import PROGRAM, children, free_port, start, wait
from fastclip.terminal import progress

_LAST_LINES = 4  # of a failed rank's log


def profile_sizes(words: list[str], sizes: list[int], local_batch: int, out: Path, traces: int) -> list[dict]:
    """The profile.json of each size, in OUT/workers-K with its traces and logs.

    The largest comes first: what fails, such as a run that is too short for it, fails there.

    Args:
        words: options of `fastclip profile` for all sizes.
        local_batch: pairs a step on each rank.
        traces: how many each rank writes, for the display.
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
    """Run a command as so many ranks; each prints to FOLDER/rankN.log. RuntimeError if one fails."""
    port = free_port()
    with children() as ranks:
        for rank in range(size):
            ranks.append(_start(command, rank, size, port, folder))
        if failed := wait(ranks, look):
            raise RuntimeError(_failure(failed, size, folder))


def _start(command: list[str], rank: int, size: int, port: int, folder: Path) -> subprocess.Popen:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # the same for every size
    own = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": threads} | {k: str(v) for k, v in place.items()}
    with open(folder / f"rank{rank}.log", "wb") as log:
        return start(command, stdout=log, stderr=log, env=os.environ | own)


def _failure(failed: list[int], size: int, folder: Path) -> str:
    lines = [f"With {size} worker{'s' if size > 1 else ''} the profile failed."]
    for rank in failed:
        path = folder / f"rank{rank}.log"
        said = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        lines += [f"worker {rank} ({path}):", *(f"  {line}" for line in said[-_LAST_LINES:] or ["(nothing)"])]
    return "\n".join(lines)


def _emptied(folder: Path) -> Path:
    """The folder, without what an earlier profile left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("trace-*.json.gz", "rank*.log", "profile.*"):
        for path in folder.glob(name):
            path.unlink()
    return folder
