"""Starts the process beside a rank that ends it when another has failed: see `watcher.py`."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from fastclip.distributed import watcher
from fastclip.distributed.watcher import Task

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger(__name__)
GRACE = 20.0  # seconds for a rank to end with its own error after another failed
_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # of the environment: what Python may need to start


class Watch:
    """Other ranks end if this one fails, and this one ends if another does, whatever it is doing."""

    def __init__(self, process: subprocess.Popen | None):
        self._process = process

    def done(self) -> None:
        """End the watch: this rank and all others have done their work."""
        self._tell(done=True)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired, OSError):
                self._process.communicate(timeout=5)

    def failed(self, error: BaseException, *, lost: bool = False) -> None:
        """This rank is about to end with an error. `lost`: it has lost another, which is the one to name."""
        line = str(error).partition("\n")[0]
        self._tell(failed=f"failed with {type(error).__name__}: {line}"[:500], lost=lost)

    def stopped(self) -> str | None:
        """This rank ends now, at a signal, and the others are to end alike; return which of them has failed.

        For any thread, at any moment: nothing here takes a lock.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        with suppress(OSError):
            os.write(
                process.stdin.fileno(),
                json.dumps({"failed": "was stopped", "stopped": True}).encode() + b"\n",
            )
        with suppress(OSError, ValueError):  # nothing was said
            os.set_blocking(process.stdout.fileno(), False)
            failed = json.loads(os.read(process.stdout.fileno(), 1 << 16).partition(b"\n")[0])
            return f"rank {failed['rank']} {failed['failed']}"
        return None

    def _tell(self, **message: object) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # the watcher is gone
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()


def start_watch(store: dist.Store, rank: int, size: int, meeting: str, timeout: float) -> Watch:
    """Start this rank's watcher. All ranks call it; where it cannot start, the job runs without one.

    Args:
        store: part of the store that only the ranks of this start use.
        meeting: address at which the ranks met.
        timeout: seconds after which a machine that does not answer counts as lost.
    """
    listener = None
    if rank == 0:
        with suppress(OSError):
            listener = _listen()
        port = 0 if listener is None else listener.getsockname()[1]
        store.set("watcher", json.dumps([secrets.token_hex(16), _addresses(meeting), port]))
    token, hosts, port = json.loads(store.get("watcher"))
    try:
        descriptor = None if listener is None else listener.fileno()
        return _start(Task(rank, size, os.getpid(), GRACE, timeout, token, descriptor, hosts, port))
    except OSError as error:
        log.error("The watcher of rank %d did not start: %s. The job runs without it.", rank, error)
        return Watch(None)
    finally:
        if listener is not None:
            listener.close()  # the watcher has its own copy


def _start(task: Task) -> Watch:
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, watcher.IGNORED
    )  # inherited: it may be signalled at its start
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", watcher.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=() if task.listener is None else (task.listener,),
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            process_group=0,  # a terminal's Ctrl-C is not for it
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    watch = Watch(process)
    assert process.stdin is not None
    process.stdin.write(json.dumps(task).encode() + b"\n")
    process.stdin.flush()
    return watch


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _addresses(meeting: str) -> list[str]:
    """Names of this machine for other ranks: under torchrun it need not be the one where they met."""
    names = [meeting]
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(meeting, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing, but chooses the interface
            names.append(probe.getsockname()[0])
    return list(dict.fromkeys([*names, socket.gethostname()]))
