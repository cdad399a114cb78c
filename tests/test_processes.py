"""Children that end with their parent."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastclip import processes
from fastclip.processes import children, free_port, start, wait

SUPERVISED = [sys.executable, "-m", "fastclip.processes"]


def test_it_execs_the_command():
    code = "import sys; print(sys.argv[1:]); sys.exit(3)"
    done = subprocess.run(
        [*SUPERVISED, str(os.getpid()), sys.executable, "-c", code, "--a=b", "c d"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert done.stdout == "['--a=b', 'c d']\n"


def test_nothing_starts_if_the_parent_is_gone(tmp_path):
    command = [sys.executable, "-c", f"open({str(tmp_path / 'there')!r}, 'w')"]
    assert subprocess.run([*SUPERVISED, "1", *command]).returncode == 143
    assert not (tmp_path / "there").exists()


def test_the_command_gets_sigterm_when_its_parent_is_killed(tmp_path):
    ended = tmp_path / "ended"
    command = (
        "import pathlib, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); print('on', flush=True); "
        f"signal.sigwait([15]); pathlib.Path({str(ended)!r}).touch()"
    )
    parent = (
        "import os, subprocess, sys; "
        f"subprocess.call([*{SUPERVISED!r}, str(os.getpid()), sys.executable, '-c', {command!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"on\n"
        process.kill()
    deadline = time.monotonic() + 20
    while not ended.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended.exists()


def python(code):
    return [sys.executable, "-c", code]


def test_a_child_has_no_input_and_its_own_group():
    child = start(
        python("import os, sys; print(repr(sys.stdin.read()), os.getpgrp())"), stdout=subprocess.PIPE
    )
    assert child.communicate(timeout=30)[0].decode() == f"'' {child.pid}\n"


def test_waiting_returns_which_children_failed():
    polls = []
    with children() as started:
        started += [start(python(f"import sys; sys.exit({code})")) for code in (0, 3, 0)]
        assert wait(started, lambda: polls.append(0)) == [1]
    assert polls


def test_waiting_ends_at_the_first_failure_and_the_other_children_are_terminated():
    with children() as started:
        started += [start(python(code)) for code in ("import time; time.sleep(60)", "1 / 0")]
        assert wait(started, lambda: None) == [1]
    assert started[0].poll() in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_child_that_ignores_sigterm_is_killed():
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    with children(grace=0.1) as started:
        started.append(start(python(deaf), stdout=subprocess.PIPE))
        assert started[0].stdout.readline() == b"on\n"
    assert started[0].poll() == -signal.SIGKILL


def test_sigterm_acts_as_ctrl_c_only_inside_the_block():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), children():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_free_port_can_be_bound_and_is_below_those_of_outgoing_connections():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port := free_port()))
    assert port < first or first <= 20_000


def test_where_outgoing_connections_may_take_any_port_a_free_one_is_still_found(monkeypatch):
    monkeypatch.setattr(processes, "_first_outgoing_port", lambda: 1024)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
