"""Processes that sleep, whether they have ended, and waiting until they have."""

import os
import time


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def sleep_and_pid(seconds):
    """Work for other processes, in a module that is imported quickly."""
    time.sleep(seconds)
    return os.getpid()


def gone(pid):
    """Whether the process has ended; it may still be a zombie."""
    try:
        os.kill(pid, 0)
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True
