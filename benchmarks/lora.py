"""A training step with LoRA (rank 8) compared with full fine-tuning: time, memory, size of a checkpoint.

ViT-B-32 in float32, two ranks with 16 pairs each. Steps of both alternate in the same processes; times are
medians. Memory is the largest resident set of a rank that makes three steps of one of them.
"""

from __future__ import annotations

import argparse
import resource
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from benchmarks.record import save
from benchmarks.unpadded_text import captions
from fastclip.config.options import BatchConfig, LoraOptions, ModelConfig, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.model import build_model
from fastclip.training.build import build_step
from fastclip.training.step import TrainStep

SEED, SAMPLES, RANKS, BATCH = 0, 4096, 2, 16
CASES = {"full": 0, "lora": 8}


def make_step(world: World, rank: int) -> TrainStep:
    model = ModelConfig("ViT-B-32", "none", lora=LoraOptions(rank))  # random weights take as long
    config = resolve(TrainConfig(model=model, batch=BatchConfig(world.size * BATCH), seed=SEED))
    towers = build_model("ViT-B-32", device="cpu", lora=model.lora, tau=config.loss.tau, seed=SEED)
    towers.freeze_logit_scale()
    return build_step(config, towers, SAMPLES, world)


def run_step(step: TrainStep, number: int) -> float:
    """Seconds of a step over all ranks."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(BATCH, 3, 224, 224, generator=generator)
    tokens, index = captions([16] * BATCH), torch.randperm(SAMPLES, generator=generator)[:BATCH]
    dist.barrier()
    start = perf_counter()
    step.update(number, images, tokens, index, lengths=[16] * BATCH)
    dist.barrier()
    return perf_counter() - start


def times(rank: int, ranks: int, rounds: int) -> dict[str, list[float]]:
    world = World(rank, ranks, rank, torch.device("cpu"), dist.new_group(backend="gloo"))
    steps = {name: make_step(world, lora) for name, lora in CASES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            taken = run_step(step, number)
            if number:  # the first step is slower
                seconds[name].append(taken)
    return seconds


def memory(rank: int, ranks: int, lora: int) -> tuple[int, int]:
    """The largest resident set, and the bytes of a checkpoint without the state per sample."""
    world = World(rank, ranks, rank, torch.device("cpu"), dist.new_group(backend="gloo"))
    step = make_step(world, lora)
    for number in range(3):
        run_step(step, number)
    kept = {name: tensor.nbytes for name, tensor in step.tensors().items() if not name.startswith("loss.")}
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    seconds = run_ranks(times, RANKS, rounds, timeout=1800)[0]
    peaks, sizes = {}, {}
    for name, lora in CASES.items():
        (peaks[name], sizes[name]), *_ = run_ranks(memory, RANKS, lora, timeout=600)
    ratios = [a / b for a, b in zip(seconds["lora"], seconds["full"], strict=True)]
    figures = {
        "step_seconds": {name: round(median(of_case), 3) for name, of_case in seconds.items()},
        "time_ratio": round(median(ratios), 3),
        "peak_mib": {name: round(peak / 2**20) for name, peak in peaks.items()},
        "memory_ratio": round(peaks["lora"] / peaks["full"], 3),
        "checkpoint_mb": {name: round(size / 1e6, 1) for name, size in sizes.items()},
        "checkpoint_ratio": round(sizes["lora"] / sizes["full"], 4),
    }
    print(figures)
    save("lora", SEED, figures)


if __name__ == "__main__":
    main()
