"""Checks of a step's inputs: on the host at each step, where they are free; on the device only once."""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.errors import InputError
from fastclip.objective.algorithms import Settings
from fastclip.objective.exchange import Exchange

NORM_TOLERANCE = 0.02  # bfloat16 rounds a unit vector's length by up to half a percent


class InputTypeError(InputError, TypeError):
    """An argument of the wrong type."""


class IdError(InputError, IndexError):
    """An id that is not in the data set."""


class InputChecks:
    """Refuse inputs that would cause a wrong loss, a hang, or a state written to the wrong sample.

    Until the first step has passed, ranks share their results, so that all of them stop.
    """

    def __init__(self, settings: Settings, num_ids: int | None, exchange: Exchange):
        self.algorithm, self.exchange = settings.algorithm.name, exchange
        self.distinct = settings.negatives == "distinct"
        self.needs_ids, self.num_ids = num_ids is not None, num_ids or 0
        self.local_batch: dict[bool, int] = {}  # by training or not
        self.first_step_done = self.first_evaluation_done = False

    def inputs(self, image: Tensor, text: Tensor, index: Tensor | None, device: torch.device, training: bool):
        """Check all arguments of forward; `device` is the loss's. In evaluation there is no index."""
        if image.ndim != 2 or image.shape != text.shape:
            raise InputError(
                "image_features",
                f"has shape {tuple(image.shape)} and text_features {tuple(text.shape)}; "
                "both must be (batch, d).",
            )
        if image.dtype != text.dtype or not image.dtype.is_floating_point:
            raise InputTypeError(
                "image_features",
                f"has dtype {image.dtype} and text_features {text.dtype}; both must have one float dtype.",
            )
        if not image.device == text.device == device:
            raise InputError(
                "image_features",
                f"is on {image.device}, text_features on {text.device}, and the loss on {device}. "
                f"Move the loss with loss.to({str(image.device)!r}), or the features.",
            )
        self.batch(image.shape[0], device, training)
        if image.shape[0] * self.exchange.world_size < 2:
            raise InputError(
                "image_features", "has one pair, which has no negatives: use a global batch of at least 2."
            )
        if self.needs_ids and training:
            index = self.index(index)
            if index.shape[0] != image.shape[0]:
                raise InputError("index", f"has {index.shape[0]} ids for {image.shape[0]} pairs.")
        if training and not self.first_step_done:
            self.first_step_done = self._first_step(image, text, index)
        elif not training and not self.first_evaluation_done:
            self.first_evaluation_done = self._first_step(image, text, None)

    def index(self, index: Tensor | None) -> Tensor:
        """Ids must be a 1-d integer tensor; on the host, their range is checked each time."""
        if not isinstance(index, Tensor):
            raise InputError(
                "index",
                f"is of type {type(index).__name__}; {self.algorithm} requires a 1-d tensor with each pair's "
                "number in the data set. For held-out pairs call evaluate.",
            )
        _check_integers("index", index)
        if index.device.type == "cpu" and self.first_step_done and self._outside(index):
            raise IdError("index", self._range_problem(index))
        return index

    def group(self, group: Tensor | None, training: bool, b: int | None = None) -> None:
        """Groups are required in training with distinct negatives, and refused without."""
        if group is None:
            if self.distinct and training:
                advice = "pass each pair's group, e.g. fastclip.caption_group(caption)."
                raise InputError("group", f"is missing; with negatives='distinct', {advice}")
            return
        if not self.distinct:
            raise InputError("group", "has no effect: build the loss with negatives='distinct'.")
        if not isinstance(group, Tensor):
            raise InputTypeError("group", f"is of type {type(group).__name__}; it must be a 1-d tensor.")
        _check_integers("group", group)
        if b is not None and group.shape[0] != b:
            raise InputError("group", f"has {group.shape[0]} numbers for {b} pairs.")

    def batch(self, b: int, device: torch.device, training: bool) -> None:
        """All ranks must pass the same number of pairs, or a collective would mix them up."""
        if b == 0:
            raise InputError("index" if self.needs_ids else "image_features", "is empty.")
        if training not in self.local_batch:
            self.exchange.check_unchanged()
            by_rank = self.exchange.gather_numbers(b, self.num_ids, device=device)
            batches, sizes = ([numbers[i] for numbers in by_rank] for i in (0, 1))
            if len(set(batches)) > 1:
                raise InputError(
                    "image_features",
                    f"must have equally many rows on all ranks; ranks 0, 1, … have {batches}.",
                )
            if len(set(sizes)) > 1:
                raise InputError(
                    "num_samples",
                    f"must be equal on all ranks; ranks 0, 1, … have {sizes}. "
                    "Pass the size of the whole data set, not of a rank's part.",
                )
            self.local_batch[training] = b
        if b != self.local_batch[training] and self.exchange.world_size > 1:
            raise InputError(
                "image_features",
                f"changed from {self.local_batch[training]} to {b} rows on rank {self.exchange.rank}. "
                "With several ranks the local batch size must stay the same: "
                "use drop_last=True in the data loader.",
            )

    def _first_step(self, image: Tensor, text: Tensor, index: Tensor | None) -> bool:
        """Check what would make the host wait for the device; return whether that is done with."""
        norms = torch.stack([image.detach(), text.detach()]).float().norm(dim=-1).flatten()
        off = (norms - 1).abs().nan_to_num(0.0, posinf=0.0)  # a non-finite step is not a usage error
        bad_ids = index is not None and self.needs_ids and self._outside(index)
        by_rank = self.exchange.gather_numbers(
            bool(off.max() > NORM_TOLERANCE), bad_ids, bool(norms.isfinite().all()), device=image.device
        )
        bad_norm, bad_id, finite = zip(*by_rank, strict=True)
        if any(bad_norm):
            worst = int(off.argmax())
            raise InputError(
                "image_features" if worst < len(image) else "text_features",
                f"must have unit length; on {_ranks(bad_norm)} some rows do not "
                f"(the worst on this rank has length {norms[worst]:.4g}). "
                "Pass torch.nn.functional.normalize(x, dim=-1).",
            )
        if any(bad_id) and index is not None:
            raise IdError("index", self._range_problem(index) + f" The invalid ids are on {_ranks(bad_id)}.")
        return all(finite)

    def _outside(self, index: Tensor) -> bool:
        low, high = (int(x) for x in index.aminmax())
        return low < 0 or high >= self.num_ids

    def _range_problem(self, index: Tensor) -> str:
        return (
            f"has ids from {index.min()} to {index.max()}, but num_samples={self.num_ids}: "
            f"ids must be in [0, {self.num_ids - 1}]. Build the loss with the size of the whole data set."
        )


def _check_integers(name: str, tensor: Tensor) -> None:
    integer = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)
    if tensor.ndim != 1 or not integer:
        shape = f"has shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
        raise InputTypeError(name, f"{shape}; it must be a 1-d integer tensor.")


def _ranks(flags: tuple[int, ...]) -> str:
    """ "rank 1", "ranks 0, 2"."""
    ranks = [str(rank) for rank, flag in enumerate(flags) if flag]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
