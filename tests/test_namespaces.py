"""The test bed's hosts: no faster than their links, and nothing of them stays behind.

All in one file, whose tests run one after another: there is one such network on a machine at a time.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from benchmarks.namespaces import PREFIX, Hosts

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
connection.recv(1)  # until all is read
"""


def can_make_namespaces():
    if not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"try-{os.getpid()}"  # every process of a test run asks, at the same time
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


pytestmark = pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2")


def send(hosts, bytes_sent):
    """Seconds from host 0 to host 1, or None if it was not reached."""
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


def test_nothing_passes_faster_than_the_link_and_nothing_while_it_is_cut():
    with Hosts(2, megabits=20) as hosts:
        assert send(hosts, 2_000_000) > 0.7  # 16 megabits, of which a burst is free
        hosts.cut(1)
        assert send(hosts, 10) is None
        hosts.mend(1)
        assert send(hosts, 10) is not None
    assert not left_behind()


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_runs_on_a_host_ends_with_who_started_it(number):
    parent = subprocess.Popen([sys.executable, "-c", LASTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout.readline() == b"runs\n"
    inside = subprocess.run(["ip", "netns", "pids", f"{PREFIX}-0"], capture_output=True, text=True).stdout
    parent.send_signal(number)
    parent.communicate(timeout=30)
    assert inside.split()
    assert wait_for(lambda: all(gone(int(pid)) for pid in inside.split()))
    assert left_behind() == (number == signal.SIGKILL)
    with Hosts(0):  # removes what a killed one left
        pass
    assert not left_behind()


def test_a_host_that_fails_is_told_with_its_words(tmp_path):
    (tmp_path / "host0.log").write_text("waits for the other")
    (tmp_path / "host1.log").write_text("out of luck")
    with Hosts(2) as hosts:
        nodes = [hosts.start(0, ["sleep", "100"]), hosts.start(1, ["false"])]
        with pytest.raises(RuntimeError, match=r"Host 1 failed. It said:\nout of luck"):
            hosts.wait(nodes, tmp_path, 30)
        with pytest.raises(RuntimeError, match=r"Host 0 still runs after 0 s. It said:\nwaits"):
            hosts.wait(nodes[:1], tmp_path, 0)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Of two hosts with the real trainer's steps, by the rate of their links."""
    lab, found = Lab(tmp_path_factory.mktemp("lab")), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
        for rate in (FREE, SLOW):
            out = tmp_path_factory.mktemp("profile")
            words = ["profile", *lab.options(out, "openclip,fastclip-v3"), "--steps=4", "--warmup=1"]
            with Hosts(2, rate) as hosts:
                hosts.wait(hosts.torchrun(["-m", "fastclip", *words], out), out, 60)
            saved = json.loads((out / "profile.json").read_text())["profiles"]
            found[rate] = {one["algorithm"]: AlgorithmProfile.from_dict(one) for one in saved}
    return found


@pytest.mark.parametrize("algorithm", ["openclip", "fastclip-v3"])
def test_a_slow_link_is_communication_and_nothing_else(profiles, algorithm):
    """By the calmest step, so that a busy machine does not matter."""

    def least(rate, part):
        return min(getattr(step, part) for w in profiles[rate][algorithm].workers for step in w.steps)

    sent = sum(profiles[SLOW][algorithm].workers[0].sent.values())
    on_the_link = sent * 8 / SLOW / 1000  # ms
    assert least(SLOW, "pure_communication") > 0.8 * on_the_link
    assert least(FREE, "communication") < 0.4 * on_the_link
    for part in ("computation", "others"):
        assert least(SLOW, part) - least(FREE, part) < 0.1 * on_the_link
