"""One step of a loss, as its callers see it: begin, image features early, forward, undo.

Shapes: b local batch, B global batch over all ranks, d features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastclip.objective import kernel, temperature
from fastclip.objective.exchange import Pending
from fastclip.objective.sample_state import Fetch, Written, on_device

if TYPE_CHECKING:
    from fastclip.objective.loss import GlobalContrastiveLoss


class UndoError(RuntimeError):
    """A step that cannot be undone, or no longer."""


class LossOutput(NamedTuple):
    """A step's result."""

    value: Tensor
    """The objective's mean over the global batch, equal on all ranks; call `.backward()` on it."""
    stats: dict[str, Tensor]
    """Scalars on the device, for the logs; see `GlobalContrastiveLoss`."""
    step: Any
    """The `LossStep` that computed it."""

    def undo(self, skipped: Tensor | bool) -> None:
        """Restore the estimators if the optimizer `skipped` this step, as it may with a GradScaler."""
        self.step.undo(skipped)


class LossStep:
    """One step of a loss: `begin` → `images` → `forward` → perhaps `undo`; `GlobalContrastiveLoss.begin`.

    If it is not for training, it neither reads nor writes estimators, and ignores `index`.
    """

    def __init__(
        self, loss: GlobalContrastiveLoss, index: Tensor | None, group: Tensor | None, training: bool
    ):
        loss._begun += training
        self.loss, self.number, self.training = loss, loss._begun, training
        self.index, self.group = index if training else None, group
        self.fetch: Fetch | None = None
        self._early_images: Pending | None = None
        self._written: Written | None = None

    def start_fetch(self, index: Tensor) -> None:
        """Start to gather the ids (and groups), then the estimators."""
        assert self.loss.sample_state is not None
        self.fetch = self.loss.sample_state.fetch(index, self.group)

    def images(self, image_features: Tensor) -> None:
        """Start to gather image features before the text encoder runs; pass the same ones to forward.

        Does nothing without gradients, so that a single rank may use the model for inference.
        """
        if torch.is_grad_enabled():
            self.loss._checks.batch(image_features.shape[0], self.loss.device, self.training)
            if self.fetch is not None:
                self.fetch.advance()
            self._early_images = self.loss._send(image_features)

    def forward(self, image_features: Tensor, text_features: Tensor) -> LossOutput:
        """The loss of the batch; in training updates its estimators, unless something is not finite."""
        loss, grad = self.loss, torch.is_grad_enabled()
        loss._checks.inputs(image_features, text_features, self.index, loss.device, self.training)
        loss._checks.group(self.group, self.training, len(image_features))
        if self.training and loss.log_scale is not None:
            temperature.clamp_log_scale_(loss.log_scale, loss.settings.tau_min)
        if self.fetch is None and loss.sample_state is not None and self.index is not None:
            self.start_fetch(self.index)
        needs = (grad and image_features.requires_grad, grad and text_features.requires_grad)
        with torch.no_grad(), kernel.full_precision(image_features.device):
            features = loss._gather_features(self._early_images, image_features, text_features)
            groups = self._gathered_groups()
            after, self._written = loss._step(features, self.fetch, groups, needs, self.training)
        self.fetch, self._early_images = None, None
        inputs = image_features, text_features, loss.log_scale
        gradients = after.image_grad_bd, after.text_grad_bd, after.log_scale_grad
        return LossOutput(_WithGradients.apply(*inputs, after.value, *gradients), after.stats, self)

    def _gathered_groups(self) -> Tensor | None:
        """Groups of the global batch; they come with the ids if these are fetched."""
        if self.group is None:
            return None
        if self.fetch is not None:
            self.fetch.advance()
            return self.fetch.group_B
        return self.loss.exchange.gather(on_device(self.group, self.loss.device)).wait()

    def undo(self, skipped: Tensor | bool) -> None:
        """Restore the estimators if the optimizer `skipped` this step, as it may with a GradScaler."""
        state = self.loss.sample_state
        if state is None or skipped is False:
            return
        if self.loss._begun != self.number:
            raise UndoError(
                "This step can no longer be undone: the next one has already read its estimators."
            )
        if self._written is None:
            raise UndoError("There is no step to undo: call undo once, after the step's forward.")
        written, self._written = self._written, None
        state.undo(written, torch.as_tensor(skipped))


class _WithGradients(torch.autograd.Function):
    """A value with precomputed gradients; backward only scales them, as a GradScaler requires."""

    @staticmethod
    def forward(ctx, image, text, log_scale, value, image_grad, text_grad, log_scale_grad):
        ctx.save_for_backward(image_grad, text_grad, log_scale_grad)
        ctx.dtypes = [None if x is None else x.dtype for x in (image, text, log_scale)]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        # Without retain_graph this runs once: scale in place, which saves a copy of the features' size.
        retained = torch._C._autograd._get_current_graph_task_keep_graph()
        scaled = [
            None if gradient is None else (gradient * scale if retained else gradient.mul_(scale)).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None
