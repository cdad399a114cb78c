"""Children that end with their parent."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from fastclip import processes
from fastclip.processes import children, free_port, start, wait

LEASH = [sys.executable, "-m", "fastclip.processes"]


def test_it_becomes_the_command():
    code = "import sys; print(sys.argv[1:]); sys.exit(3)"
    done = subprocess.run(
        [*LEASH, str(os.getpid()), sys.executable, "-c", code, "--a=b", "c d"], capture_output=True, text=True
    )
    assert done.returncode == 3
    assert done.stdout == "['--a=b', 'c d']\n"


def test_it_starts_nothing_for_a_parent_that_is_gone(tmp_path):
    command = [sys.executable, "-c", f"open({str(tmp_path / 'there')!r}, 'w')"]
    assert subprocess.run([*LEASH, "1", *command]).returncode == 143
    assert not (tmp_path / "there").exists()


def test_the_command_gets_sigterm_when_its_parent_is_killed(tmp_path):
    ended = tmp_path / "ended"
    command = (
        "import pathlib, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); print('on', flush=True); "
        f"signal.sigwait([15]); pathlib.Path({str(ended)!r}).touch()"
    )
    parent = (
        "import os, subprocess, sys; "
        f"subprocess.call([*{LEASH!r}, str(os.getpid()), sys.executable, '-c', {command!r}])"
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


def test_a_child_reads_nothing_and_has_a_group_of_its_own():
    child = start(
        python("import os, sys; print(repr(sys.stdin.read()), os.getpgrp())"), stdout=subprocess.PIPE
    )
    assert child.communicate(timeout=30)[0].decode() == f"'' {child.pid}\n"


def test_waiting_gives_the_places_of_those_that_failed():
    looks = []
    with children() as started:
        started += [start(python(f"import sys; sys.exit({code})")) for code in (0, 3, 0)]
        assert wait(started, lambda: looks.append(0)) == [1]
    assert looks


def test_waiting_ends_with_the_first_failure_and_leaving_ends_the_others():
    with children() as started:
        started += [start(python(code)) for code in ("import time; time.sleep(60)", "1 / 0")]
        assert wait(started, lambda: None) == [1]
    assert started[0].poll() in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_child_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE", 0.1)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    with children() as started:
        started.append(start(python(deaf), stdout=subprocess.PIPE))
        assert started[0].stdout.readline() == b"on\n"
    assert started[0].poll() == -signal.SIGKILL


def test_sigterm_is_ctrl_c_inside_alone():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), children():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_free_port_can_be_listened_at():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
