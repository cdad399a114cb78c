"""Loader workers that die or fail: noticed where items are awaited, and nowhere else, with the cause."""

import errno
import os
import resource
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from fastclip.checked_files import DamagedFile
from fastclip.data import loader_workers
from fastclip.data.bad_samples import TooManyBadSamples
from fastclip.data.loader_workers import DeadLoaderWorker, LoaderWorkers, TooManyOpenFiles
from fastclip.errors import OptionError, PathError
from tests.processes import wait_for


class Items(Dataset):
    """Item i is i; `act` is called first, in the loader worker."""

    def __init__(self, act=lambda number: None):
        self.act = act

    def __getitem__(self, number):
        acted = self.act(number)
        return number if acted is None else acted


def load(act=lambda number: None, items=4, workers=1, **options):
    options = {"per_worker": 1, "pin_memory": False} | options
    return LoaderWorkers(Items(act), range(items), workers=workers, **options)


def at(number, action):
    """Act when this item is made."""
    return lambda item: action() if item == number else None


def fail(error):
    raise error


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_items_come_in_order_and_torch_leaves_no_handler(workers):
    before = signal.getsignal(signal.SIGCHLD)
    assert list(load(items=7, workers=workers)) == list(range(7))
    assert signal.getsignal(signal.SIGCHLD) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (signal.SIGKILL, "--data.workers"),
        (signal.SIGBUS, "--shm-size"),
        (signal.SIGSEGV, "sample 0 of a.tar"),
        (signal.SIGTERM, "same command"),
    ],
)
def test_a_death_names_its_signal_and_what_to_do(number, advice):
    loader = load(
        at(2, lambda: os.kill(os.getpid(), number)), reading=lambda worker: f"sample {worker} of a.tar"
    )
    with pytest.raises(DeadLoaderWorker) as caught:
        list(loader)
    assert caught.value.exitcode == -number
    assert number.name in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.slow
def test_a_launchers_signal_to_the_group_does_not_reach_a_loader_worker_that_starts(monkeypatch):
    """As torchrun's, which signals all processes of a rank's group; before, the loader worker died of it."""
    leave = os.setpgid

    def signalled_just_before(pid, group):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        leave(pid, group)

    monkeypatch.setattr(os, "setpgid", signalled_just_before)
    assert list(load(items=3, workers=2)) == [0, 1, 2]


@pytest.mark.slow
def test_an_exit_code_is_reported():
    with pytest.raises(DeadLoaderWorker, match="exit code 3") as caught:
        list(load(at(1, lambda: os._exit(3))))
    assert caught.value.exitcode == 3


def test_what_the_kernel_killed_for_memory_is_told_from_what_it_only_may_have(monkeypatch):
    kills = iter(range(1, 1000))
    monkeypatch.setattr(loader_workers, "_memory_kills", lambda: next(kills))
    with pytest.raises(DeadLoaderWorker) as caught:
        list(load(lambda number: os.kill(os.getpid(), signal.SIGKILL)))
    assert "most likely" not in str(caught.value)


def test_kills_for_memory_are_read_from_the_cgroup_or_unknown():
    assert loader_workers._memory_kills() >= 0


def kill_worker(loader):
    """Kill the loader worker whose pid is an item; wait until this process has been signalled."""
    items = iter(loader)
    pid = next(items)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return items


@pytest.mark.slow
@pytest.mark.parametrize("place", ["main thread", "another thread"])
def test_a_death_is_an_error_where_the_next_item_is_awaited_and_nowhere_before(place):
    """Before, torch raised it from whatever line was running, a save for example."""
    seen = []

    def work():
        items = kill_worker(load(lambda number: os.getpid()))
        for _ in range(1000):
            seen.append("continues")
        try:
            next(items)
        except DeadLoaderWorker as death:
            seen.append(death.exitcode)

    if place == "main thread":
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    assert seen == ["continues"] * 1000 + [-signal.SIGKILL]


@pytest.mark.slow
def test_a_death_while_an_item_is_awaited_ends_the_wait():
    """Another loader worker is still at work, on the item that is awaited."""

    def act(number):
        if get_worker_info().id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(DeadLoaderWorker):
        list(load(act, workers=2))


@pytest.mark.slow
def test_a_death_after_the_last_item_is_no_error():
    items = kill_worker(load(lambda number: os.getpid(), items=1))
    assert list(items) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        PathError("a.tar", "is damaged."),
        OptionError("data.max_bad", 2, "must be in [0, 1)", example=0.01),
        TooManyBadSamples("too many", {"reason": 3}, {"a.tar": 3}),
        DamagedFile("a.bin", "differs."),
        OSError(errno.ENOSPC, "No space left on device", "cache/a.tar"),
        MemoryError("1 TB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_says_all_arrives_as_it_was_raised(error):
    with pytest.raises(type(error)) as caught:
        list(load(at(1, lambda: fail(error))))
    assert str(caught.value) == str(error)
    assert vars(caught.value).items() >= vars(error).items()
    assert "\n" not in str(caught.value)
    assert any("in __getitem__" in note for note in caught.value.__notes__)  # for whoever wants to see it


@pytest.mark.slow
def test_an_error_of_a_library_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError, match="Original Traceback"):
        list(load(at(1, lambda: 1 / 0)))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.slow
def test_too_many_open_files_are_reported_with_the_limit(workers):
    error = OSError(errno.EMFILE, "Too many open files", "a.tar")
    with pytest.raises(TooManyOpenFiles if workers else OSError) as caught:
        list(load(at(1, lambda: fail(error)), workers=workers))
    if workers:
        assert all(text in str(caught.value) for text in ("ulimit -n", "--data.workers"))


def use_all_descriptors():
    """No file can be opened; the tensor cannot be sent then, from a thread of the queue."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # which are open
    return torch.zeros(1 << 16)


@pytest.mark.slow
def test_an_item_that_cannot_be_sent_ends_its_loader_worker_and_is_not_awaited(capfd):
    with pytest.raises(DeadLoaderWorker, match="ulimit -n"):
        list(load(at(1, use_all_descriptors)))
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(DeadLoaderWorker, match="exit code 1"):
        list(load(at(1, lambda: threading.Lock())))
    assert "cannot pickle" in capfd.readouterr().err


@pytest.mark.parametrize(
    "error", [RuntimeError("received 0 items of ancdata"), OSError(errno.EMFILE, "Too many open files")]
)
def test_too_many_open_files_here_are_told_from_a_dead_loader_worker(error):
    assert isinstance(load()._translated(error, lambda: None, []), TooManyOpenFiles)


@pytest.mark.slow
def test_loader_workers_that_are_left_end_when_one_has_died():
    pids = set()

    def act(number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    def collect():
        for pid in load(act, items=100, workers=2):
            pids.add(pid)

    with pytest.raises(DeadLoaderWorker):
        collect()

    def ended(pid):
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    assert wait_for(lambda: all(map(ended, pids)))
