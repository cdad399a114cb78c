"""Speed of indexing tar shards: with two processes, and shared by two ranks, against one process.

Each run begins without a cache and includes the start of its processes. The shards are in the page cache, so
this measures the work of the cores. As of every collection over 4 GiB, a sample of the images is read.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.record import interleaved, save
from fastclip.datasets.resumable_build import write_tar

SHARDS, MEMBERS = 40, (("jpg", 1000), ("txt", 60), ("json", 500))  # as img2dataset writes them
INDEX = """
import sys
from fastclip.data import manifest
from fastclip.data.index_together import Crew
manifest.READ_WHOLE = 0  # bytes of images
manifest.open_manifest(sys.argv[1], crew=Crew(*map(int, sys.argv[2:])))
"""


def write_shards(folder: Path, pairs: int) -> None:
    folder.mkdir()
    for shard in range(SHARDS):
        members = (
            (f"{shard:05d}{i:05d}.{extension}", bytes(size))
            for i in range(pairs // SHARDS)
            for extension, size in MEMBERS
        )
        write_tar(folder / f"{shard:05d}.tar", members)


def index(folder: Path, cache: Path, ranks: int, jobs: int) -> None:
    """Index the shards in `ranks` processes that share a cache, with `jobs` of their own each."""
    shutil.rmtree(cache, ignore_errors=True)
    environment = os.environ | {"FASTCLIP_CACHE": str(cache)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", INDEX, str(folder), str(jobs), str(rank), str(ranks)], env=environment
        )
        for rank in range(ranks)
    ]
    failed = [process.wait() for process in started]  # of all, before the first failure is reported
    if any(failed):
        raise RuntimeError(f"indexing failed: {failed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=240_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary, "shards"), Path(temporary, "cache")
        write_shards(folder, options.pairs)
        run = partial(index, folder, cache)
        cases = {"one": partial(run, 1, 1), "processes": partial(run, 1, 2), "ranks": partial(run, 2, 1)}
        seconds = interleaved(cases, options.rounds)
    pairs = options.pairs // SHARDS * SHARDS
    figures = {
        "pairs": pairs,
        "shards": SHARDS,
        "one_process_seconds": round(seconds["one"], 2),
        "two_processes_seconds": round(seconds["processes"], 2),
        "two_ranks_seconds": round(seconds["ranks"], 2),
        "two_processes_speedup": round(seconds["one"] / seconds["processes"], 2),
        "two_ranks_speedup": round(seconds["one"] / seconds["ranks"], 2),
        "microseconds_per_pair_on_one_core": round(1e6 * seconds["one"] / pairs, 1),
    }
    print(figures)
    save("indexing", 0, figures)


if __name__ == "__main__":
    main()
