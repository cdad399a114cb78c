"""What the run lock costs a training step, and how many files a step opens: none.

Steps of the emoji recipe inside the lock, touched a hundred times as often as in training, alternate with
steps outside. Files that the training thread opens are counted by an audit hook of Python, except sources:
without a GPU torch.manual_seed formats a stack trace, which reads them once.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import torch

from benchmarks.record import interleaved, save
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.data.joining import Batch
from fastclip.distributed.world import World
from fastclip.run.lock import TOUCH_EVERY, RunLock
from fastclip.training.build import build_step, build_towers

SAMPLES, ROUNDS, STEPS, SEED = 20_000, 15, 5, 0


def main() -> None:
    torch.set_num_threads(1)
    world = World.alone()
    config = resolve(parse(["--config", "emoji"]))
    train_step = build_step(config, build_towers(config, world), SAMPLES, world)
    batch = _batch(train_step.towers, config.batch.size)
    opened: list[str] = []
    thread, counting = threading.get_ident(), False

    def count(event: str, arguments: tuple) -> None:
        if counting and event == "open" and threading.get_ident() == thread:
            opened.extend([str(arguments[0])] if not str(arguments[0]).endswith(".py") else [])

    sys.addaudithook(count)
    with tempfile.TemporaryDirectory() as folder:

        def steps() -> None:
            nonlocal counting
            counting = True
            for _ in range(STEPS):
                train_step(batch)
            counting = False

        def steps_in_lock() -> None:
            nonlocal counting
            with RunLock(Path(folder), world, touch_every=TOUCH_EVERY / 100) as lock:
                counting = True
                for _ in range(STEPS):
                    lock.check()
                    train_step(batch)
                counting = False

        train_step(batch)  # the checks of the first step
        seconds = interleaved({"without": steps, "with the lock": steps_in_lock}, ROUNDS)
    ratio = seconds["with the lock"] / seconds["without"]
    milliseconds = {name: round(1000 * value / STEPS, 2) for name, value in seconds.items()}
    figures = {"step_ms": milliseconds, "ratio": round(ratio, 3), "files_opened_in_a_step": len(opened)}
    print(figures)
    save("step_overhead", SEED, figures)


def _batch(towers, size: int) -> Batch:
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(size, 3, towers.image_size, towers.image_size, generator=generator)
    tokens = torch.randint(1, 400, (size, towers.context_length), generator=generator)
    index = torch.randperm(SAMPLES, generator=generator)[:size]
    return Batch(0, 0, images, tokens, None, index, group=index, bad=[])


if __name__ == "__main__":
    main()
