"""Communication between ranks in a step: features and a few scalars per sample, never feature gradients.

Every call is asynchronous and returns a `Pending`; on GPUs, waiting for one only orders the streams.
A single rank sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastclip.errors import InputError


@dataclass
class Pending:
    """A collective in flight."""

    tensor: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """Return the result; the collective's inputs may be overwritten afterwards."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor


class Exchange:
    """The collectives of one process group (the default group, or a single process without one)."""

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        self.group = process_group
        self.world_size, self.rank = self._current()

    def _current(self) -> tuple[int, int]:
        if not (dist.is_available() and dist.is_initialized()):
            return 1, 0
        if dist.get_rank(self.group) < 0:
            raise InputError(
                "process_group", "does not contain this rank. Build the loss on its members only."
            )
        return dist.get_world_size(self.group), dist.get_rank(self.group)

    def check_unchanged(self) -> None:
        """A loss built before the process group would silently train each rank alone."""
        if self._current() != (self.world_size, self.rank):
            raise RuntimeError(
                f"This loss was built for a world size of {self.world_size}, but it is {self._current()[0]}. "
                "Call torch.distributed.init_process_group before building GlobalContrastiveLoss."
            )

    def gather(self, tensor: Tensor) -> Pending:
        """Rows of all ranks, in rank order: [b, …] → [K·b, …]."""
        tensor = tensor.contiguous()
        if self.world_size == 1:
            return Pending(tensor)
        out = tensor.new_empty((self.world_size * tensor.shape[0], *tensor.shape[1:]))
        return Pending(out, dist.all_gather_into_tensor(out, tensor, group=self.group, async_op=True))

    def sum(self, tensor: Tensor) -> Pending:
        """The sum over ranks, in place."""
        if self.world_size == 1:
            return Pending(tensor)
        return Pending(tensor, dist.all_reduce(tensor, group=self.group, async_op=True))

    def gather_numbers(self, *numbers: int, device: torch.device) -> list[list[int]]:
        """These integers of every rank, on the host: for the checks of the first step."""
        return self.gather(torch.tensor([numbers], device=device)).wait().tolist()
