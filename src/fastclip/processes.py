"""Child processes that never outlive their parent, however it ends.

`start` puts each command behind this module, which becomes the command (exec) after asking Linux for a
SIGTERM when the parent is gone (PR_SET_PDEATHSIG, which outlives exec):

    python -m fastclip.processes PARENT COMMAND …

SIGTERM rather than SIGKILL: a run saves before it ends. Where the system has no such request the command runs
without it, and only a parent that is killed leaves it behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

PROGRAM = (sys.executable, "-m", "fastclip")
"""What `fastclip` is called as."""
PAUSE = 0.1  # seconds between two looks at the children
_PATIENCE = 5.0  # seconds for a child to end after SIGTERM
_PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """A child that reads no input, in a process group of its own: Ctrl-C reaches the parent alone.

    Args:
        options: of subprocess.Popen.
    """
    leash = [sys.executable, "-m", "fastclip.processes", str(os.getpid())]
    return subprocess.Popen([*leash, *command], stdin=subprocess.DEVNULL, process_group=0, **options)


@contextmanager
def children() -> Iterator[list[subprocess.Popen]]:
    """A list to append children to; all have ended when the block is left, on SIGTERM and Ctrl-C too."""
    started: list[subprocess.Popen] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield started
    finally:
        end(started)
        signal.signal(signal.SIGTERM, before)


def wait(started: Sequence[subprocess.Popen], look: Callable[[], None]) -> list[int]:
    """Until all have ended or one has failed, looking now and then; the places of those that failed."""
    while any(child.poll() is None for child in started) and not any(child.poll() for child in started):
        look()
        time.sleep(PAUSE)
    return [place for place, child in enumerate(started) if child.poll()]


def end(started: Sequence[subprocess.Popen]) -> None:
    """SIGTERM to all that still run, and SIGKILL to the groups of those that ignore it."""
    for child in started:
        child.terminate()
    deadline = time.monotonic() + _PATIENCE
    for child in started:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill(child)
            child.wait()


def kill(child: subprocess.Popen) -> None:
    """With all processes that it started in its group."""
    with suppress(ProcessLookupError):  # it may have ended just now
        os.killpg(child.pid, signal.SIGKILL)


def free_port() -> int:
    """On this machine; another process may take it before it is used."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main(parent: int, command: list[str]) -> None:
    """Become the command; never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before the request was made
            sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
