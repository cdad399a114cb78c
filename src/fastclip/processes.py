"""Child processes that never outlive their parent, however it ends.

`start` runs each command through this module, which asks Linux for a SIGTERM when the parent is gone
(PR_SET_PDEATHSIG, which survives exec) and then execs the command:

    python -m fastclip.processes PARENT COMMAND …

SIGTERM rather than SIGKILL, so a run can save before it ends. On other systems the command runs without it,
and outlives a parent that is killed.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-m", "fastclip")
"""The command line of `fastclip`."""
PAUSE = 0.1  # seconds between two polls of the children
_PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Start a child without input, in its own process group: Ctrl-C reaches only the parent.

    Args:
        options: of subprocess.Popen.
    """
    supervised = [sys.executable, "-m", "fastclip.processes", str(os.getpid()), *command]
    return subprocess.Popen(supervised, stdin=subprocess.DEVNULL, process_group=0, **options)


@contextmanager
def children(grace: float = 5.0) -> Iterator[list[subprocess.Popen]]:
    """Yield a list to append children to; all have ended after the block, on SIGTERM and Ctrl-C too.

    Args:
        grace: seconds for a child to end after SIGTERM.
    """
    started: list[subprocess.Popen] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield started
    finally:
        end(started, grace)
        signal.signal(signal.SIGTERM, before)


def wait(started: Sequence[subprocess.Popen], on_poll: Callable[[], None]) -> list[int]:
    """Wait until all have ended or one has failed, calling `on_poll` meanwhile; return which failed."""
    while any(child.poll() is None for child in started) and not any(child.poll() for child in started):
        on_poll()
        time.sleep(PAUSE)
    return [number for number, child in enumerate(started) if child.poll()]


def end(started: Sequence[subprocess.Popen], grace: float) -> None:
    """Send SIGTERM to all that still run, and SIGKILL to the groups of those that ignore it."""
    for child in started:
        child.terminate()
    deadline = time.monotonic() + grace
    for child in started:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill(child)
            child.wait()


def kill(child: subprocess.Popen) -> None:
    """Kill a child and all processes in its group."""
    with suppress(ProcessLookupError):  # it may have ended just now
        os.killpg(child.pid, signal.SIGKILL)


def free_port() -> int:
    """A free port of this machine, which no outgoing connection will take before it is used."""
    below = range(20_000, _first_outgoing_port())
    for port in (*random.SystemRandom().sample(below, min(100, len(below))), 0):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return listener.getsockname()[1]
    raise OSError("No port is free.")


def _first_outgoing_port() -> int:
    """Linux gives outgoing connections ports of a range that can be configured, from 32,768 by default."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def main(parent: int, command: list[str]) -> None:
    """Exec the command; never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent was gone before the request was made
            sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
