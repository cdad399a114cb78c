"""Time that digests add to saving and loading a checkpoint.

It holds ViT-B-32, AdamW's moments and the state of 10 million samples. Rounds with and without digests
are in random order. A disk's own delays only ever add time, and exceed the effect: ratios are of the fastest
rounds; medians are recorded too. A load is from the disk: the files are dropped from memory before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch

from benchmarks.record import save
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.run import checkpoint
from fastclip.training.build import build_step, build_towers

SAMPLES, SEED = 10_000_000, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: a temporary folder"
    )
    arguments = parser.parse_args()
    world = World.alone()
    config = resolve(parse(["--config", "cc12m-large", "--precision", "float32"]))
    tensors = build_step(config, build_towers(config, world), SAMPLES, world).tensors()
    size = sum(tensor.nbytes for tensor in tensors.values())
    figures: dict = {"megabytes": round(size / 1e6)}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        seconds = measure(Path(folder, "checkpoints"), tensors, arguments.rounds)
    for name in ("save", "load", "load_from_memory"):
        given, without = seconds[name, True], seconds[name, False]
        figures[name] = {
            "seconds": round(min(given), 2),
            "seconds_without": round(min(without), 2),
            "ratio": round(min(given) / min(without), 2),
            "median_seconds": round(median(given), 2),
            "median_seconds_without": round(median(without), 2),
        }
    print(figures)
    save("checkpoint_digest", SEED, figures)


def measure(
    folder: Path, tensors: dict[str, torch.Tensor], rounds: int
) -> dict[tuple[str, bool], list[float]]:
    """Seconds of each operation in every round, with digests and without."""
    times: dict[tuple[str, bool], list[float]] = {}
    order = Random(SEED).sample([True, False] * rounds, 2 * rounds)
    for number, digests in enumerate(order, start=1):
        skip_write = patch.object(checkpoint, "_digest_of_written", lambda file: "")
        skip_check = patch.object(checkpoint, "check_digest", checkpoint.check_size)
        shutil.rmtree(folder, ignore_errors=True)
        with nullcontext() if digests else skip_write, nullcontext() if digests else skip_check:
            start = perf_counter()
            path = checkpoint.Checkpoints(folder).save(number, tensors, {"step": number})
            times.setdefault(("save", digests), []).append(perf_counter() - start)
            for name in ("load", "load_from_memory"):
                if name == "load":
                    drop_from_memory(path)
                start = perf_counter()
                checkpoint.load(path, tensors)
                times.setdefault((name, digests), []).append(perf_counter() - start)
    return times


def drop_from_memory(folder: Path) -> None:
    """Make the system forget the contents of the files, so that they are read from the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
