"""Communication between ranks: in a step, features and a few scalars per sample, never feature gradients.

Calls in a step are asynchronous and return a `Pending`; on GPUs, waiting for one only orders the streams.
A single rank sends nothing. Outside of steps, ranks meet before they save or load: `Exchange.meet`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastclip.errors import InputError

_GIVEN_UP = b"given up"


class MissingRanks(RuntimeError):
    """A call that every rank must make was not made by all of them.

    Args:
        call: what must be called.
        ranks: those that did not call it.
        seconds: how long this rank waited for them.
    """

    def __init__(self, call: str, ranks: list[int], seconds: float):
        self.call, self.ranks, self.seconds = call, ranks, seconds
        missing = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks)) or '?'}"
        super().__init__(
            f"Every rank must call {call}, but {missing} did not within {seconds:g} s: "
            "call it outside of any `if rank == 0`."
        )

    def __reduce__(self):
        return type(self), (self.call, self.ranks, self.seconds)


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

    def gather_to_first(self, tensor: Tensor) -> list[Tensor]:
        """This tensor of every rank, on rank 0; an empty list on the others. Shapes must be equal."""
        if self.world_size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(tensor, parts, group=self.group, group_dst=0)
        return parts or []

    def meet(self, call: str, about: str, timeout: float) -> None:
        """Wait until every rank makes this call; MissingRanks if one does not within `timeout` seconds.

        Ranks meet in the process group's store, where they can give up waiting; in a collective they cannot.
        The store counts each rank's calls: a rank that comes after the others gave up meets them in their
        next call.

        Args:
            call: the method, for the message.
            about: what it is called on; ranks with something else do not meet.
        """
        if self.world_size == 1:
            return
        from torch.distributed.distributed_c10d import _get_default_store

        self.check_unchanged()
        group = self.group or dist.group.WORLD
        assert group is not None
        store = dist.PrefixStore(f"fastclip/{group.group_name}/{call}/{about}", _get_default_store())
        while True:
            number = store.add(f"calls/{self.rank}", 1)
            outcome = f"{number}/outcome"  # the first to write it decides, for all
            if not (store.check([outcome]) and store.get(outcome) == _GIVEN_UP):
                break
        deadline = time.monotonic() + timeout
        if store.add(f"{number}/arrived", 1) == self.world_size:
            store.compare_set(outcome, "", "met")
        while not store.check([outcome]):
            if time.monotonic() > deadline:
                store.compare_set(outcome, "", _GIVEN_UP.decode())
            time.sleep(0.01)
        if store.get(outcome) == _GIVEN_UP:
            missing = [rank for rank in range(self.world_size) if store.add(f"calls/{rank}", 0) < number]
            raise MissingRanks(call, missing, timeout)
