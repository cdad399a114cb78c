"""Parts that compare numbers with float64 on the CPU, and look at how a step uses the GPU."""

from __future__ import annotations

import time
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Outcome
from fastclip.data.loader import Batch
from fastclip.distributed.world import World
from fastclip.objective.algorithms import ALGORITHMS
from fastclip.objective.loss import GlobalContrastiveLoss
from fastclip.training.build import build_step, build_towers
from fastclip.training.training_pairs import open_training_pairs

SEED = 0
LOSS_LIMIT = 1e-4  # relative error of a float32 loss and its gradients
GRADIENT_LIMITS = {"float32": 1e-3, "tf32": 3e-2, "bfloat16": 0.2, "float16": 5e-2}  # of all weights together


class Trained(NamedTuple):
    """A few steps of training."""

    losses: list[float]
    gradient: Tensor
    """Of all weights, in the first step."""
    seconds: float
    """Of a step, after the first ones."""


def losses_and_gradients(bench: Bench) -> Outcome:
    """Three steps of every algorithm's loss on the device in float32, against float64 on the CPU."""
    b, d, n = (32, 16, 64) if bench.short else (1024, 512, 4096)
    errors = {}
    for name, row in ALGORITHMS.items():
        if not row.peer:
            exact = _loss_steps(name, torch.device("cpu"), torch.float64, b, d, n)
            ours = _loss_steps(name, bench.device, torch.float32, b, d, n)
            errors[name] = max(_error(one, other) for one, other in zip(ours, exact, strict=True))
    worst = max(errors, key=lambda name: errors[name])
    found = f"largest relative error {errors[worst]:.1e} ({worst}), limit {LOSS_LIMIT:.0e}"
    return Outcome(errors[worst] <= LOSS_LIMIT, found, {"relative_errors": errors})


def _loss_steps(name: str, device: torch.device, dtype: torch.dtype, b: int, d: int, n: int) -> list[Tensor]:
    """Values and feature gradients of three steps, in float64."""
    generator, results = torch.Generator().manual_seed(SEED), []
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        loss = GlobalContrastiveLoss(name, n, device=device, tau=0.07, epochs=4)
    finally:
        torch.set_default_dtype(before)
    for _ in range(3):
        features = torch.randn(2, b, d, generator=generator, dtype=torch.float64)
        features = torch.nn.functional.normalize(features, dim=-1).float()  # the same numbers for both
        image, text = (part.to(device, dtype).requires_grad_() for part in features)
        index = torch.randperm(n, generator=generator)[:b].to(device)
        out = loss(image, text, index)
        out.value.backward()
        gradients = torch.stack([part.grad for part in (image, text) if part.grad is not None])
        results += [out.value.detach().double().cpu(), gradients.double().cpu()]
    return results


def steps_in_every_precision(bench: Bench) -> Outcome:
    """Loss and weight gradients of whole training steps in each precision, against float64 on the CPU."""
    exact = train_steps(bench, torch.device("cpu"), precision="float64")
    figures, good = {}, True
    for precision, limit in GRADIENT_LIMITS.items():
        if precision in ("tf32", "float16") and bench.device.type == "cpu":
            figures[precision] = "needs a GPU"
            continue
        ours = train_steps(bench, bench.device, precision=precision)
        gradient = _error(ours.gradient, exact.gradient)
        loss = max(abs(one / other - 1) for one, other in zip(ours.losses, exact.losses, strict=True))
        figures[precision] = {"gradient": gradient, "loss": loss, "limit": limit}
        good = good and gradient <= limit and loss <= limit
    found = ", ".join(
        f"{name} {value if isinstance(value, str) else format(value['gradient'], '.0e')}"
        for name, value in figures.items()
    )
    return Outcome(good, f"error of the gradients: {found}", {"relative_errors": figures})


def never_waits(bench: Bench) -> Outcome:
    """Training steps in a mode of torch's in which any wait of the host for the GPU is an error."""
    step, batches = _build(bench, bench.device, precision="bfloat16")
    for batch in batches[:2]:  # the first step checks its input
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[2:]:
            step(batch)
    except RuntimeError as error:
        return Outcome(False, str(error).partition("\n")[0], {"waits": True})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Outcome(True, f"{len(batches) - 2} steps without a wait", {"waits": False})


def pinned_memory(bench: Bench) -> Outcome:
    """The loader's batches are pinned, so that copies to the GPU overlap with its work."""
    _, batches = _build(bench, bench.device)
    tensors = [batches[0].images, batches[0].tokens, batches[0].index]
    pinned = all(tensor.is_pinned() for tensor in tensors)
    pageable = torch.empty(256 << 20, dtype=torch.uint8)
    speeds = {}
    for name, source in (("pageable", pageable), ("pinned", pageable.pin_memory())):
        source.to(bench.device)
        torch.cuda.synchronize()
        start = time.perf_counter()
        source.to(bench.device, non_blocking=True)
        torch.cuda.synchronize()
        speeds[name] = len(source) / (time.perf_counter() - start) / 1e9
    found = f"batches {'are' if pinned else 'are not'} pinned; " + ", ".join(
        f"{name} {speed:.1f} GB/s" for name, speed in speeds.items()
    )
    return Outcome(pinned, found, {"pinned": pinned, "gigabytes_per_second": speeds})


def compiled(bench: Bench) -> Outcome:
    """`--model.compile true` gives the losses of eager mode, and how much faster a step is."""
    eager = train_steps(bench, bench.device, precision="bfloat16")
    fast = train_steps(bench, bench.device, precision="bfloat16", model__compile="true")
    difference = max(abs(one / other - 1) for one, other in zip(fast.losses, eager.losses, strict=True))
    figures = {"loss_difference": difference, "time_ratio": fast.seconds / eager.seconds}
    found = f"losses differ by {difference:.0e}, a step takes {figures['time_ratio']:.2f} times as long"
    return Outcome(difference <= GRADIENT_LIMITS["bfloat16"], found, figures)


def train_steps(bench: Bench, device: torch.device, **changed: object) -> Trained:
    """Train from scratch for `bench.steps` steps."""
    step, batches = _build(bench, device, **changed)
    losses, gradient, start = [], torch.zeros(0), 0.0
    for number, batch in enumerate(batches):
        if number == len(batches) // 2:
            _synchronize(device)
            start = time.perf_counter()
        losses.append(step(batch).stats["loss"])
        if number == 0:
            parameters = [p for p in step.towers.parameters() if p.grad is not None]
            gradient = torch.cat([p.grad.double().cpu().flatten() for p in parameters])  # type: ignore[union-attr]
    _synchronize(device)
    seconds = (time.perf_counter() - start) / (len(batches) - len(batches) // 2)
    return Trained([loss.item() for loss in losses], gradient, seconds)


def _build(bench: Bench, device: torch.device, **changed: object) -> tuple:
    """A TrainStep and its batches; every precision starts from the same weights."""
    config, world = bench.config(**changed), World.alone(device)
    towers = build_towers(config, world)
    start = build_towers(bench.config(), World.alone())
    towers.load_state_dict(start.state_dict())
    pairs = open_training_pairs(config, towers, world)
    step = build_step(config, towers, len(pairs.manifest), world, pairs.decoder)
    batches: list[Batch] = list(islice(pairs.loader(config.data, world, 0, bench.steps), bench.steps))
    return step, batches


def _error(ours: Tensor, exact: Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
