"""`model.ema`: an exponential moving average of the trained weights, used in their place outside of training.

The average of step t moves by 1 − min(decay, (1 + t)/(10 + t)) towards the weights: the first steps count
little, as the average would otherwise hold on to the initial weights for 1/(1 − decay) steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from fastclip.errors import InputError


class WeightAverage:
    """The averages of all parameters that are trained; they start as copies.

    BatchNorm's statistics are averages already: those of training go with the averaged weights.

    Args:
        named: from `model.named_parameters()`; frozen ones have no average.
        decay: the share of the average that a step keeps, in the long run.
    """

    def __init__(self, named: Iterable[tuple[str, Parameter]], decay: float):
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.decay = decay
        self._weights = [parameter for _, parameter in trained]
        self._averages = {name: parameter.detach().clone() for name, parameter in trained}

    @torch.no_grad()
    def update(self, step: int, finite: Tensor) -> None:
        """Move towards the weights after this step, unless it was skipped; the device decides.

        A step of gradient descent on ½‖average − weights‖² with the rate 1 − decay is the average's update;
        "weight decay" and the reversed sign make average − weights of the weights as a gradient. torch's
        fused step, unlike its lerp, is skipped by a flag on the device; it changes neither weights nor flag.
        """
        if not self._weights:
            return
        rate = 1 - min(self.decay, (1 + step) / (10 + step))
        averages, skipped = [*self._averages.values()], (~finite).float()
        torch._fused_sgd_(
            averages,
            [weight.detach() for weight in self._weights],
            [],
            weight_decay=1.0,
            momentum=0.0,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=True,
            is_first_step=False,
            found_inf=skipped,
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; training must not continue there."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def tensors(self) -> dict[str, Tensor]:
        """The averages by the names of their parameters, not copied."""
        return dict(self._averages)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`."""
        if tensors.keys() != self._averages.keys():
            differ = sorted(tensors.keys() ^ self._averages.keys())
            raise InputError("tensors", f"of the average do not match the model, the first is {differ[0]}.")
        for name, average in self._averages.items():
            average.copy_(tensors[name])

    @torch.no_grad()
    def restart(self) -> None:
        """Let the averages be the weights as they are."""
        for weight, average in zip(self._weights, self._averages.values(), strict=True):
            average.copy_(weight)

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange values, one tensor at a time: memory stays where DDP and compiled graphs expect it."""
        for weight, average in zip(self._weights, self._averages.values(), strict=True):
            before = weight.detach().clone()
            weight.copy_(average)
            average.copy_(before)
