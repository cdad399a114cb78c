"""Time to save a checkpoint, compared with a plain write of as many bytes.

It holds ViT-B-32, AdamW's moments and the state of 10 million samples. Both are flushed to disk (fsync)
alternately; times are medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks.record import interleaved, save
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.run.checkpoint import Checkpoints
from fastclip.training.build import build_step, build_towers

SAMPLES = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: a temporary folder"
    )
    arguments = parser.parse_args()
    world = World(0, 1, 0, torch.device("cpu"), None)
    config = resolve(parse(["--config", "cc12m-large", "--precision", "float32"]))
    tensors = build_step(config, build_towers(config, world), SAMPLES, world).tensors()
    size = sum(tensor.nbytes for tensor in tensors.values())
    data = memoryview(torch.zeros(64 << 20, dtype=torch.uint8).numpy())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        step = 0

        def checkpoint() -> None:
            nonlocal step
            step += 1
            shutil.rmtree(Path(folder, "checkpoints"), ignore_errors=True)
            Checkpoints(Path(folder, "checkpoints")).save(step, tensors, {"step": step})

        def plain() -> None:
            Path(folder, "plain").unlink(missing_ok=True)
            with Path(folder, "plain").open("wb", buffering=0) as file:
                for start in range(0, size, len(data)):
                    file.write(data[: min(len(data), size - start)])
                os.fsync(file.fileno())

        seconds = interleaved({"checkpoint": checkpoint, "plain": plain}, arguments.rounds)
    figures = {
        "megabytes": round(size / 1e6),
        "checkpoint_seconds": round(seconds["checkpoint"], 2),
        "plain_write_seconds": round(seconds["plain"], 2),
        "ratio": round(seconds["checkpoint"] / seconds["plain"], 2),
    }
    print(figures)
    save("checkpoint_save", 0, figures)


if __name__ == "__main__":
    main()
