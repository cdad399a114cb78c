"""The small process beside each rank that ends it when another has failed; `watch.py` starts it.

A rank that is blocked in the driver, or in C code that holds Python's lock, cannot notice anything itself.
The watchers form a star: those of other ranks keep a TCP connection to that of rank 0. A rank has failed when
it says so, when its process is gone without a goodbye, or when the connection to its watcher breaks. A rank
that is only slow, suspended or in a debugger keeps its connection and is left alone. All watchers hear of a
failure at once; ranks get a grace period to end with their own error, then their watchers kill them. A rank
that ends at a signal says so too, and the others are sent SIGTERM.

This file is run by path, and imports nothing but the standard library, so that it starts within milliseconds.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from math import inf
from typing import NamedTuple

# Clusters and terminals signal all processes; the rank answers
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PAUSE = 0.2  # seconds between two looks at whether the rank's process is still there
ANSWER = 60.0  # seconds to wait for rank 0's watcher to answer
LATE = 10.0  # seconds for the other watchers to come and hear that rank 0 died at its start
UNREACHED = 10.0  # seconds until a watcher reports that it could not reach the others: the job may just end
DIED = "died without an error message (killed, out of host memory, or its machine is lost)"


class Task(NamedTuple):
    """What a watcher is started with: a line of JSON on its standard input."""

    rank: int
    size: int
    parent: int
    """The rank's process."""
    grace: float
    """Seconds for a rank to end by itself after another failed."""
    patience: float
    """Seconds after which a machine that does not answer counts as lost."""
    token: str
    """Known to the watchers of this start only."""
    listener: int | None
    """On rank 0: the file descriptor of a listening socket."""
    hosts: list[str]
    """Names under which rank 0's machine may be reached, the likeliest first."""
    port: int


class Channel:
    """Lines of JSON, from a pipe or over a socket."""

    def __init__(self, descriptor: int, connection: socket.socket | None = None):
        self.descriptor, self.connection = descriptor, connection
        self._rest = b""
        self.rank: int | None = None  # of the watcher at the other end

    def fileno(self) -> int:
        return self.descriptor

    def receive(self) -> list[dict] | None:
        """The messages that have arrived; None once the other end is gone."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def send(self, **message: object) -> None:
        if self.connection is not None:
            with suppress(OSError):  # it is gone, and the next receive says so
                self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


class Watcher:
    """Watches until the rank says goodbye, is gone, or had to be killed."""

    def __init__(self, task: Task):
        self.task = task
        self.failures: dict[int, str] = {}  # by rank, in the order in which they were heard of
        self.secondary: set[int] = set()  # ranks that failed because they lost another
        self.stopped: set[int] = set()  # ranks that ended at a signal
        self.deadline = self.report_at = inf
        self.peers: list[Channel] = []
        self.missing = set(range(1, task.size))  # on rank 0: those whose watchers have not come yet
        self.selector = selectors.DefaultSelector()
        self.selector.register(Channel(0), selectors.EVENT_READ, self._hear_parent)

    def run(self) -> None:
        if self.task.listener is not None:
            listener = socket.socket(fileno=self.task.listener)
            self.selector.register(listener, selectors.EVENT_READ, self._accept)
        elif (hub := reach_hub(self.task)) is not None:
            self._watch_peer(hub, rank=0)
        else:
            self.report_at = time.monotonic() + UNREACHED
        alive = True
        while alive:
            alive = os.getppid() == self.task.parent  # checked first: what it said at its end is still read
            self._listen(PAUSE if alive else 0)
            if time.monotonic() > self.report_at:
                _print(self._unreached())
                self.report_at = inf
            if time.monotonic() > self.deadline:
                _print(self._verdict())
                os.kill(self.task.parent, signal.SIGKILL)
                return
        self._learn(self.task.rank, DIED)
        end = time.monotonic() + LATE
        while self.task.listener is not None and self.missing and time.monotonic() < end:
            self._listen(PAUSE)  # a rank that died at its start: the others' watchers are still to come

    def _listen(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            key.data(key.fileobj)

    def _hear_parent(self, parent: Channel) -> None:
        messages = parent.receive()
        if messages is None:  # it is ending, or has closed its files: whether it is gone says getppid
            self.selector.unregister(parent)
        for message in messages or []:
            if "done" in message:
                for peer in self.peers:
                    peer.send(bye=True)
                sys.exit()
            self._learn(self.task.rank, **_failure(message))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        self._watch_peer(_channel(connection, self.task.patience), rank=None)

    def _watch_peer(self, peer: Channel, rank: int | None) -> None:
        peer.rank = rank
        if rank is not None:
            self.peers.append(peer)
        self.selector.register(peer, selectors.EVENT_READ, self._hear_peer)

    def _hear_peer(self, peer: Channel) -> None:
        messages = peer.receive()
        if messages is None:
            self._forget(peer)
            if peer.rank is not None:
                self._learn(peer.rank, DIED)
        for message in messages or []:
            if peer.rank is None and message.get("token") != self.task.token:
                return self._forget(peer)  # a stranger
            if peer.rank is None:
                peer.rank = message["rank"]
                self.peers.append(peer)
                self.missing.discard(message["rank"])
                peer.send(welcome=True)
                for rank in self.failures:
                    peer.send(**self._report(rank))
            elif "bye" in message:
                return self._forget(peer)
            elif "failed" in message:
                self._learn(message["rank"], **_failure(message))
        return None

    def _forget(self, peer: Channel) -> None:
        self.selector.unregister(peer)
        if peer in self.peers:
            self.peers.remove(peer)
        peer.close()

    def _learn(self, rank: int, text: str, lost: bool = False, stopped: bool = False) -> None:
        """Note a failure or a stop, tell the others, and start the grace period."""
        if rank in self.failures:
            return
        self.failures[rank] = text
        if lost:
            self.secondary.add(rank)
        if stopped:
            self.stopped.add(rank)
        self.deadline = min(self.deadline, time.monotonic() + self.task.grace)
        for peer in self.peers:
            peer.send(**self._report(rank))
        if rank != self.task.rank:
            self._tell_parent(rank)

    def _report(self, rank: int) -> dict[str, object]:
        text, lost, stopped = self.failures[rank], rank in self.secondary, rank in self.stopped
        return {"rank": rank, "failed": text, "lost": lost, "stopped": stopped}

    def _tell_parent(self, rank: int) -> None:
        """A stop is passed on as the signal that it was; a failure is there to be read."""
        if rank in self.stopped:
            if os.getppid() == self.task.parent:
                os.kill(self.task.parent, signal.SIGTERM)
        elif rank not in self.secondary:
            with suppress(OSError):  # the rank is gone
                os.write(1, json.dumps(self._report(rank)).encode() + b"\n")

    def _unreached(self) -> str:
        return (
            f"rank {self.task.rank} cannot reach rank 0's watcher at {' or '.join(self.task.hosts)}, port "
            f"{self.task.port}: if another rank dies, this one may wait for --timeout seconds."
        )

    def _verdict(self) -> str:
        cause = next(
            (rank for rank in self.failures if rank not in self.secondary), next(iter(self.failures))
        )
        return (
            f"rank {self.task.rank} was still running {self.task.grace:.0f} s after rank {cause} "
            f"{self.failures[cause]}. It is killed, so that the job can end; the same command resumes it."
        )


def _failure(message: dict) -> dict:
    """The arguments of `_learn` in a message."""
    return {
        "text": message["failed"],
        "lost": message.get("lost", False),
        "stopped": message.get("stopped", False),
    }


def reach_hub(task: Task) -> Channel | None:
    """Connect to rank 0's watcher; None if it does not answer under any of its names."""
    for host in task.hosts:
        try:
            connection = socket.create_connection((host, task.port), timeout=10)
            connection.settimeout(ANSWER)
            hello = {"token": task.token, "rank": task.rank}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            if _read_line(connection) == {"welcome": True}:
                return _channel(connection, task.patience)
            connection.close()
        except (OSError, ValueError):
            continue
    return None


def _read_line(connection: socket.socket) -> object:
    """One message, and not a byte more."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 1000:
        if not (byte := connection.recv(1)):
            break
        line += byte
    return json.loads(line)


def _channel(connection: socket.socket, patience: float) -> Channel:
    """A connection that breaks when the other machine has not answered for about `patience` seconds."""
    connection.settimeout(5)  # of sends; nothing is received before it is there
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes, idle = 10, min(32_000, max(2, int(patience / 2)))
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", max(1, idle // probes)),
        ("TCP_KEEPCNT", probes),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Channel(connection.fileno(), connection)


def _print(line: str) -> None:
    with suppress(OSError):  # the rank's standard error is closed
        os.write(2, f"fastclip: {line}\n".encode())


def main() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    Watcher(Task(*json.loads(_first_line()))).run()


def _first_line() -> bytes:
    """Without a buffer, which would swallow the lines that follow."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit()  # the rank is gone
        line += byte
    return line


if __name__ == "__main__":
    main()
