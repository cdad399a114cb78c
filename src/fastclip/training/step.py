"""One step of training: encode, the objective, backward, update. In micro-batches if the batch is too large.

Letters: b local batch, d features. Nothing here waits for the device, but for what `optim` says of float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import log
from typing import NamedTuple

import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastclip.data.order import seed_of
from fastclip.model import TwoTowers
from fastclip.objective.loss import GlobalContrastiveLoss, LossOutput
from fastclip.optim import Stepper

MAX_LOG_SCALE = log(100)  # open_clip's limit of its logit_scale


class PeerLoss(nn.Module):
    """open_clip's own losses, `openclip` and `siglip`, in the place of GlobalContrastiveLoss.

    Their temperature (and SigLIP's bias) is the model's own parameter, trained with it and averaged by DDP.
    The value is that of the worker's own rows, as open_clip's recommended options compute it.
    """

    gamma = None

    def __init__(self, algorithm: str, towers: TwoTowers, rank: int, world_size: int):
        super().__init__()
        if algorithm == "openclip":
            self.loss: nn.Module = ClipLoss(
                local_loss=True, gather_with_grad=True, cache_labels=True, rank=rank, world_size=world_size
            )
        else:
            self.loss = SigLipLoss(rank=rank, world_size=world_size)
        self.log_scale = towers.clip.logit_scale
        self.bias = towers.clip.logit_bias if algorithm == "siglip" else None

    def forward(self, image_features: Tensor, text_features: Tensor, index: Tensor) -> LossOutput:
        with torch.no_grad():
            self.log_scale.clamp_(0, MAX_LOG_SCALE)
        scale = self.log_scale.exp()
        value = self.loss(image_features, text_features, scale, self.bias)
        return LossOutput(value, {"loss": value.detach(), "tau": 1 / scale.detach()})

    def prefetch(self, index: Tensor) -> None:
        """There is nothing to fetch: it remembers nothing of a sample."""

    def gather_early(self, image_features: Tensor) -> None:
        """open_clip gathers both features at once, afterwards."""

    def set_epoch(self, epoch: int) -> None:
        """There is no γ."""

    def undo_step(self, skipped: Tensor | bool) -> None:
        """A skipped step has left no trace here."""

    def parameter_groups(self) -> list[dict]:
        """Its parameters are the model's."""
        return []


Loss = GlobalContrastiveLoss | PeerLoss


class StepResult(NamedTuple):
    """What a step tells, all of it on the device."""

    stats: dict[str, Tensor]
    finite: Tensor
    """Whether the update was made; a step with a non-finite loss or gradient leaves everything as it was."""


class TrainStep:
    """Brings the model, the loss and the optimizer one step further.

    Args:
        towers: the model, wrapped in DDP if there are several workers.
        micro: pairs that are encoded at a time; None encodes the whole local batch.
        autocast: the type in which the towers compute; None is the weights' own.
        seed, rank: all randomness of the model comes from (seed, step, rank, micro-batch).
    """

    def __init__(
        self,
        towers: nn.Module,
        loss: Loss,
        stepper: Stepper,
        *,
        micro: int | None,
        autocast: torch.dtype | None,
        seed: int,
        rank: int,
    ):
        self.towers, self.loss, self.stepper = towers, loss, stepper
        self.micro, self.autocast, self.seed, self.rank = micro, autocast, seed, rank

    def __call__(self, step: int, images: Tensor, tokens: Tensor, index: Tensor) -> StepResult:
        self.loss.prefetch(index)
        self.stepper.optimizer.zero_grad(set_to_none=True)
        if self.micro is None or self.micro >= len(images):
            out = self._whole(step, images, tokens, index)
        else:
            out = self._in_micro_batches(step, images, tokens, index)
        # A peer's value is its worker's own: workers agree on a skip by the gradients alone.
        value = torch.zeros_like(out.value) if isinstance(self.loss, PeerLoss) else out.value
        update = self.stepper.step(value.detach())
        self.loss.undo_step(~update.finite)
        return StepResult({**out.stats, "grad_norm": update.grad_norm}, update.finite)

    def _whole(self, step: int, images: Tensor, tokens: Tensor, index: Tensor) -> LossOutput:
        with self._precision(images):
            torch.manual_seed(seed_of(self.seed, step, self.rank, 0))
            features = self.towers(images, tokens, self.loss.gather_early)
            out = self.loss(*features, index)
        self._scaled(out.value).backward()
        return out

    def _in_micro_batches(self, step: int, images: Tensor, tokens: Tensor, index: Tensor) -> LossOutput:
        """The same update as of the whole batch: features first, one step of the loss, then gradients.

        Micro-batches are encoded twice, with the same randomness: without a graph to get all features, and
        again, one at a time, to bring the gradients of their features into the weights.
        """
        micro_batches = list(zip(images.split(self.micro), tokens.split(self.micro), strict=True))
        with torch.no_grad():
            encoded = [self._encode(step, i, *batch) for i, batch in enumerate(micro_batches)]
        image_bd, text_bd = (torch.cat(parts).requires_grad_() for parts in zip(*encoded, strict=True))
        with self._precision(images):
            out = self.loss(image_bd, text_bd, index)
        own: list[Tensor] = [p for p in self.loss.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(self._scaled(out.value), [image_bd, text_bd, *own])
        parts = zip(gradients[0].split(self.micro), gradients[1].split(self.micro), strict=True)
        for i, (batch, feature_gradients) in enumerate(zip(micro_batches, parts, strict=True)):
            last = i == len(micro_batches) - 1
            with nullcontext() if last else self._without_reduction():
                tensors, grads = [*self._encode(step, i, *batch)], [*feature_gradients]
                if last:  # the loss's own parameters come in with the pass that DDP reduces
                    tensors, grads = tensors + own, grads + list(gradients[2:])
                _backward(tensors, grads)
        return out

    def _encode(self, step: int, number: int, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # A context of its own each time: autocast's copies of weights without a graph must not be used again.
        with self._precision(images):
            torch.manual_seed(seed_of(self.seed, step, self.rank, number))
            return self.towers(images, tokens)

    def _precision(self, images: Tensor) -> AbstractContextManager:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(images.device.type, self.autocast)

    def _scaled(self, value: Tensor) -> Tensor:
        scaler = self.stepper.scaler
        return value if scaler is None else scaler.scale(value)

    def _without_reduction(self) -> AbstractContextManager:
        if isinstance(self.towers, DistributedDataParallel):
            return self.towers.no_sync()
        return nullcontext()


def _backward(tensors: list[Tensor], gradients: list[Tensor]) -> None:
    """Bring gradients into the graph, or the parameter, behind each tensor; a frozen tower has neither."""
    pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [g.to(t.dtype) for t, g in pairs])


def compile_towers(towers: TwoTowers) -> None:
    """torch.compile the towers in place; the names of their weights stay."""
    for tower in _towers(towers):
        tower.compile()


def _towers(towers: TwoTowers) -> Iterator[nn.Module]:
    for name in ("visual", "transformer", "text"):
        tower = getattr(towers.clip, name, None)
        if isinstance(tower, nn.Module):
            yield tower
