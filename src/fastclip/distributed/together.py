"""Long work that every rank does on its own, such as opening a collection, without a deadline for the whole.

A collective that waits for the slowest rank would time out after hours of honest work. Here the ranks
exchange two numbers every second while they work and while they wait: only a rank that is gone, or has been
silent for the timeout, is an error.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist

from fastclip.distributed.world import World

Value = TypeVar("Value")
_EVERY = 1.0  # seconds between two messages of a rank that works
_PAUSE = 0.02  # seconds between two looks of a rank that waits


def together(
    world: World,
    work: Callable[[Callable[[], None]], Value],
    waiting: Callable[[int, int], None] | None = None,
) -> Value:
    """Return work(beat) when every rank has finished its own; an error on one rank is raised on all.

    Without a process group this rank is the only one.

    Args:
        work: calls `beat()` often; it returns immediately, and raises the error of another rank.
        waiting: called as waiting(finished, ranks) while this rank waits for others.
    """
    if world.size == 1 or not dist.is_initialized():
        return work(lambda: None)
    pulse = _Pulse(world)
    try:
        value = work(pulse.beat)
    except _RaisedElsewhere as error:
        raise error.original from None
    except Exception as error:
        if not pulse.lost:
            with suppress(RuntimeError):  # ranks that are lost now are not the first failure
                pulse.finish(error, waiting)
        raise
    try:
        pulse.finish(None, waiting)
    except _RaisedElsewhere as error:
        raise error.original from None
    return value


class _RaisedElsewhere(BaseException):
    """The error of another rank; no handler of `work` takes it for its own."""

    def __init__(self, original: Exception):
        self.original = original


class _Pulse:
    """One all-reduce after another: how many ranks still work, and how many failed."""

    def __init__(self, world: World):
        self.lost = False  # whether a rank is gone
        self._world = world
        self._error: Exception | None = None
        self._sent: tuple[torch.Tensor, dist.Work] | None = None
        self._next = time.monotonic() + _EVERY

    def beat(self) -> None:
        """Of a rank that works."""
        self._receive()
        if self._sent is None and time.monotonic() >= self._next:
            self._send(working=True)
            self._next = time.monotonic() + _EVERY

    def finish(self, error: Exception | None, waiting: Callable[[int, int], None] | None) -> None:
        """Wait until no rank works."""
        self._error = error
        working, size = self._world.size, self._world.size
        last_word = False  # whether the last message said that this rank has finished
        while working or not last_word:
            if self._sent is None:
                self._send(working=False)
                last_word = True
            working = self._receive(working)
            if working:
                time.sleep(_PAUSE)
                if waiting and working < size:  # before the first answer, all are assumed to work
                    waiting(size - working, size)

    def _send(self, working: bool) -> None:
        numbers = torch.tensor([working, self._error is not None], dtype=torch.int32)
        work = dist.all_reduce(numbers, group=self._world.control, async_op=True)
        self._sent = numbers, work

    def _receive(self, before: int = 0) -> int:
        """How many ranks work, according to the last answer; raises the first error of a rank."""
        if self._sent is None or not self._sent[1].is_completed():
            return before
        numbers, work = self._sent
        self.lost = True
        work.wait()  # raises if a rank is gone
        self.lost, self._sent = False, None
        working, failed = numbers.tolist()
        if failed:
            errors = self._world.gather(_portable(self._error))
            if self._error is None:
                raise _RaisedElsewhere(next(error for error in errors if error is not None))
            return 0
        return working


def _portable(error: Exception | None) -> Exception | None:
    """An error that can be sent to other ranks."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
