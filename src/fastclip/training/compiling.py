"""`model.compile`: torch.compile of the towers, by default on a GPU if a trial step compiles everywhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from textwrap import shorten

import torch
from torch import nn

from fastclip.config.resolved import Resolved
from fastclip.distributed.world import World
from fastclip.model import TwoTowers
from fastclip.training.micro_batch import LocalStep, free, largest_inputs
from fastclip.training.step import TrainStep

log = logging.getLogger(__name__)
AUTOMATIC = {"cuda"}  # types of device on which `auto` compiles
TRIAL = 4  # pairs


def compile_as_asked(train_step: TrainStep, config: Resolved, world: World) -> None:
    """Compile the towers if `model.compile` is true; if it is `auto`, on a GPU, after a trial.

    All ranks must call it, before the towers are wrapped in DDP. If the trial fails on any of them, all train
    without torch.compile, and the log says why.
    """
    asked = config.model.compile
    if asked is False or (asked == "auto" and not _may_compile(config, world)):
        return
    compile_towers(train_step.towers)
    if asked == "auto":
        failure = next(filter(None, world.gather(_try(train_step, config, world))), None)
        free(train_step)
        torch.compiler.reset()  # or training would start with kernels for the trial's shapes
        if failure:
            for tower in _towers(train_step.towers):
                tower._compiled_call_impl = None
            log.warning("Training without torch.compile, which failed: %s", failure)


def _may_compile(config: Resolved, world: World) -> bool:
    """Whether `auto` tries it. SyncBatchNorm communicates: a trial that fails would leave others waiting."""
    sync = config.model.batch_norm == "sync"
    return world.device.type in AUTOMATIC and not sync and not config.deterministic


def compile_towers(towers: TwoTowers) -> None:
    """Compile the towers in place; the names of their weights stay the same."""
    for tower in _towers(towers):
        tower.compile()


def is_compiled(towers: TwoTowers) -> bool:
    """Whether `compile_towers` was called."""
    return any(tower._compiled_call_impl is not None for tower in _towers(towers))


def uncompiled(towers: TwoTowers) -> AbstractContextManager:
    """Compiled towers run as they are inside: the batch sizes of an evaluation would make training's graphs
    dynamic, which is slower, and each would be compiled."""
    return torch.compiler.set_stance("force_eager") if is_compiled(towers) else nullcontext()


def _try(train_step: TrainStep, config: Resolved, world: World) -> str | None:
    """Train on a few pairs, with long and then with short captions; return the reason if it fails.

    Nothing of the run changes, and nothing is sent.
    """
    gpus = [world.device] if world.device.type == "cuda" else []
    inputs = largest_inputs(train_step, config, TRIAL)
    batches = [inputs]
    if inputs.lengths is not None:
        short = max(2, inputs.tokens.shape[1] // 2)
        batches.append(inputs._replace(tokens=inputs.tokens[:, :short], lengths=[short] * TRIAL))
    statistics = [(buffer, buffer.clone()) for buffer in train_step.towers.buffers()]  # of BatchNorm
    micro, train_step.micro = train_step.micro, None
    try:
        with torch.random.fork_rng(devices=gpus):
            for batch in batches:
                train_step.backward(0, batch, LocalStep(train_step.loss, world.size))
    except torch.OutOfMemoryError:
        return None  # the first step will say so, with advice
    except Exception as error:  # of dynamo, inductor, Triton or a compiler: each has its own
        return shorten(f"{type(error).__name__}: {error}", 300, placeholder=" …")
    finally:
        train_step.micro = micro
        for buffer, before in statistics:
            buffer.copy_(before)
    return None


def _towers(towers: TwoTowers) -> Iterator[nn.Module]:
    """The modules that forward calls; without padding, the layers inside a text tower of open_clip's."""
    clip = towers.clip
    yield clip.visual
    text = getattr(clip, "text", clip)
    yield text.transformer if text is clip or towers.unpadded is not None else text
