"""`batch.micro: auto`: how many pairs fit on the device at a time, found by trial steps before training.

A trial is the forward and backward pass of a training step on the largest inputs that a batch may have. It
changes nothing of the run, and sends nothing: a rank that runs out of memory leaves no other one waiting.

Letters: b local batch, B = K·b global batch over K ranks, d features.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from open_clip.loss import SigLipLoss
from torch import Tensor
from torch.nn.functional import cross_entropy

from fastclip.config.resolved import Resolved
from fastclip.data.decode import ImageForm
from fastclip.distributed.world import World
from fastclip.objective.groups import groups_of
from fastclip.objective.kernel import Features, full_precision
from fastclip.objective.loss import GlobalContrastiveLoss
from fastclip.objective.loss_step import LossOutput
from fastclip.objective.one_step import Before, one_step
from fastclip.training.out_of_memory import gib, step_too_large
from fastclip.training.step import Inputs, Loss, OpenClipLoss, TrainStep

log = logging.getLogger(__name__)
MARGIN = 0.05  # of the device's memory that a trial leaves free: NCCL's buffers, fragmentation, the optimizer


def find_micro_batch(train_step: TrainStep, config: Resolved, world: World) -> int:
    """The first of b, b/2, b/4, … pairs with which a step fits on every rank; OutOfMemory if none does.

    All ranks must call it, before the towers are wrapped in DDP.
    """
    size = local_batch = config.batch.size // world.size
    if world.device_bytes is None:
        return _whole(local_batch, "a CPU reports no out-of-memory error")
    if train_step.towers.has_batch_norm_statistics:
        return _whole(local_batch, "BatchNorm's statistics depend on how a batch is split")
    while True:
        train_step.micro = size
        failure = _try(train_step, config, local_batch, world)
        free(train_step)  # after the exception, which holds the trial's tensors
        failures = [one for one in world.gather(failure) if one is not None]
        if not failures:
            break
        if size == 1:
            raise step_too_large(config, train_step, world, failures[0])
        size = (size + 1) // 2
    if config.model.compile is not False:
        torch.compiler.reset()  # or training would start with kernels for the trial's shapes
    counts, memory = f"{size:,} of {local_batch:,}", gib(world.device_bytes)
    log.info("batch.micro=auto: %s pairs at a time fit on %s (%s).", counts, world.device, memory)
    return size


def conditions(config: Resolved, world: World) -> dict[str, Any] | None:
    """What the size found depends on, and may change when a run resumes; None if nothing is to be found."""
    if config.batch.micro != "auto":
        return None
    options = {name: getattr(config.model, name) for name in ("gradient_checkpointing", "compile")}
    return {"ranks": world.size, "device_bytes": world.gather(world.device_bytes), **options}


def found_before(saved: dict | None, now: dict[str, Any] | None) -> int | None:
    """The size in a checkpoint's metadata, if it was found under the same conditions."""
    found = None if saved is None else saved.get("micro")
    if found is None or now is None or not now.items() <= found.items():
        return None
    log.info("batch.micro=auto: %s pairs at a time, as before.", f"{found['size']:,}")
    return found["size"]


def _whole(local_batch: int, why: str) -> int:
    log.info("batch.micro=auto: the whole batch, %s pairs at a time, as %s.", f"{local_batch:,}", why)
    return local_batch


def _try(train_step: TrainStep, config: Resolved, local_batch: int, world: World) -> str | None:
    """Run a trial step; return torch's message if the device runs out of memory."""
    gpus = [world.device] if world.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=gpus), _margin(world):
            inputs = largest_inputs(train_step, config, local_batch)
            following = torch.empty_like(inputs.images) if gpus else None  # copied to a GPU meanwhile
            train_step.backward(0, inputs, LocalStep(train_step.loss, world.size))
            del following
    except torch.OutOfMemoryError as error:
        return str(error)
    return None


@contextmanager
def _margin(world: World) -> Iterator[Tensor]:
    """Occupy the memory that is to stay free."""
    assert world.device_bytes is not None
    occupied = torch.empty(int(MARGIN * world.device_bytes), dtype=torch.uint8, device=world.device)
    yield occupied


def free(train_step: TrainStep) -> None:
    """Free the memory of a trial."""
    train_step.stepper.optimizer.zero_grad(set_to_none=True)
    if train_step.world.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(train_step.world.device)


def largest_inputs(train_step: TrainStep, config: Resolved, local_batch: int) -> Inputs:
    """Images as the loader gives them, whole unless all steps drop patches; captions of the whole context."""
    towers, decoder, device = train_step.towers, train_step.decoder, train_step.world.device
    side, length = towers.image_size, towers.context_length
    form = ImageForm((3, side, side), torch.float32) if decoder is None else decoder.form
    images = torch.zeros(local_batch, *form.shape, dtype=form.dtype, device=device)
    tokens = torch.zeros(local_batch, length, dtype=torch.int64, device=device)
    lengths, patches = None if towers.unpadded is None else [length] * local_batch, None
    if towers.keep_patches is not None and config.model.patch_dropout.until == 1:
        patches = torch.arange(towers.keep_patches.choice.kept, device=device).expand(local_batch, -1)
    return Inputs(images, tokens, lengths, patches)


class LocalStep:
    """A step of the loss with the memory it has on K ranks: copies of this rank's features replace others'.

    It reads and writes no state.
    """

    def __init__(self, loss: Loss, ranks: int):
        self.loss, self.ranks = loss, ranks

    def images(self, image_features: Tensor) -> None:
        """Nothing to send."""

    def forward(self, image_features: Tensor, text_features: Tensor) -> LossOutput:
        if isinstance(self.loss, OpenClipLoss):
            value = self._open_clip(self.loss, image_features, text_features)
        else:
            value = self._global(self.loss, image_features, text_features)
        return LossOutput(value, {}, self)

    def _global(self, loss: GlobalContrastiveLoss, image_bd: Tensor, text_bd: Tensor) -> Tensor:
        settings, B = loss.settings, len(image_bd) * self.ranks
        dtype = torch.float64 if image_bd.dtype == torch.float64 else torch.float32
        with torch.no_grad(), full_precision(image_bd.device):
            image, text = image_bd.detach().to(dtype), text_bd.detach().to(dtype)
            tau_B2 = torch.full((B, 2), settings.tau, dtype=dtype, device=image_bd.device)
            distinct = settings.negatives == "distinct"
            groups = groups_of(torch.arange(B, device=image_bd.device), dtype) if distinct else None
            after = one_step(
                settings,
                Features(image, text, self._gathered(image), self._gathered(text), offset=0),
                Before(loss.gamma, settings.rho_for(B), tau_B2, None, groups),
                lambda rows_bc, totals_2: (self._gathered(rows_bc), totals_2.expand(self.ranks, 2)),
                (image_bd.requires_grad, text_bd.requires_grad),
                int(loss.tile_mib * (1 << 20)),
            )
        inputs = image_bd, text_bd, loss.log_scale
        gradients = after.image_grad_bd, after.text_grad_bd, after.log_scale_grad
        pairs = zip(inputs, gradients, strict=True)
        parts = [(x * gradient).sum() for x, gradient in pairs if x is not None and gradient is not None]
        return torch.stack(parts).sum()  # a value that has these gradients

    def _open_clip(self, loss: OpenClipLoss, image_bd: Tensor, text_bd: Tensor) -> Tensor:
        """ClipLoss has the logits of both sides, SigLipLoss those of one rank's texts after another's."""
        scale = loss.log_scale.exp()
        if isinstance(loss.loss, SigLipLoss):
            others = (rank > 0 for rank in range(self.ranks))
            parts = [
                loss.loss._loss(image_bd, text_bd, scale, loss.bias, negative_only=one) for one in others
            ]
            return torch.stack(parts).sum()
        own = torch.arange(len(image_bd), device=image_bd.device)
        of_images = cross_entropy(scale * image_bd @ self._gathered(text_bd).T, own)
        return of_images + cross_entropy(scale * text_bd @ self._gathered(image_bd).T, own)

    def _gathered(self, rows: Tensor) -> Tensor:
        return rows if self.ranks == 1 else rows.repeat(self.ranks, 1)
