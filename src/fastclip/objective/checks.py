"""What is checked of a step's inputs: each step on the host, where it is free; once on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.objective.exchange import Exchange

NORM_TOLERANCE = 0.02  # bfloat16 rounds a unit vector's length by up to half a percent


class InputChecks:
    """Refuses inputs that would give a wrong loss, a hang, or a state written to the wrong sample."""

    def __init__(self, algorithm: str, num_ids: int | None, exchange: Exchange):
        self.algorithm, self.exchange = algorithm, exchange
        self.num_ids = num_ids  # None: the algorithm needs no ids
        self.local_batch: int | None = None
        self.first_step_done = False

    def inputs(self, image: Tensor, text: Tensor, index: Tensor | None, device: torch.device) -> None:
        """Everything that forward is given; `device` is the loss's."""
        if image.ndim != 2 or image.shape != text.shape:
            raise ValueError(
                f"image_features {tuple(image.shape)} and text_features {tuple(text.shape)} "
                "must both be (batch, d)."
            )
        if image.dtype != text.dtype or not image.dtype.is_floating_point:
            raise TypeError(
                f"image_features are {image.dtype}, text_features {text.dtype}: give one float type."
            )
        if not image.device == text.device == device:
            raise ValueError(
                f"image_features are on {image.device}, text_features on {text.device}, "
                f"the loss on {device}: move the loss with loss.to({str(image.device)!r}), or the features."
            )
        if self.num_ids is not None:
            index = self.index(index)
            if index.shape[0] != image.shape[0]:
                raise ValueError(f"index has {index.shape[0]} ids for {image.shape[0]} pairs.")
        self.batch(image.shape[0], device)
        if image.shape[0] * self.exchange.world_size < 2:
            raise ValueError("A batch of one pair has no negatives: use a global batch of 2 or more.")
        if not self.first_step_done:
            self._unit_length(image, text)
            if index is not None and self.num_ids is not None:
                self._range(index, self.num_ids)
            self.first_step_done = True

    def index(self, index: Tensor | None) -> Tensor:
        """Ids are a 1-d integer tensor; those on the host are checked for their range each time."""
        if index is None:
            raise ValueError(
                f"{self.algorithm} needs index: each pair's number in the data set, as a 1-d tensor."
            )
        integer = not (index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool)
        if index.ndim != 1 or not integer:
            raise TypeError(f"index must be a 1-d integer tensor, not {tuple(index.shape)} of {index.dtype}.")
        if index.device.type == "cpu" and self.num_ids is not None:
            self._range(index, self.num_ids)
        return index

    def batch(self, b: int, device: torch.device) -> None:
        """All workers must bring the same number of pairs, or a collective would mix them up."""
        if b == 0:
            raise ValueError("The batch is empty.")
        if self.local_batch is None:
            self.exchange.check_unchanged()
            batches = [numbers[0] for numbers in self.exchange.gather_numbers(b, device=device)]
            if len(set(batches)) > 1:
                raise ValueError(
                    f"Workers bring unequal batches, in the order of ranks: {batches}. Make them equal."
                )
            self.local_batch = b
        if b != self.local_batch and self.exchange.world_size > 1:
            raise ValueError(
                f"The local batch changed from {self.local_batch} to {b} pairs "
                f"on worker {self.exchange.rank}. With several workers it must stay the same: "
                "use drop_last=True in the data loader."
            )

    @staticmethod
    def _range(index: Tensor, num_ids: int) -> None:
        low, high = (int(x) for x in index.aminmax())
        if low < 0 or high >= num_ids:
            raise IndexError(
                f"index holds ids from {low} to {high}, but num_samples={num_ids}: ids must lie in "
                f"[0, {num_ids - 1}]. Give the loss the size of the data set that the ids count."
            )

    def _unit_length(self, image: Tensor, text: Tensor) -> None:
        """By all workers together, so that one worker's mistake stops all of them."""
        norms = torch.stack([image.detach(), text.detach()]).float().norm(dim=-1).flatten()
        off = (norms - 1).abs()
        bad = bool(off.max() > NORM_TOLERANCE)  # NaN passes: a non-finite step is no mistake of use
        workers = [
            i for i, (flag,) in enumerate(self.exchange.gather_numbers(bad, device=image.device)) if flag
        ]
        if workers:
            raise ValueError(
                f"Features must have unit length; on worker(s) {workers} some do not "
                f"(the farthest here has {norms[off.argmax()]:.4g}). "
                "Pass torch.nn.functional.normalize(x, dim=-1)."
            )
