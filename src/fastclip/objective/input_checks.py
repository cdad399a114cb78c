"""What is checked of a step's inputs: each step on the host, where it is free; once on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.objective.exchange import Exchange

NORM_TOLERANCE = 0.02  # bfloat16 rounds a unit vector's length by up to half a percent


class InputChecks:
    """Refuses inputs that would give a wrong loss, a hang, or a state written to the wrong sample.

    Until the first step is through, workers look at each other's findings, so that all of them stop.
    """

    def __init__(self, algorithm: str, num_ids: int | None, exchange: Exchange):
        self.algorithm, self.exchange = algorithm, exchange
        self.needs_ids, self.num_ids = num_ids is not None, num_ids or 0
        self.local_batch: dict[bool, int] = {}  # by training or not
        self.first_step_done = False

    def inputs(self, image: Tensor, text: Tensor, index: Tensor | None, device: torch.device, training: bool):
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
        self.batch(image.shape[0], device, training)
        if image.shape[0] * self.exchange.world_size < 2:
            raise ValueError("A batch of one pair has no negatives: use a global batch of 2 or more.")
        if self.needs_ids:
            index = self.index(index)
            if index.shape[0] != image.shape[0]:
                raise ValueError(f"index has {index.shape[0]} ids for {image.shape[0]} pairs.")
        if not self.first_step_done:
            self._first_step(image, text, index)

    def index(self, index: Tensor | None) -> Tensor:
        """Ids are a 1-d integer tensor; those on the host are checked for their range each time."""
        if not isinstance(index, Tensor):
            raise ValueError(
                f"{self.algorithm} needs index, each pair's number in the data set, as a 1-d tensor; "
                f"it got {type(index).__name__}."
            )
        integer = not (index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool)
        if index.ndim != 1 or not integer:
            raise TypeError(f"index must be a 1-d integer tensor, not {tuple(index.shape)} of {index.dtype}.")
        if index.device.type == "cpu" and self.first_step_done and self._outside(index):
            raise IndexError(self._range_message(index))
        return index

    def batch(self, b: int, device: torch.device, training: bool) -> None:
        """All workers must bring the same number of pairs, or a collective would mix them up."""
        if b == 0:
            raise ValueError("The batch is empty.")
        if training not in self.local_batch:
            self.exchange.check_unchanged()
            found = self.exchange.gather_numbers(b, self.num_ids, device=device)
            batches, sizes = ([worker[i] for worker in found] for i in (0, 1))
            if len(set(batches)) > 1:
                raise ValueError(
                    f"Workers bring unequal batches, in the order of ranks: {batches}. Make them equal."
                )
            if len(set(sizes)) > 1:
                raise ValueError(
                    f"Workers disagree on num_samples, in the order of ranks: {sizes}. "
                    "Give each the size of the whole data set, not of its part."
                )
            self.local_batch[training] = b
        if b != self.local_batch[training] and self.exchange.world_size > 1:
            raise ValueError(
                f"The local batch changed from {self.local_batch[training]} to {b} pairs "
                f"on worker {self.exchange.rank}. With several workers it must stay the same: "
                "use drop_last=True in the data loader."
            )

    def _first_step(self, image: Tensor, text: Tensor, index: Tensor | None) -> None:
        norms = torch.stack([image.detach(), text.detach()]).float().norm(dim=-1).flatten()
        off = (norms - 1).abs().nan_to_num(0.0, posinf=0.0)  # a non-finite step is no mistake of use
        bad_ids = index is not None and self.needs_ids and self._outside(index)
        found = self.exchange.gather_numbers(
            bool(off.max() > NORM_TOLERANCE), bad_ids, bool(norms.isfinite().all()), device=image.device
        )
        bad_norm, bad_id, finite = zip(*found, strict=True)
        if any(bad_norm):
            raise ValueError(
                f"Features must have unit length; on {_workers(bad_norm)} some do not "
                f"(the farthest here has {norms[off.argmax()]:.4g}). "
                "Pass torch.nn.functional.normalize(x, dim=-1)."
            )
        if any(bad_id) and index is not None:
            raise IndexError(self._range_message(index) + f" The mistake is on {_workers(bad_id)}.")
        self.first_step_done = all(finite)

    def _outside(self, index: Tensor) -> bool:
        low, high = (int(x) for x in index.aminmax())
        return low < 0 or high >= self.num_ids

    def _range_message(self, index: Tensor) -> str:
        return (
            f"index holds ids from {index.min()} to {index.max()}, but num_samples={self.num_ids}: "
            f"ids must lie in [0, {self.num_ids - 1}]. Give the loss the size of the whole data set."
        )


def _workers(flags: tuple[int, ...]) -> str:
    return f"worker(s) {[rank for rank, flag in enumerate(flags) if flag]}"
