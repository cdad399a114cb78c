"""Profile with one rank, with two, …, each started on this machine; no process outlives the profile.

Every rank keeps its batch, as in the paper: the global batch grows with the number of ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from fastclip.processes import PROGRAM, children, free_port, start, wait
from fastclip.terminal import progress

_LAST_LINES = 4  # of a failed rank's log


class RankFailure(RuntimeError):
    """A profile in which ranks failed.

    Args:
        ranks: number of ranks that were started.
        logs: the log of each failed rank.
    """

    def __init__(self, ranks: int, logs: dict[int, Path]):
        self.ranks, self.logs = ranks, logs
        lines = [f"The profile with {ranks} rank{'s' if ranks > 1 else ''} failed."]
        for rank, path in logs.items():
            printed = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
            lines.append(f"rank {rank} ({path}):")
            lines += [f"  {line}" for line in printed[-_LAST_LINES:] or ["(no output)"]]
        super().__init__("\n".join(lines))


def profile_rank_counts(
    options: list[str],
    counts: list[int],
    local_batch: int,
    out: Path,
    traces: int,
    program: Sequence[str] | None = None,
) -> list[dict]:
    """Return the profile.json of each number of ranks, in OUT/workers-K with its traces and logs.

    The largest runs first, because it is the most likely to fail: the run may be too short for it.

    Args:
        options: of `fastclip profile`, the same for all.
        counts: numbers of ranks.
        local_batch: pairs per step on each rank.
        traces: number of traces that each rank writes, for the progress bar.
        program: command that runs fastclip.
    """
    profiles = {}
    with progress("profiling", "profiles") as update:
        for number, count in enumerate(sorted(counts, reverse=True)):
            folder = _emptied(out / f"workers-{count}")

            def show_progress(before: int = number * traces, folder: Path = folder) -> None:
                update(before + len(list(folder.glob("trace-*-rank0.json.gz"))), len(counts) * traces)

            own = [f"--batch.size={count * local_batch}", f"--out={folder}"]
            run_ranks([*(program or PROGRAM), "profile", *options, *own], count, folder, show_progress)
            profiles[count] = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    return [profiles[count] for count in counts]


def run_ranks(command: list[str], count: int, folder: Path, poll: Callable[[], None]) -> None:
    """Run a command as this many ranks, each with its output in FOLDER/rankN.log.

    Args:
        poll: called repeatedly until all ranks have ended.

    Raises:
        RankFailure: a rank failed; the others are stopped.
    """
    port = free_port()
    with children() as ranks:
        for rank in range(count):
            ranks.append(_start(command, rank, count, port, folder))
        if failed := wait(ranks, poll):
            raise RankFailure(count, {rank: _log(folder, rank) for rank in failed})


def _start(command: list[str], rank: int, count: int, port: int, folder: Path) -> subprocess.Popen:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # the same for every number of ranks
    own = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": threads} | {k: str(v) for k, v in place.items()}
    with open(_log(folder, rank), "wb") as log:
        return start(command, stdout=log, stderr=log, env=os.environ | own)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _emptied(folder: Path) -> Path:
    """The folder, without the files of an earlier profile."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("trace-*.json.gz", "rank*.log", "profile.*"):
        for path in folder.glob(name):
            path.unlink()
    return folder
