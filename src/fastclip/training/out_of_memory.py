"""A device that runs out of memory: what was tried, and what to do, most effective first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fastclip.config.resolved import Resolved
from fastclip.distributed.world import World
from fastclip.training.step import TrainStep


class OutOfMemory(RuntimeError):
    """A device has too little memory.

    Args:
        world: the device's.
        tried: what does not fit.
        advice: what to do, most effective first.
        reason: torch's own words.
    """

    def __init__(self, world: World, tried: str, advice: list[str], reason: str):
        self.tried, self.advice, self.reason = tried, advice, reason
        size = "" if world.device_bytes is None else f" ({gib(world.device_bytes)})"
        super().__init__(
            f"{world.device}{size} has too little memory for {tried}. "
            f"Try, most effective first: {'; '.join(advice)}. torch says: {reason}"
        )


@contextmanager
def explained(explain: Callable[[str], OutOfMemory]) -> Iterator[None]:
    """Turn torch's error, raised inside, into one with advice: `explain` of torch's message."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise explain(str(error)) from error


def model_too_large(config: Resolved, world: World, reason: str) -> OutOfMemory:
    """Before the first step: no option of the batch helps."""
    tried = f"the weights of {config.model.name}, the state of {config.optim.name} and the estimators"
    advice = ["end other processes on this device", "a smaller --model.name", "a device with more memory"]
    return OutOfMemory(world, tried, advice, reason)


def step_too_large(config: Resolved, train_step: TrainStep, world: World, reason: str) -> OutOfMemory:
    """In a training step, or in the smallest trial step of `batch.micro: auto`."""
    local = config.batch.size // world.size
    micro = min(train_step.micro or local, local)
    advice = ["more ranks", "a smaller --batch.size"]
    if not config.model.gradient_checkpointing:
        advice.insert(0, "--model.gradient_checkpointing true")
    if config.precision not in ("bfloat16", "float16"):
        advice.insert(0, "--precision bfloat16")
    if micro == 1:
        advice.append("a smaller --model.name")
    elif not train_step.towers.has_batch_norm_statistics:
        untried = micro == local and config.batch.micro != "auto"
        advice.insert(0, f"--batch.micro {'auto' if untried else micro // 2}")
    pairs = f"{local:,} pairs per rank" + ("" if micro == local else f", {micro:,} at a time")
    tried = f"a step of {config.model.name} in {config.precision} with {pairs}"
    return OutOfMemory(world, tried, advice, reason)


def evaluation_too_large(config: Resolved, world: World, reason: str) -> OutOfMemory:
    """In an evaluation, whose batches are not those of training."""
    advice = ["training without --evaluate.pairs and --evaluate.tasks, and `fastclip eval` afterwards"]
    if config.precision not in ("bfloat16", "float16"):
        advice.insert(0, "--precision bfloat16")
    return OutOfMemory(world, f"an evaluation of {config.model.name} in {config.precision}", advice, reason)


def gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
