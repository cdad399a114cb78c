"""A command that ends with its parent."""

import os
import subprocess
import sys
import time

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
