"""A rank that another has left behind ends, whatever it is doing; a job without a failure is left alone."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastclip.distributed import watch, watcher
from fastclip.distributed.interrupts import StoppedCleanly
from fastclip.distributed.world import join_world
from fastclip.processes import free_port
from tests.processes import gone, wait_for
from tests.ranks import CONTEXT

KILLED = -signal.SIGKILL


def block():
    """Stay in C code that holds Python's lock: no thread of this process can run."""
    ctypes.PyDLL(None).sleep(600)


class Job:
    """Real ranks over gloo that play a scenario, with a short grace period; they write to `folder`."""

    def __init__(self, scenario, size, folder, grace=1.0):
        self.folder, port = folder, free_port()
        self.processes = [
            CONTEXT.Process(target=_rank, args=(scenario, rank, size, port, folder, grace))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def wait_for(self, name):
        """Wait until all ranks have written a file of this name."""
        count = len(self.processes)
        assert wait_for(lambda: len(list(self.folder.glob(f"{name}[0-9]"))) == count), self.errors()

    def codes(self):
        for process in self.processes:
            process.join(40)
        return [process.exitcode for process in self.processes]

    def errors(self):
        return [(self.folder / f"{rank}.err").read_text() for rank in range(len(self.processes))]


def _rank(scenario, rank, size, port, folder, grace):
    with open(folder / f"{rank}.err", "w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    watch.GRACE = grace
    with join_world(timeout=60) as world:
        world.barrier()
        (folder / f"joined{rank}").touch()
        scenario(rank, folder)
    time.sleep(2 * grace)  # after a clean end a process may take its time
    (folder / f"ended{rank}").touch()


def blocked(rank, folder):
    (folder / f"in{rank}").touch()
    block()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 0), (3, 1)])
def test_ranks_blocked_in_c_code_end_when_another_is_killed(tmp_path, size, victim):
    with Job(blocked, size, tmp_path) as job:
        job.wait_for("in")
        os.kill(job.processes[victim].pid, signal.SIGKILL)
        assert job.codes() == [KILLED] * size
    for rank, text in enumerate(job.errors()):
        lines = [line for line in text.splitlines() if line.startswith("fastclip: ")]
        assert len(lines) == (0 if rank == victim else 1)
        assert all(f"rank {rank} " in line and f"after rank {victim} died" in line for line in lines)


def one_fails(rank, folder):
    if rank == 1:
        raise OSError("no space left")
    block()


@pytest.mark.slow
def test_a_rank_that_raises_ends_with_its_error_and_the_others_name_it(tmp_path):
    with Job(one_fails, 3, tmp_path) as job:
        assert job.codes() == [KILLED, 1, KILLED]
    errors = job.errors()
    assert errors[1].endswith("OSError: no space left\n")
    for rank in (0, 2):
        assert "after rank 1 failed with OSError: no space left" in errors[rank]


def one_of_two_notices(rank, folder):
    if rank == 2:
        block()
    if rank == 1:
        time.sleep(0.5)
        os._exit(3)
    dist.recv(torch.zeros(1), src=1)  # fails at once, before rank 1's watcher has noticed


@pytest.mark.slow
def test_the_rank_that_failed_is_named_and_not_one_that_lost_it(tmp_path):
    with Job(one_of_two_notices, 3, tmp_path) as job:
        assert job.codes() == [1, 3, KILLED]
    errors = job.errors()
    assert "LostRanks" in errors[0]
    assert "after rank 1 died" in errors[2]


def stops(rank, folder):
    raise StoppedCleanly(3)


def waits(rank, folder):
    while not (folder / "go").exists():
        time.sleep(0.02)


@pytest.mark.slow
def test_a_clean_end_a_stop_and_a_suspended_rank_kill_nobody(tmp_path):
    """Processes live on for longer than the grace period after they have left."""
    folders = [tmp_path / name for name in ("ended", "stopped", "suspended")]
    for folder in folders:
        folder.mkdir()
    with (
        Job(returns, 3, folders[0], grace=0.5) as ended,
        Job(stops, 2, folders[1], grace=0.5) as stopped,
        Job(waits, 2, folders[2], grace=0.5) as suspended,
    ):
        suspended.wait_for("joined")
        first, second = (process.pid for process in suspended.processes)
        victims = [second, watcher_of(second)]
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        for number in (signal.SIGTERM, signal.SIGINT):  # clusters signal every process of a job
            os.kill(watcher_of(first), number)
        time.sleep(1.5)
        for pid in victims:
            os.kill(pid, signal.SIGCONT)
        (folders[2] / "go").touch()
        assert ended.codes() == [0, 0, 0], ended.errors()
        assert suspended.codes() == [0, 0], suspended.errors()
        assert stopped.codes() == [1, 1]
    assert all(text.endswith("to resume.\n") for text in stopped.errors())
    assert not any("fastclip: " in text for job in (ended, stopped, suspended) for text in job.errors())


def returns(rank, folder):
    """Nothing to do."""


def watcher_of(pid):
    found = []

    def look():  # just after its start a process has no command line yet
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        found.extend(child for child, line in lines.items() if b"watcher.py" in line)
        return found

    assert wait_for(look)
    return found[0]


# One watcher, without ranks of torch.


class Store(dict):
    set = dict.__setitem__
    get = dict.__getitem__


@pytest.fixture
def hub():
    """Rank 0's watcher, of a process that sleeps, and what it told other ranks: the token, hosts and port."""
    script = (
        "import sys, json, time; from fastclip.distributed import watch; watch.GRACE = 0.5; "
        "store = type('Store', (dict,), {'set': dict.__setitem__})(); "
        "held = watch.start_watch(store, 0, 4, '127.0.0.1', 60); print(store['watcher'], flush=True); "
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process, json.loads(process.stdout.readline())
    with suppress(FileNotFoundError):  # of a process that has ended
        os.kill(watcher_of(process.pid), signal.SIGKILL)
    process.kill()
    process.communicate()


def connect(port, **hello):
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return connection, connection.makefile()


@pytest.mark.slow
def test_a_stranger_is_turned_away_and_a_lost_rank_is_not(hub):
    process, (token, hosts, port) = hub
    assert hosts[0] == "127.0.0.1"
    stranger, answers = connect(port, token="guess", rank=1)
    assert answers.read() == ""
    second, second_answers = connect(port, token=token, rank=2)
    assert json.loads(second_answers.readline()) == {"welcome": True}
    third, third_answers = connect(port, token=token, rank=3)
    assert json.loads(third_answers.readline()) == {"welcome": True}
    third.sendall(b'{"bye": true}\n')  # a goodbye is no failure
    assert third_answers.read() == ""
    for connection in (stranger, third):
        connection.close()
    time.sleep(0.7)
    assert process.poll() is None
    second.shutdown(socket.SHUT_RDWR)
    assert process.wait(20) == KILLED
    assert "rank 0 was still running 0 s after rank 2 died" in process.stderr.read()
    for file in (answers, second_answers, third_answers, second):
        file.close()


def test_a_failure_is_passed_on_with_its_reason(hub):
    _, (token, _, port) = hub
    one, _ = connect(port, token=token, rank=1)
    other, answers = connect(port, token=token, rank=2)
    assert json.loads(answers.readline()) == {"welcome": True}
    told = {"rank": 1, "failed": "failed with OSError: full", "lost": False, "stopped": False}
    one.sendall(json.dumps(told).encode() + b"\n")
    assert json.loads(answers.readline()) == told
    for file in (one, other, answers):
        file.close()


def test_a_watcher_that_reaches_nobody_lets_its_rank_work(monkeypatch):
    store = Store(watcher=json.dumps(["token", ["127.0.0.1"], free_port()]))
    monkeypatch.setattr(watch, "GRACE", 0.1)
    started = watch.start_watch(store, 1, 2, "127.0.0.1", 60)
    process = started._process
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    time.sleep(0.5)
    assert process.poll() is None
    assert b"FASTCLIP" not in environment  # nothing that marks the rank's own processes
    started.done()
    assert process.returncode == 0


def test_only_a_name_under_which_the_right_watcher_answers_is_used():
    with socket.create_server(("127.0.0.1", 0)) as wrong:
        port = wrong.getsockname()[1]

        def hang_up():
            wrong.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        task = watcher.Task(1, 2, os.getpid(), 1, 60, "token", None, ["127.0.0.1"], port)
        assert watcher.reach_hub(task) is None
        thread.join()


def test_a_watcher_tells_those_that_come_late_that_its_rank_is_gone_and_ends(hub):
    process, (token, _, port) = hub
    pid = watcher_of(process.pid)
    process.kill()
    process.wait()
    for rank in (1, 2, 3):
        connection, answers = connect(port, token=token, rank=rank)
        assert json.loads(answers.readline()) == {"welcome": True}
        told = json.loads(answers.readline())
        assert (told["rank"], told["lost"]) == (0, False)
        connection.close()
        answers.close()
    assert wait_for(lambda: gone(pid))
