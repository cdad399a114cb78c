"""Turns SIGTERM and Ctrl-C into a clean stop at the same step on all workers, so that no work is lost.

A cluster that takes a machine back signals one worker, or all at slightly different moments. A worker that
stopped alone would leave the others waiting for it; so all agree, once a step, on what happens next.
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

if TYPE_CHECKING:
    from fastclip.distributed.world import World

log = logging.getLogger(__name__)

STOPPED_CLEANLY = 75
"""Exit code of a run that was asked to stop, saved, and can be resumed: EX_TEMPFAIL, "try again later"."""


class StoppedCleanly(Exception):
    """The run was asked to stop, and has saved all that it needs to go on after `step`."""

    def __init__(self, step: int):
        super().__init__(f"Stopped after step {step:,}, which is saved. Start again to go on from there.")
        self.step = step


class Decision(NamedTuple):
    """What all workers do next."""

    stop: bool  # somebody was asked to
    due: bool  # worker 0 says that what goes by the clock, such as a checkpoint every few minutes, is due


class Interrupts:
    """While inside, SIGTERM and Ctrl-C only ask for a stop; a second Ctrl-C interrupts at once, as usual.

        with Interrupts(world) as interrupts:
            for step in range(start, stop):
                ...
                if interrupts.poll().stop:
                    save(step)
                    raise StoppedCleanly(step)

    Outside of the main thread signals are left alone, and only `request` asks for a stop.
    """

    def __init__(self, world: World):
        self.world = world
        self._stop = self._told = False
        self._handlers: dict[signal.Signals, object] = {}  # those that were there before
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
        self._sent = None  # after a failure the others may never answer

    def request(self) -> None:
        """Ask all workers to stop."""
        self._stop = True

    def poll(self, due: bool = False) -> Decision:
        """The same decision on every worker; all call it once a step.

        With several workers it is about what they said in the call before, as the words travel during the
        step; nobody waits, and no GPU is touched. `due` counts on worker 0 only. It may stay true until it
        was answered: that is one request.
        """
        if self.world.size == 1:
            return Decision(self._stop, due)
        decision = self._receive()
        if decision.stop and not self._told:
            self._tell("A worker was asked to stop")
        due = due and self.world.is_main and not decision.due
        words = torch.tensor([self._stop, due], dtype=torch.int32)
        work = dist.all_reduce(words, dist.ReduceOp.MAX, group=self.world.control, async_op=True)
        self._sent = words, work
        return decision

    def _receive(self) -> Decision:
        """What all workers said in the last call; nothing before the first."""
        if self._sent is None:
            return Decision(False, False)
        words, work = self._sent
        work.wait()
        return Decision(*words.bool().tolist())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _in_a_child(number)
        elif self._stop and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        elif not self._stop:
            self.request()
            self._tell(signal.Signals(number).name)

    def _tell(self, why: str) -> None:
        self._told = True
        log.warning("%s: stopping after this step, saving. Ctrl-C again quits at once, without saving.", why)


def _in_a_child(number: int) -> None:
    """A forked process inherits the handlers. Ctrl-C reaches it too, and is its parent's business alone."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
