"""Becomes a command that ends with its parent: Linux sends it SIGTERM when the parent is gone, however.

    python -m fastclip.processes PARENT COMMAND …

The request (PR_SET_PDEATHSIG) outlives exec. SIGTERM rather than SIGKILL: a run saves before it ends. Where
the system has no such request the command runs without it, and only a parent that is killed leaves it behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before the request was made
            sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
