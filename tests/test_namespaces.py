"""The test bed's hosts: no faster than their links, and cleaned up whatever happens.

All in one file, so that they run one after another: a machine has one such network at a time.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from benchmarks.namespaces import PREFIX, HostError, Hosts

from fastclip.tools.profiling.breakdown import AlgorithmProfile
from tests.processes import gone, wait_for
from tests.training.runs import Lab

FREE, SLOW = None, 50  # Mbit/s
RECEIVE = """
import socket
server = socket.create_server(("", 7000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
"""
SEND = """
import socket, sys
socket.setdefaulttimeout(0.5)
connection = socket.create_connection((sys.argv[1], 7000))
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.settimeout(30)
connection.recv(1)  # until everything is read
"""


def can_make_namespaces():
    if not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"try-{os.getpid()}"  # all processes of a test run try at the same time
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


pytestmark = pytest.mark.skipif(
    not can_make_namespaces(), reason="network namespaces require root and iproute2"
)


def send(hosts, bytes_sent):
    """Send bytes from host 0 to host 1; return the seconds, or None if it was not reached."""
    receiver = hosts.start(1, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
    receiver.stdout.readline()
    start = time.monotonic()
    sender = hosts.start(
        0, [sys.executable, "-c", SEND, hosts.addresses[1], str(bytes_sent)], stderr=subprocess.DEVNULL
    )
    failed = sender.wait(60)
    seconds = time.monotonic() - start
    hosts.stop()
    receiver.stdout.close()
    return None if failed else seconds


def left_behind():
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    links = subprocess.run(["ip", "link", "show"], capture_output=True, text=True, check=True).stdout
    return PREFIX in names or PREFIX in links


@pytest.mark.slow
def test_nothing_passes_faster_than_the_link_and_nothing_while_it_is_cut():
    with Hosts(2, megabits=20) as hosts:
        assert send(hosts, 2_000_000) > 0.7  # 16 megabits, minus a free burst
        hosts.cut(1)
        assert send(hosts, 10) is None
        hosts.reconnect(1)
        assert send(hosts, 10) is not None
    assert not left_behind()


@pytest.mark.slow
def test_an_error_and_an_earlier_kill_leave_nothing_behind():
    killed = "from benchmarks.namespaces import Hosts; import os; Hosts(2).__enter__(); os._exit(1)"
    subprocess.run([sys.executable, "-c", killed], check=False)
    assert left_behind()
    started = []

    def fail(hosts):
        started.append(hosts.start(0, ["sleep", "100"]))
        raise KeyError

    with pytest.raises(KeyError), Hosts(1) as hosts:
        fail(hosts)
    assert started[0].returncode is not None
    assert not left_behind()


LASTING = """
from benchmarks.namespaces import Hosts
with Hosts(1) as hosts:
    hosts.start(0, ["sh", "-c", "echo runs; exec sleep 100"]).wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_on_a_host_ends_with_the_one_that_started_it(number):
    parent = subprocess.Popen([sys.executable, "-c", LASTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout.readline() == b"runs\n"
    inside = subprocess.run(["ip", "netns", "pids", f"{PREFIX}-0"], capture_output=True, text=True).stdout
    parent.send_signal(number)
    parent.communicate(timeout=30)
    assert inside.split()
    assert wait_for(lambda: all(gone(int(pid)) for pid in inside.split()))
    assert left_behind() == (number == signal.SIGKILL)
    with Hosts(0):  # removes the remains of a killed one
        pass
    assert not left_behind()


def test_a_host_that_fails_or_hangs_is_reported_with_its_log(tmp_path):
    (tmp_path / "host0.log").write_text("waits for the other")
    (tmp_path / "host1.log").write_text("out of memory")
    with Hosts(2) as hosts:
        nodes = [hosts.start(0, ["sleep", "100"]), hosts.start(1, ["false"])]
        with pytest.raises(HostError) as failed:
            hosts.wait(nodes, tmp_path, 30)
        with pytest.raises(HostError) as hanging:
            hosts.wait(nodes[:1], tmp_path, 0)
    assert (failed.value.host, failed.value.log) == (1, "out of memory")
    assert (hanging.value.host, hanging.value.log) == (0, "waits for the other")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Profiles of the real trainer's steps on two hosts, by the rate of their links."""
    lab, profiles = Lab(tmp_path_factory.mktemp("lab")), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
        for rate in (FREE, SLOW):
            out = tmp_path_factory.mktemp("profile")
            arguments = ["profile", *lab.options(out, "openclip,fastclip-v3"), "--steps=4", "--warmup=1"]
            with Hosts(2, rate) as hosts:
                hosts.wait(hosts.torchrun(["-m", "fastclip", *arguments], out), out, 60)
            saved = json.loads((out / "profile.json").read_text())["profiles"]
            profiles[rate] = {one["algorithm"]: AlgorithmProfile.from_dict(one) for one in saved}
    return profiles


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["openclip", "fastclip-v3"])
def test_a_slow_link_is_communication_and_nothing_else(profiles, algorithm):
    """Compare the fastest steps, so a busy machine does not matter."""

    def least(rate, part):
        return min(getattr(step, part) for rank in profiles[rate][algorithm].workers for step in rank.steps)

    sent = sum(profiles[SLOW][algorithm].workers[0].sent.values())
    on_the_link = sent * 8 / SLOW / 1000  # ms
    assert least(SLOW, "pure_communication") > 0.8 * on_the_link
    assert least(FREE, "communication") < 0.4 * on_the_link
    for part in ("computation", "others"):
        assert least(SLOW, part) - least(FREE, part) < 0.1 * on_the_link
