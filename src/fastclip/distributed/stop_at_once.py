"""Ends `fastclip train` at once at SIGTERM and Ctrl-C, with exit code 75, wherever nothing would be lost.

That is everywhere outside the training loop: before it nothing was trained, after it everything is saved, and
files are complete or absent whenever a process ends. Inside the loop `Interrupts` handles signals.

Python runs a handler between two instructions of the main thread, which may be waiting for other ranks in
C++ code. So a thread, which reads the signals from a pipe, ends the process.

Only the standard library is imported: this is the first thing that `fastclip train` does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

STOPPED_CLEANLY = 75
"""Exit code of a run that was interrupted and can be resumed: EX_TEMPFAIL, "try again later"."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLEAN_UP: list[Callable[[], str | None]] = []
"""Called before the end, the newest first, in a thread. One may return why this is not a clean stop."""
_LATE = 2.0  # seconds by which ranks of one job may differ in when they are signalled
SAVED = "Stopped. The newest checkpoint is that of step {:,}. Run the same command to resume."
_START_UP = (
    "Stopped during start-up, before the first step. Nothing is lost: finished index and cache files are "
    "kept. Run the same command again."
)


class StopAtOnce:
    """Between `start` and `end`, a signal ends the process, unless someone else has set its handler."""

    def __init__(self) -> None:
        self.line = _START_UP  # what is saved, and what to do
        self.asked: signal.Signals | None = None  # noted by the training loop, which could not answer
        self._process = os.getpid()
        self._reader, self._writer = os.pipe()
        self._before: dict[signal.Signals, object] = {}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def start(self) -> None:
        """Called in the main thread."""
        global _current
        for end in (self._reader, self._writer):
            os.set_inheritable(end, False)
        os.set_blocking(self._writer, False)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        _current = self

    def end(self) -> None:
        """Restore the handlers."""
        global _current
        _current = None
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._writer, b"\0")
        self._thread.join()
        for end in (self._reader, self._writer):
            os.close(end)

    def in_child(self) -> None:
        """In a forked process, where the thread does not exist: its parent answers Ctrl-C, and ends it."""
        with suppress(ValueError, OSError):
            signal.set_wakeup_fd(-1)
            for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.SIG_IGN)):
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: nothing more may happen here, such as an error about ranks that ended first."""
        with suppress(OSError):
            os.write(self._writer, bytes([number]))  # again: another library may have taken the wake-up
        self._thread.join()

    def _listen(self) -> None:
        heard = b""
        while 0 not in heard:
            heard = os.read(self._reader, 64)
            for number in heard:
                if number in SIGNALS and signal.getsignal(number) == self._on_signal:
                    self._end_process(signal.Signals(number))

    def _end_process(self, number: signal.Signals) -> NoReturn:
        code = 1
        try:
            problems: list[str | None] = []
            for clean_up in reversed(CLEAN_UP):
                with suppress(Exception):
                    problems.append(clean_up())
            _kill_children()
            problem = next(filter(None, problems), None)
            code = 1 if problem else STOPPED_CLEANLY
            if is_first_rank() or problem:
                _print(f"{number.name}: {problem or self.line}")
        finally:
            os._exit(code)


_current: StopAtOnce | None = None


def _after_fork() -> None:
    if _current is not None:
        _current.in_child()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Inside, signals end the process at once; as before if that is so already, or in another thread."""
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = StopAtOnce()
    stop.start()
    try:
        yield
    finally:
        stop.end()


def describe(line: str) -> None:
    """What a stop from now on prints after the name of the signal: what is saved, and what to do."""
    if _current is not None:
        _current.line = line


def note(number: int) -> None:
    """The training loop was asked to stop, and will do so after a step, if the other ranks still answer."""
    if _current is not None:
        _current.asked = signal.Signals(number)


def await_signal() -> None:
    """Other ranks are lost: end the process if that is because the job is being stopped."""
    if _current is None or signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        return
    if _current.asked is not None:
        signal.raise_signal(_current.asked)
    time.sleep(_LATE)


def ignore_signals() -> None:
    """From now on, to the end of the process: all is done. Python itself would restore default handlers."""
    if _current is not None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def is_first_rank() -> bool:
    """Whether this is rank 0, which speaks for all, according to the launcher."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _kill_children() -> None:
    """Processes that index, decode or load: what they write is complete or absent too."""
    if "multiprocessing" in sys.modules:
        with suppress(Exception):
            for child in sys.modules["multiprocessing"].active_children():
                child.kill()


def _print(line: str) -> None:
    """Directly: the main thread may hold the locks of Python's streams."""
    show_cursor = "\x1b[?25h\n" if os.isatty(2) else ""  # a progress bar may have hidden it
    with suppress(OSError):
        os.write(2, f"{show_cursor}{line}\n".encode())
