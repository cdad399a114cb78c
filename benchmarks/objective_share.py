"""The objective's share of a training step, on 2 ranks of one thread, compared with OpenCLIP's loss.

The objective is everything between features and their gradients: fetching the estimators, gathering
features, the kernel, writing back; for OpenCLIP its loss with both gathers, forward and backward. As in
training, the fetch and the image features travel while the encoders run, and only the host's time for
starting them counts. The ranks synchronise before the loss, so waiting for the slower one does not count.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from benchmarks.record import save
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.training.build import build_step, build_towers

RANKS, SEED = 2, 0
CASES = {  # local batch, steps
    "emoji": (["--config", "emoji"], 64, 40),
    "ViT-B-32": (["--config", "cc12m-large", "--precision", "float32", "--batch.size", "64"], 32, 2),
}
SAMPLES = 20_000


def main() -> None:
    figures: dict = {}
    for case, (options, local_batch, steps) in CASES.items():
        measured = run_ranks(_measure, RANKS, options, local_batch, steps, timeout=1200)[0]
        figures[case] = {"local_batch": local_batch, **measured}
        for algorithm, numbers in measured.items():
            print(f"{case:9s} {algorithm:12s} {numbers}", flush=True)
    save("objective_share", SEED, figures)


def _measure(rank: int, world_size: int, options: list[str], b: int, steps: int) -> dict:
    """Alternate the algorithms step by step, so a busy machine slows both equally."""
    world = World(rank, world_size, rank, torch.device("cpu"), dist.group.WORLD)
    steps_of = {}
    for algorithm in ("fastclip-v3", "openclip"):
        config = resolve(parse([*options, "--algorithm", algorithm]))
        steps_of[algorithm] = build_step(config, build_towers(config, world), SAMPLES, world)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps_of}
    for step in range(steps + 1):
        for name, train_step in steps_of.items():
            seconds = _step(train_step, step, b, rank)
            if step >= 1:
                times[name].append(seconds)
    figures = {}
    for name, seconds in times.items():
        objective, total = (median(column) for column in zip(*seconds, strict=True))
        figures[name] = {
            "objective_ms": round(1000 * objective, 2),
            "step_ms": round(1000 * total, 1),
            "share_percent": round(100 * objective / total, 2),
        }
    return figures


def _step(train_step, step: int, b: int, rank: int) -> tuple[float, float]:
    """Run one step by hand; return the seconds of the objective and of the step."""
    size, vocabulary = train_step.towers.image_size, 400
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(b, 3, size, size, generator=generator)
    tokens = torch.randint(1, vocabulary, (b, train_step.towers.context_length), generator=generator)
    index = torch.randint(0, SAMPLES, (b,), generator=generator)
    loss, early = train_step.loss, 0.0

    def send_images(features: torch.Tensor) -> None:
        nonlocal early
        began = perf_counter()
        begun.images(features)
        early = perf_counter() - began

    dist.barrier()
    start = perf_counter()
    begun = loss.begin(index)
    early_fetch = perf_counter() - start
    train_step.stepper.optimizer.zero_grad(set_to_none=True)
    features = train_step.model(images, tokens, send_images)
    encoded = perf_counter()
    dist.barrier()
    began = perf_counter()
    leaves = [x.detach().requires_grad_() for x in features]
    own = [p for p in loss.parameters() if p.requires_grad]
    out = begun.forward(*leaves)
    gradients = torch.autograd.grad(out.value, [*leaves, *own])
    objective = perf_counter() - began + early + early_fetch
    torch.autograd.backward([*features, *own], list(gradients))
    train_step.stepper.step(torch.zeros(()))
    return objective, perf_counter() - start - (began - encoded)


if __name__ == "__main__":
    main()
