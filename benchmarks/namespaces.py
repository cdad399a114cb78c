"""Hosts on one machine: network namespaces, each linked to a bridge; links can be slowed down or cut.

    with Hosts(4, megabits=100) as hosts:
        nodes = hosts.torchrun(["-m", "fastclip", "train", "--config", "emoji"], Path("logs"))

Needs root and iproute2 (`ip`, `tc`). Names begin with `fastclip`; the remains of an earlier call that was
killed are removed first. There is one such network at a time: a second one waits for the first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from filelock import FileLock

from fastclip.processes import kill, start

PREFIX = "fastclip"  # of namespaces and the bridge; a link's name has at most 15 letters
BURST = "64kb"  # passes before the limit applies
LATENCY = "100ms"  # packets that queue longer are dropped
LOCK = Path(tempfile.gettempdir()) / f"{PREFIX}-hosts.lock"  # released with the process that holds it
PORT = 29500  # of the rendezvous on the first host; every namespace has its own ports


class Hosts:
    """Up to 250 hosts connected by one bridge; their processes end with the block.

    Inside, SIGTERM ends this process as Ctrl-C does, so everything is cleaned up.

    Args:
        megabits: each link's rate in Mbit/s, both ways; None: no limit.
    """

    def __init__(self, count: int, megabits: float | None = None):
        self.count, self.megabits = count, megabits
        self.names = [f"{PREFIX}-{number}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self._processes: list[subprocess.Popen] = []
        self._lock = FileLock(LOCK)

    def __enter__(self) -> Hosts:
        check_machine()
        self._lock.acquire()
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            remove_hosts()
            _ip("link", "add", PREFIX, "type", "bridge")
            _ip("link", "set", PREFIX, "up")
            for number in range(self.count):
                self._add(number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._remove()

    def start(self, host: int, command: list[str], **options) -> subprocess.Popen:
        """Start a process on a host, in its own group; it ends with this one, however that ends."""
        process = start([shutil.which("ip"), "netns", "exec", self.names[host], *command], **options)
        self._processes.append(process)
        return process

    def torchrun(self, arguments: list[str], folder: Path) -> list[subprocess.Popen]:
        """Start a node with one rank of one thread on every host, as on several machines.

        Args:
            arguments: the program of torchrun, such as ["-m", "fastclip", "train", …].
            folder: where each node's output goes, as hostN.log.
        """
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        started = []
        for host, address in enumerate(self.addresses):
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:{PORT}"]
            meeting += ["--rdzv-conf", f"is_host={str(host == 0).lower()}"]  # all share the machine's name
            node = ["--nnodes", str(self.count), "--nproc-per-node", "1", "--local-addr", address, *meeting]
            command = [sys.executable, "-m", "torch.distributed.run", *node, *arguments]
            with open(folder / f"host{host}.log", "wb") as log:
                started.append(self.start(host, command, stdout=log, stderr=log, env=environment))
        return started

    def wait(self, nodes: list[subprocess.Popen], folder: Path, seconds: float) -> None:
        """Wait until all nodes of `torchrun` succeed; raise HostError if one fails or takes too long."""
        deadline = time.monotonic() + seconds
        while True:
            codes = [node.poll() for node in nodes]
            if failed := [host for host, code in enumerate(codes) if code]:
                raise HostError(failed[0], "failed", _end_of_log(folder, failed[0]))
            if None not in codes:
                return
            if time.monotonic() > deadline:
                slow = codes.index(None)
                raise HostError(slow, f"still runs after {seconds:.0f} s", _end_of_log(folder, slow))
            time.sleep(0.1)

    def stop(self) -> None:
        """Kill everything that still runs on the hosts: torchrun's ranks have their own process groups."""
        for name in self.names:
            _kill_all(name)
        for process in self._processes:
            kill(process)
            process.wait()
        self._processes.clear()

    def cut(self, host: int) -> None:
        """Unplug a host's link: nothing passes, and no side notices."""
        _ip("link", "set", _outside(host), "nomaster")

    def reconnect(self, host: int) -> None:
        """Plug a host's link in again."""
        _ip("link", "set", _outside(host), "master", PREFIX)

    def _remove(self) -> None:
        try:
            remove_hosts()
        finally:
            signal.signal(signal.SIGTERM, self._before)
            self._lock.release()

    def _add(self, number: int) -> None:
        name, outside = self.names[number], _outside(number)
        _ip("netns", "add", name)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", outside, "master", PREFIX, "up")
        _ip("-n", name, "address", "add", f"{self.addresses[number]}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        if self.megabits is not None:
            limit = ["root", "tbf", "rate", f"{self.megabits}mbit", "burst", BURST, "latency", LATENCY]
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
            _run("tc", "qdisc", "add", "dev", outside, *limit)


class HostError(RuntimeError):
    """A host that failed or takes too long, with the end of its `log`."""

    def __init__(self, host: int, problem: str, log: str):
        self.host, self.log = host, log
        super().__init__(f"Host {host} {problem}. Its log ends with:\n{log}")


def check_machine() -> None:
    """Exit with a message if hosts cannot be created here."""
    if os.geteuid() != 0:
        sys.exit("Network namespaces require root: run this as root or with sudo.")
    if not shutil.which("ip") or not shutil.which("tc"):
        sys.exit("`ip` and `tc` are missing: apt-get install iproute2.")


def remove_hosts() -> None:
    """Remove all hosts, also those of earlier calls, and kill what runs on them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-")):
        _kill_all(name)
        _ip("netns", "delete", name)
    links = subprocess.run(["ip", "-json", "link", "show"], capture_output=True, text=True, check=True).stdout
    for name in (link["ifname"] for link in json.loads(links)):
        if re.fullmatch(
            rf"{PREFIX}\d*", name
        ):  # a link may outlive its namespace while a packet is in flight
            with suppress(RuntimeError):  # it may be gone by now
                _ip("link", "delete", name)


def _kill_all(namespace: str) -> None:
    """Kill every process in it, and those that they start meanwhile."""
    while pids := subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout:
        for pid in pids.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def _end_of_log(folder: Path, host: int) -> str:
    return (folder / f"host{host}.log").read_text(errors="replace")[-3000:]


def _outside(host: int) -> str:
    """The bridge's end of a host's link."""
    return f"{PREFIX}{host}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
