"""One training step: encode, objective, backward, update; in micro-batches if the batch is too large.

Letters: b local batch, d features. Nothing here waits for the device, except as `optim` says for float16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import log
from typing import Any, NamedTuple, Protocol

import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastclip.data.decode import Decoder
from fastclip.data.joining import Batch
from fastclip.data.order import seed_of
from fastclip.distributed.world import World
from fastclip.model import TwoTowers
from fastclip.objective.algorithms import Settings
from fastclip.objective.loss import GlobalContrastiveLoss
from fastclip.objective.loss_step import LossOutput
from fastclip.optim import SLOW_TAU, Stepper, load_optimizer_tensors, optimizer_tensors, set_learning_rate
from fastclip.weight_average import WeightAverage

MAX_LOG_SCALE = log(100)  # open_clip's limit for logit_scale


class OpenClipLoss(nn.Module):
    """open_clip's own losses, `openclip` and `siglip`, with the interface of GlobalContrastiveLoss.

    Their temperature (and SigLIP's bias) is the model's own parameter, trained with it and averaged by DDP.
    The value is of the rank's own rows, as with open_clip's recommended options.
    """

    gamma = None

    def __init__(self, settings: Settings, towers: TwoTowers, rank: int, world_size: int):
        super().__init__()
        self.settings, self.algorithm = settings, settings.algorithm
        self.loss = _OPEN_CLIP_LOSSES[str(self.algorithm.peer)](rank=rank, world_size=world_size)
        self.log_scale = towers.clip.logit_scale
        self.bias = towers.clip.logit_bias if self.algorithm.logit_bias else None

    def begin(self, index: Tensor, group: Tensor | None = None) -> OpenClipStep:
        """Nothing to fetch: there is no state per sample, and all pairs are negatives."""
        return OpenClipStep(self)

    def forward(self, image_features: Tensor, text_features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The value, and the statistics to log."""
        with torch.no_grad():
            self.log_scale.clamp_(0, MAX_LOG_SCALE)
        scale = self.log_scale.exp()
        value = self.loss(image_features, text_features, scale, self.bias)
        return value, {"loss": value.detach(), "tau": 1 / scale.detach()}

    def set_epoch(self, epoch: int) -> None:
        """There is no γ."""

    def parameter_groups(self) -> list[dict]:
        """None: its parameters are the model's."""
        return []

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """None: its parameters are the model's."""
        return {}

    def load_state_dict(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        """Nothing to load."""

    def mean_tau(self) -> None:
        """None: it is a parameter of the model."""


# open_clip's recommended options
_OPEN_CLIP_LOSSES = {
    "ClipLoss": partial(ClipLoss, local_loss=True, gather_with_grad=True, cache_labels=True),
    "SigLipLoss": SigLipLoss,
}


class OpenClipStep(NamedTuple):
    """A step of a loss without state."""

    loss: OpenClipLoss

    def images(self, image_features: Tensor) -> None:
        """Nothing to do early: open_clip gathers both features together, in the loss."""

    def forward(self, image_features: Tensor, text_features: Tensor) -> LossOutput:
        value, stats = self.loss(image_features, text_features)
        return LossOutput(value, stats, self)

    def undo(self, skipped: Tensor | bool) -> None:
        """Nothing to undo: a skipped step changes no state here."""


Loss = GlobalContrastiveLoss | OpenClipLoss


class BegunStep(Protocol):
    """A step of a loss that has begun, and takes the features."""

    def images(self, image_features: Tensor) -> None: ...

    def forward(self, image_features: Tensor, text_features: Tensor) -> LossOutput: ...


class StepResult(NamedTuple):
    """The outcome of a step, all on the device."""

    stats: dict[str, Tensor]
    finite: Tensor
    """Whether the update was made; a step with a non-finite loss or gradient changes nothing."""


class Inputs(NamedTuple):
    """What the towers encode."""

    images: Tensor
    """As the decoder returns them: micro-batches are normalised one at a time."""
    tokens: Tensor
    lengths: list[int] | None
    """Of the captions, if their padding is left out."""
    patches: Tensor | None
    """Those to keep of each image, with patch dropout."""

    def split(self, size: int) -> list[Inputs]:
        """Micro-batches of `size` pairs."""
        rows = [slice(start, start + size) for start in range(0, len(self.images), size)]
        return [
            Inputs(
                self.images[some],
                self.tokens[some],
                None if self.lengths is None else self.lengths[some],
                None if self.patches is None else self.patches[some],
            )
            for some in rows
        ]


class TrainStep:
    """Updates the model, the loss and the optimizer, and saves and restores their state.

    Args:
        towers: the model.
        model: the same, wrapped in DDP if there are several ranks.
        lr: maps a step to its learning rate.
        average: of the weights; None: there is none.
        decoder: of the batches' images; None: they are as the model takes them.
        micro: pairs encoded at a time; None: the whole local batch.
        whole_images_from: the step from which no patches are dropped.
        autocast: dtype in which the towers compute; None: that of the weights.
        seed: all randomness of the model is derived from (seed, step, rank, micro-batch).
    """

    def __init__(
        self,
        towers: TwoTowers,
        model: nn.Module,
        loss: Loss,
        stepper: Stepper,
        *,
        lr: Callable[[int], float],
        average: WeightAverage | None = None,
        decoder: Decoder | None,
        micro: int | None,
        whole_images_from: int,
        autocast: torch.dtype | None,
        seed: int,
        world: World,
    ):
        self.towers, self.model, self.loss, self.stepper = towers, model, loss, stepper
        self.lr, self.decoder, self.world, self.whole_images_from = lr, decoder, world, whole_images_from
        self.micro, self.autocast, self.seed, self.average = micro, autocast, seed, average
        self._rate = lr(0)
        self._names = {parameter: f"model.{name}" for name, parameter in towers.named_parameters()}
        for group in loss.parameter_groups():
            self._names |= dict.fromkeys(group["params"], "loss.log_scale")

    def __call__(self, batch: Batch) -> StepResult:
        """Train on a batch from the loader."""
        self._rate = self.lr(batch.step)
        set_learning_rate(self.stepper.optimizer, self._rate)
        self.loss.set_epoch(batch.epoch)
        images = batch.images.to(self.world.device, non_blocking=True)
        tokens = batch.tokens.to(self.world.device, non_blocking=True)
        group = batch.group if self.loss.settings.negatives == "distinct" else None
        patches = None
        if batch.patches is not None and batch.step < self.whole_images_from:
            patches = batch.patches.to(self.world.device, non_blocking=True)
        return self.update(batch.step, images, tokens, batch.index, group, batch.lengths, patches)

    def update(
        self,
        step: int,
        images: Tensor,
        tokens: Tensor,
        index: Tensor,
        group: Tensor | None = None,
        lengths: list[int] | None = None,
        patches: Tensor | None = None,
    ) -> StepResult:
        """Encode, objective, backward, update, with the current learning rate and γ."""
        begun = self.loss.begin(index, group)
        self.stepper.optimizer.zero_grad(set_to_none=True)
        out = self.backward(step, Inputs(images, tokens, lengths, patches), begun)
        # The value of open_clip's losses is each rank's own: ranks agree on a skip by the gradients alone.
        value = torch.zeros_like(out.value) if self.loss.algorithm.peer else out.value
        update = self.stepper.step(value.detach())
        out.undo(~update.finite)
        if self.average is not None:
            self.average.update(step, update.finite)
        return StepResult({**out.stats, "grad_norm": update.grad_norm}, update.finite)

    def backward(self, step: int, inputs: Inputs, begun: BegunStep) -> LossOutput:
        """Encode, objective, backward: the gradients of all weights, and no update of them."""
        if self.micro is None or self.micro >= len(inputs.images):
            return self._whole(step, inputs, begun)
        return self._in_micro_batches(step, inputs, self.micro, begun)

    def rates(self, tau: float) -> dict[str, float]:
        """The learning rates and γ of the last step, for a record; `tau` is the temperature it used."""
        rates = {"lr": self._rate}
        if self.loss.gamma is not None and not self.loss.settings.adaptive:
            rates["gamma"] = self.loss.gamma
        row, tau_lr = self.loss.algorithm, self.loss.settings.tau_lr
        if row.temperature != "constant" and not row.peer:
            rates["tau_lr"] = tau_lr / 3 if row.slow_tau and tau < SLOW_TAU else tau_lr
        return rates

    def averaged(self) -> AbstractContextManager:
        """Inside, the towers have the weights to evaluate and export: the averages, if there are any."""
        return nullcontext() if self.average is None else self.average.in_place()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, not copied: model.…, ema.…, loss.… (with the state per sample), optimizer.…"""
        moments, _ = optimizer_tensors(self.stepper.optimizer, self._names)
        loss = self.loss.sharded_state_dict()
        parts = {"model": self.towers.checkpoint_state(), "loss": loss, "optimizer": moments}
        if self.average is not None:
            parts["ema"] = self.average.tensors()
        return {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}

    def tensors_of(self, saved: Collection[str]) -> dict[str, Tensor]:
        """The tensors that a checkpoint with these must have: one from before the average lacks it."""
        averaged = any(name.startswith("ema.") for name in saved)
        return {name: t for name, t in self.tensors().items() if averaged or not name.startswith("ema.")}

    def metadata(self) -> dict[str, object]:
        """State besides tensors: the optimizer's step count and the gradient scaler's values."""
        _, metadata = optimizer_tensors(self.stepper.optimizer, self._names)
        scaler = self.stepper.scaler
        return {"optimizer": metadata, "scaler": None if scaler is None else scaler.state_dict()}

    def load_state(self, tensors: dict[str, Tensor], metadata: dict) -> None:
        """Restore the state from `tensors` and `metadata`. All ranks must call it."""

        def named(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        self.towers.load_state_dict(named("model."), strict=not self.towers.adapted)
        if self.average is not None and (averages := named("ema.")):
            self.average.load(averages)
        elif self.average is not None:  # of a run that had none: it begins here
            self.average.restart()
        self.loss.load_state_dict(named("loss."))
        load_optimizer_tensors(
            self.stepper.optimizer, self._names, named("optimizer."), metadata["optimizer"]
        )
        if self.stepper.scaler is not None and metadata["scaler"] is not None:  # None: float16 is new
            self.stepper.scaler.load_state_dict(metadata["scaler"])

    def _whole(self, step: int, inputs: Inputs, begun: BegunStep) -> LossOutput:
        images = self._finished(inputs.images)
        with self._precision(images):
            torch.manual_seed(seed_of(self.seed, step, self.world.rank, 0))
            features = self.model(images, inputs.tokens, begun.images, inputs.lengths, inputs.patches)
            out = begun.forward(*features)
        self._scaled(out.value).backward()
        return out

    def _in_micro_batches(self, step: int, inputs: Inputs, micro: int, begun: BegunStep) -> LossOutput:
        """The same update as with the whole batch: all features, one step of the loss, then gradients.

        Micro-batches are encoded twice with the same randomness: first without a graph, for all features,
        then one at a time, to propagate the gradients of their features to the weights.
        """
        micro_batches = inputs.split(micro)
        with torch.no_grad():
            encoded = [self._encode(step, i, batch) for i, batch in enumerate(micro_batches)]
        image_bd, text_bd = (torch.cat(parts).requires_grad_() for parts in zip(*encoded, strict=True))
        with self._precision(inputs.images):
            out = begun.forward(image_bd, text_bd)
        own: list[Tensor] = [p for p in self.loss.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(self._scaled(out.value), [image_bd, text_bd, *own])
        parts = zip(gradients[0].split(micro), gradients[1].split(micro), strict=True)
        for i, (batch, feature_gradients) in enumerate(zip(micro_batches, parts, strict=True)):
            last = i == len(micro_batches) - 1
            with nullcontext() if last else self._without_reduction():
                tensors, grads = [*self._encode(step, i, batch)], [*feature_gradients]
                if last:  # the loss's own parameters join the pass that DDP reduces
                    tensors, grads = tensors + own, grads + list(gradients[2:])
                _backward(tensors, grads)
        return out

    def _encode(self, step: int, number: int, inputs: Inputs) -> tuple[Tensor, Tensor]:
        images = self._finished(inputs.images)
        # A new context each time: autocast must not reuse copies of weights that were made without a graph.
        with self._precision(images):
            torch.manual_seed(seed_of(self.seed, step, self.world.rank, number))
            return self.model(images, inputs.tokens, None, inputs.lengths, inputs.patches)

    def _finished(self, images: Tensor) -> Tensor:
        return images if self.decoder is None else self.decoder.finish(images, self.world.device)

    def _precision(self, images: Tensor) -> AbstractContextManager:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(images.device.type, self.autocast)

    def _scaled(self, value: Tensor) -> Tensor:
        scaler = self.stepper.scaler
        return value if scaler is None else scaler.scale(value)

    def _without_reduction(self) -> AbstractContextManager:
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()


def _backward(tensors: list[Tensor], gradients: list[Tensor]) -> None:
    """Propagate gradients from each tensor; those of a frozen tower have no graph and are skipped."""
    pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [g.to(t.dtype) for t, g in pairs])
