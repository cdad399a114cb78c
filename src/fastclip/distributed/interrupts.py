"""Turns SIGTERM and Ctrl-C in the training loop into a clean stop at the same step on all ranks.

A preempting cluster signals one rank, or all ranks at slightly different times. A rank that stopped alone
would leave the others waiting, so all ranks agree once per step on what to do next.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from fastclip.distributed.stop_at_once import STOPPED_CLEANLY as STOPPED_CLEANLY
from fastclip.distributed.stop_at_once import note

if TYPE_CHECKING:
    from fastclip.distributed.world import World

log = logging.getLogger(__name__)


class StoppedCleanly(Exception):
    """The run was interrupted and has saved a checkpoint; it can resume after `step`, or export the last."""

    def __init__(self, step: int, *, last: bool = False):
        saved = f"Stopped after {'the last step,' if last else 'step'} {step:,}; a checkpoint is saved"
        rest = ", but the model is not exported. Run the same command to export it." if last else (
            ". Run the same command to resume."
        )  # fmt: skip
        super().__init__(saved + rest)
        self.step = step


class Decision(NamedTuple):
    """What all ranks do next."""

    stop: bool  # a rank was asked to stop
    due: bool  # rank 0 says that timed work, such as a checkpoint every few minutes, is due


class Interrupts:
    """Inside, SIGTERM and Ctrl-C only request a stop; a second Ctrl-C interrupts immediately, as usual.

        with Interrupts(world) as interrupts:
            for step in range(start, stop):
                ...
                if interrupts.poll().stop:
                    save(step)
                    raise StoppedCleanly(step)

    Outside the main thread signals are not handled, and only `request` requests a stop.
    """

    def __init__(self, world: World):
        self.world = world
        self._stop = self._logged = self._answered = False
        self._number: signal.Signals | None = None  # the signal that requested a stop
        self._handlers: dict[signal.Signals, object] = {}  # the previous ones
        self._sent: tuple[torch.Tensor, dist.Work] | None = None

    def __enter__(self) -> Interrupts:
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers.clear()
        if kind is None or issubclass(kind, StoppedCleanly):
            self._receive()
        self._sent = None  # after a failure the other ranks may never answer
        if kind is None and self._number is not None and not self._answered:
            signal.raise_signal(self._number)  # it came after the last answer: for those who handle it now

    def request(self) -> None:
        """Ask all ranks to stop."""
        self._stop = True

    def poll(self, due: bool = False) -> Decision:
        """Return the same decision on every rank; all call it once per step.

        With several ranks the decision is about the flags of the previous call, which travel during the step:
        no rank waits, and no GPU is touched. `due` counts on rank 0 only. It may stay true until it is
        answered: that is one request.
        """
        if self.world.size == 1:
            self._answered |= self._stop
            return Decision(self._stop, due)
        decision = self._receive()
        self._answered |= decision.stop
        if decision.stop and not self._logged:
            self._log("Another rank was asked to stop")
        due = due and self.world.is_main and not decision.due
        flags = torch.tensor([self._stop, due], dtype=torch.int32)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.world.control, async_op=True)
        self._sent = flags, work
        return decision

    def stop_requested(self) -> bool:
        """Whether a rank was asked to stop by now, the same on every rank; it waits for all of them.

        For long work between two steps. What is `due` is not answered here, but by the next `poll`.
        """
        before, now = self.poll(), self._receive()
        self._sent = None
        self._answered |= now.stop
        return before.stop or now.stop

    def _receive(self) -> Decision:
        """The flags of all ranks in the last call; none before the first."""
        if self._sent is None:
            return Decision(False, False)
        flags, work = self._sent
        work.wait()
        return Decision(*flags.bool().tolist())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _on_signal_in_child(number)
        elif self._stop and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        elif not self._stop:
            self.request()
            self._number = signal.Signals(number)
            note(number)
            self._log(self._number.name)

    def _log(self, reason: str) -> None:
        self._logged = True
        log.warning("%s: saving and stopping after this step. Ctrl-C again quits without saving.", reason)


def _on_signal_in_child(number: int) -> None:
    """A forked process inherits the handlers. Ctrl-C reaches it too, but only its parent handles it."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
