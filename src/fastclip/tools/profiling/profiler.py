"""Run the trainer's own steps under torch.profiler and write the trace of each rank.

A step is that of `fastclip train`: the same loader, towers, loss, optimizer and DDP. What happens between
steps is excluded: metrics, evaluation, checkpoints, polling for a stop.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from functools import partial
from math import ceil
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from fastclip.config.resolved import Resolved
from fastclip.distributed.world import World
from fastclip.errors import OptionError
from fastclip.terminal import progress
from fastclip.tools.profiling.breakdown import RankProfile
from fastclip.tools.profiling.collectives import bytes_sent
from fastclip.tools.profiling.peak_memory import PeakMemory
from fastclip.tools.profiling.timeline import WAITING_FOR_DATA, read_events, step_times
from fastclip.training.build import build_step, build_towers
from fastclip.training.out_of_memory import explained, step_too_large
from fastclip.training.training_pairs import open_training_pairs


def profile_steps(config: Resolved, world: World, trace: Path, *, steps: int, warmup: int) -> RankProfile:
    """Build a new run and profile its first steps.

    Args:
        trace: file for this rank's trace; compressed if it ends in .gz.
        steps: number of steps to measure.
        warmup: steps before them, in which memory is allocated and caches fill.
    """
    peak = PeakMemory(world.device)
    with (
        progress(f"profiling {config.algorithm}", "steps") as update,
        closing(_steps(config, world, steps, warmup)) as turns,
        _profiler(world, steps, warmup) as profiler,
    ):
        for done in range(1, warmup + steps + 1):
            next(turns)
            if done == warmup:
                memory = peak.bytes()  # before the profiler allocates its own
                world.barrier()
            if done in (warmup, warmup + steps) and world.device.type == "cuda":
                torch.cuda.synchronize(
                    world.device
                )  # or a kernel may run into the first step or past the last
            profiler.step()
            if world.is_main:
                update(done, warmup + steps)
        sent = bytes_sent(lambda: next(turns))
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    times = step_times(read_events(trace), world.device.type)
    return RankProfile(world.rank, times, sent, memory, peak.what)


def _steps(config: Resolved, world: World, steps: int, warmup: int) -> Generator[None, None, None]:
    """Run the first steps, one at a time; the one after the measured steps is for counting bytes."""
    count = warmup + steps + 1
    towers = build_towers(config, world)
    pairs = open_training_pairs(config, towers, world)
    num_samples = len(pairs.manifest)
    if count > (total := config.total_steps(num_samples)):
        epochs = ceil(count * config.batch.size / num_samples)
        raise OptionError(
            "steps",
            steps,
            f"requires a run of {count:,} steps with warmup, but this run has {total:,}",
            advice=f"Pass --epochs {epochs}, a smaller --batch.size, or fewer --steps.",
        )
    train_step = build_step(config, towers, num_samples, world, pairs.decoder)
    batches = iter(pairs.loader(config.data, world, 0, count))
    for _ in range(count):
        with record_function(WAITING_FOR_DATA):
            batch = next(batches)
        with explained(partial(step_too_large, config, train_step, world)):
            train_step(batch)
        yield


def _profiler(world: World, steps: int, warmup: int) -> profile:
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (world.device.type == "cuda")]
    return profile(activities=activities, schedule=schedule(wait=0, warmup=warmup, active=steps, repeat=1))
