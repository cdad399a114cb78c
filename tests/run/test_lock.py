"""The lock of a run's folder: one process trains there, and what a dead one left never stops the next."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fastclip.distributed.world import World
from fastclip.run import lock as lock_module
from fastclip.run.lock import LOCK, STALE_AFTER, Owner, RunInUse, RunLock, is_alive, this_process
from tests.ranks import run_ranks

ALONE = World.alone()
HERE = Owner("here", 10, "500", "this boot", "noon")
THERE = Owner("there", 11, "600", "another boot", "noon", slurm_job="77", slurm_step="0")


def lock(folder, owner=HERE, alive=(), **options):
    """A lock on a machine where only these pids are alive."""
    return RunLock(folder, ALONE, owner=owner, is_alive=lambda owner: owner.pid in alive, **options)


def leave(folder, owner, age=0.0):
    """A lock that its owner touched `age` seconds ago and did not remove."""
    with ExitStack() as killed:
        killed.enter_context(lock(folder, owner))
        content = (folder / LOCK).read_bytes()
    (folder / LOCK).write_bytes(content)
    touch_before(folder, age)
    return folder


def touch_before(folder, age):
    now = (folder / LOCK).stat().st_mtime
    os.utime(folder / LOCK, (now - age, now - age))


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_lock_names_its_owner_and_is_removed_at_the_end(tmp_path):
    with RunLock(tmp_path / "run", ALONE):
        held = json.loads((tmp_path / "run" / LOCK).read_text())
        assert held["pid"] == os.getpid()
        assert Owner(**held).host == this_process().host
        assert os.listdir(tmp_path / "run") == [LOCK]
    assert os.listdir(tmp_path / "run") == []


def test_the_lock_is_removed_after_a_failure(tmp_path):
    with pytest.raises(KeyError), lock(tmp_path):
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_second_run_in_the_folder_is_refused_and_leaves_the_first_its_lock(tmp_path):
    with RunLock(tmp_path, ALONE) as first:
        with pytest.raises(RunInUse) as caught, RunLock(tmp_path, ALONE):
            pass
        assert caught.value.owner == first.owner
        assert caught.value.path == str(tmp_path)
        assert all(part in caught.value.problem for part in (str(os.getpid()), first.owner.host, "--out"))
        assert os.listdir(tmp_path) == [LOCK]
        first.check()


# When a lock is out of date.


@pytest.mark.parametrize("age", [-7200, 0, STALE_AFTER - 1])
def test_a_run_on_another_machine_holds_its_lock_for_three_minutes_after_it_touched_it(tmp_path, age):
    with pytest.raises(RunInUse) as caught, lock(leave(tmp_path, THERE, age)):
        pass
    assert caught.value.owner == THERE


def test_a_lock_that_was_not_touched_for_three_minutes_is_taken_over(tmp_path):
    with lock(leave(tmp_path, THERE, STALE_AFTER + 1)):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == HERE.pid
    assert os.listdir(tmp_path) == []


def test_the_clock_of_this_machine_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with pytest.raises(RunInUse), lock(leave(tmp_path, THERE)):
        pass


def test_on_this_machine_the_process_decides_and_not_the_age(tmp_path):
    earlier = replace(HERE, pid=9)
    with pytest.raises(RunInUse) as caught, lock(leave(tmp_path, earlier, 7200), alive=[9]):
        pass  # suspended, or the clock has jumped
    assert caught.value.owner == earlier
    with lock(leave(tmp_path, earlier), alive=[]):
        pass


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({"slurm_restart": "1"}, True),  # requeued
        ({"slurm_restart": "1", "slurm_step": "3"}, True),
        ({}, True),  # steps count from 0 again, and --export hides the number of restarts
        ({"slurm_step": "1"}, False),  # another step of the same start
        ({"slurm_job": "78"}, False),
        ({"slurm_job": ""}, False),
    ],
)
def test_a_requeued_slurm_job_takes_over_at_once(tmp_path, changed, taken):
    again = replace(THERE, host="elsewhere", machine="a third boot", **changed)
    leave(tmp_path, THERE)
    if taken:
        with lock(tmp_path, again):
            pass
    else:
        with pytest.raises(RunInUse), lock(tmp_path, again):
            pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff", b'{"pid": -1}'])
def test_a_damaged_lock_is_respected_until_it_is_three_minutes_old(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(RunInUse) as caught, lock(tmp_path):
        pass
    assert caught.value.owner is None
    touch_before(tmp_path, STALE_AFTER + 1)
    with lock(tmp_path):
        pass


def test_remains_of_killed_attempts_are_deleted_and_those_of_current_ones_kept(tmp_path):
    for name, age in (("killed", STALE_AFTER + 1), ("current", 0)):
        path = tmp_path / f"{LOCK}.{name}"
        path.touch()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    with lock(tmp_path):
        assert sorted(os.listdir(tmp_path)) == [LOCK, f"{LOCK}.current"]


def test_a_takeover_that_was_killed_does_not_stop_the_next(tmp_path):
    leave(tmp_path, THERE, STALE_AFTER + 1)
    leave(tmp_path / "other", replace(HERE, pid=9))
    (tmp_path / "other" / LOCK).replace(tmp_path / f"{LOCK}.takeover")
    (tmp_path / "other").rmdir()
    with lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


# Whether a process of this machine is alive.


def test_this_process_is_alive_and_a_later_one_with_its_pid_is_another():
    assert is_alive(this_process())
    assert not is_alive(replace(this_process(), started="1"))


def test_a_killed_process_is_dead_even_before_its_parent_notices():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(this_process(), pid=child.pid, started=lock_module._process(child.pid)[1])
    assert is_alive(owner)
    child.kill()
    wait_until(lambda: not is_alive(owner))  # a zombie
    assert child.returncode is None
    child.communicate()
    assert not is_alive(owner)


def test_a_process_of_another_user_is_alive(monkeypatch):
    def forbidden(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    monkeypatch.setattr(lock_module, "_process", lambda pid: ("", ""))  # /proc is hidden
    assert is_alive(HERE)


# Several at the same time.


def test_of_many_that_find_a_stale_lock_one_takes_it(tmp_path):
    for attempt in range(20):
        leave(tmp_path, THERE, STALE_AFTER + 1)
        start, end, outcomes = threading.Barrier(4), threading.Barrier(4), []

        def compete(number, start=start, end=end, outcomes=outcomes):
            mine = lock(tmp_path, replace(HERE, pid=100 + number), alive=range(100, 104))
            start.wait()
            try:
                with mine:
                    outcomes.append(number)
                    end.wait(30)
            except RunInUse as error:
                outcomes.append(error)
                end.wait(30)

        threads = [threading.Thread(target=compete, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert len(winners) == 1, (attempt, outcomes)
        assert len(outcomes) == 4
        assert os.listdir(tmp_path) == []


def test_a_lock_taken_between_the_judgement_and_the_takeover_is_put_back(tmp_path):
    leave(tmp_path, replace(HERE, pid=9))
    faster = lock(tmp_path, replace(HERE, pid=12))
    with ExitStack() as other:

        def look_up(owner):
            if owner.pid == 9:
                other.enter_context(faster)
            return owner.pid == 12

        with pytest.raises(RunInUse) as caught, RunLock(tmp_path, ALONE, owner=HERE, is_alive=look_up):
            pass
        assert caught.value.owner == faster.owner
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == 12
        assert os.listdir(tmp_path) == [LOCK]


# While it is held.


def test_the_lock_is_touched_regularly(tmp_path):
    with lock(tmp_path, touch_every=0.01):
        touch_before(tmp_path, 3600)
        old = (tmp_path / LOCK).stat().st_mtime
        wait_until(lambda: (tmp_path / LOCK).stat().st_mtime > old + 3000)


def test_a_run_that_was_taken_over_stops_and_leaves_the_new_lock(tmp_path):
    with lock(tmp_path, touch_every=0.01) as held:
        held.check()
        leave(tmp_path / "other", THERE)
        (tmp_path / "other" / LOCK).replace(tmp_path / LOCK)
        wait_until(lambda: held._taken_over is not None)
        with pytest.raises(RunInUse) as caught:
            held.check()
    assert caught.value.owner == THERE
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == THERE.pid


def test_a_lock_deleted_by_hand_is_written_again(tmp_path):
    with lock(tmp_path, touch_every=0.01):
        (tmp_path / LOCK).unlink()
        wait_until((tmp_path / LOCK).exists)
    assert os.listdir(tmp_path) == []


# File systems.


def test_a_file_system_without_hard_links_is_locked_too(tmp_path, monkeypatch):
    def unsupported(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", unsupported)
    with lock(tmp_path):
        with pytest.raises(RunInUse), lock(tmp_path, THERE):
            pass
        assert os.listdir(tmp_path) == [LOCK]


def test_a_link_whose_reply_was_lost_counts(tmp_path, monkeypatch):
    link = os.link

    def link_twice(*paths):
        link(*paths)
        link(*paths)

    monkeypatch.setattr(os, "link", link_twice)
    with lock(tmp_path):
        assert os.listdir(tmp_path) == [LOCK]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="--out"), lock(tmp_path / "file" / "run"):
        pass


# Several ranks.


def refused_rank(rank, size, folder):
    world = World(rank, size, rank, torch.device("cpu"), dist.group.WORLD)
    try:
        with RunLock(folder, world, owner=HERE):
            return None
    except RunInUse as error:
        return error.owner, error.path


@pytest.mark.slow
def test_all_ranks_of_a_refused_run_raise_the_same_error(tmp_path):
    leave(tmp_path, THERE)
    assert run_ranks(refused_rank, 2, tmp_path) == [(THERE, str(tmp_path))] * 2
    assert os.listdir(tmp_path) == [LOCK]
