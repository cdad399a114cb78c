"""Folders that are replaced survive a kill at any moment; parallel_map gives results in order."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from itertools import count

import pytest

from fastclip import files
from fastclip.files import atomic_folder, build_lock, claim, cores, open_files_limit, parallel_map
from tests.processes import gone, sleep_and_pid, wait_for
from tests.ranks import run_ranks


def double_and_pid(x):
    return 2 * x, os.getpid()


@pytest.mark.slow
def test_results_of_several_processes_are_in_order():
    results = list(parallel_map(double_and_pid, range(20), jobs=2))
    assert [value for value, _ in results] == list(range(0, 40, 2))
    assert os.getpid() not in {pid for _, pid in results}


def test_few_chunks_and_one_job_run_in_this_process():
    for chunks, jobs in ((4, 2), (20, 1), (0, 2)):
        results = list(parallel_map(double_and_pid, range(chunks), jobs=jobs))
        assert results == [(2 * x, os.getpid()) for x in range(chunks)]


class Stop(Exception):
    pass


@pytest.mark.slow
def test_the_caller_is_called_while_it_waits_for_results_and_may_stop():
    calls = []

    def waiting():
        calls.append(None)
        if len(calls) == 2:
            raise Stop

    before = set(multiprocessing.active_children())
    with pytest.raises(Stop):
        list(parallel_map(sleep_and_pid, [60, 60], jobs=2, few=1, waiting=waiting))
    assert set(multiprocessing.active_children()) == before


ENDLESS = """
from fastclip.files import parallel_map
from tests.processes import sleep_and_pid
for pid in parallel_map(sleep_and_pid, [0, 0, 0, 0, 0, 60, 60, 60], jobs=2):
    print(pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_the_one_that_started_them(number):
    command = [sys.executable, "-c", ENDLESS]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heard)
    try:
        workers = {int(process.stdout.readline()) for _ in range(5)}
        process.send_signal(number)
        assert process.wait(timeout=60)
        assert wait_for(lambda: all(gone(pid) for pid in workers))
    finally:
        process.kill()
        process.communicate()


def test_a_claim_is_granted_to_one_and_needs_its_folder(tmp_path):
    with claim(tmp_path / "file.lock") as first:
        with claim(tmp_path / "file.lock") as second, claim(tmp_path / "other.lock") as other:
            assert (first, second, other) == (True, False, True)
        with claim(tmp_path / "file.lock") as again:
            assert not again  # a claim that was refused releases nothing
    with claim(tmp_path / "file.lock") as later:
        assert later
    with pytest.raises(FileNotFoundError), claim(tmp_path / "none" / "file.lock"):
        pass
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_one_that_waits_for_a_lock_is_called_and_may_stop(tmp_path):
    def waiting():
        raise Stop

    folder = tmp_path / "folder"
    with build_lock(folder, waiting), pytest.raises(Stop), build_lock(folder, waiting):
        pass


# Kills. A process that was killed does nothing more, so every operation after the k-th one fails as well.

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


class Killed(BaseException):
    pass


class Kills:
    """Fails all file operations of this process after `left` of them; made once per process."""

    def __init__(self):
        self.left = None
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if self.left is not None and event in OPERATIONS:
            self.left -= 1
            if self.left < 0:
                raise Killed

    def kill(self, operations, work, *arguments):
        """Whether the work was killed before it was complete."""
        self.left = operations
        try:
            work(*arguments)
        except Killed:
            return True
        finally:
            self.left = None
        return False


def write_folder(folder, content):
    with atomic_folder(folder) as part:
        (part / "sub").mkdir()
        for name in ("a", "sub/b"):
            (part / name).write_text(content)


def contents(folder):
    """The content of a complete folder, None if there is none."""
    if not folder.exists():
        return None
    assert sorted(path.name for path in folder.rglob("*")) == ["a", "b", "sub"]
    (content,) = {path.read_text() for path in (folder / "a", folder / "sub" / "b")}
    return content


def complete_content(folder):
    """What a reader, or the next writer, finds after a kill."""
    found = contents(folder)
    return contents(folder.with_name(f".{folder.name}.old")) if found is None else found


def kill_twice_at_every_operation(rank, size, root):
    os.fsync = lambda descriptor: None  # only a power cut needs it, and 1,000 of them take long
    kills, folder, total = Kills(), root / "model", 0
    for first in count():
        for second in count():
            shutil.rmtree(root, ignore_errors=True)
            write_folder(folder, "old")
            if not kills.kill(first, write_folder, folder, "new"):
                return total
            assert complete_content(folder) in ("old", "new")
            killed = kills.kill(second, write_folder, folder, "newer")
            assert complete_content(folder) in ("old", "new", "newer")
            write_folder(folder, "last")
            assert contents(folder) == "last"
            assert [path.name for path in root.iterdir()] == ["model"]
            total += 1
            if not killed:
                break


@pytest.mark.slow
def test_a_folder_replaced_by_killed_processes_is_the_old_or_the_new_one(tmp_path):
    (kills,) = run_ranks(kill_twice_at_every_operation, 1, tmp_path / "root")
    assert kills > 100


def test_a_folder_of_the_user_with_a_similar_name_is_kept(tmp_path):
    for name in ("model.old", "model.bak"):
        (tmp_path / name).mkdir()
    for content in ("old", "new"):
        write_folder(tmp_path / "model", content)
    assert sorted(os.listdir(tmp_path)) == ["model", "model.bak", "model.old"]


def test_an_error_while_writing_leaves_the_old_folder_and_nothing_else(tmp_path):
    write_folder(tmp_path / "model", "old")
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "model") as part:
        (part / "missing" / "a").touch()
    assert contents(tmp_path / "model") == "old"
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("content", "expected"), [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1), ("", None)]
)
def test_a_containers_share_of_time_limits_its_cores(content, expected, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(content)
    monkeypatch.setattr(files, "_CPU_QUOTA", tmp_path / "none")
    allowed = cores()
    assert allowed >= 1
    monkeypatch.setattr(files, "_CPU_QUOTA", tmp_path / "cpu.max")
    assert cores() == (expected or allowed)


@pytest.mark.parametrize(
    ("limits", "expected", "raised"),
    [
        ((1024, 4096), 4096, [(4096, 4096)]),
        ((1024, 10**9), 1 << 16, [(1 << 16, 10**9)]),
        ((1024, -1), 1 << 16, [(1 << 16, -1)]),  # −1: no limit
        ((4096, 4096), 4096, []),
        ((10**6, 10**6), 10**6, []),
        ((-1, -1), 1 << 16, []),
    ],
)
def test_the_limit_on_open_files_is_raised_once(limits, expected, raised, monkeypatch):
    given = []
    monkeypatch.setattr(files.resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(files.resource, "setrlimit", lambda which, new: given.append(new))
    assert open_files_limit.__wrapped__() == expected
    assert given == raised


def test_a_limit_on_open_files_that_cannot_be_raised_stays(monkeypatch):
    def refuse(which, new):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(files.resource, "getrlimit", lambda which: (256, 1024))
    monkeypatch.setattr(files.resource, "setrlimit", refuse)
    assert open_files_limit.__wrapped__() == 256
