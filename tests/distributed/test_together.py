"""Long work of all ranks: no deadline for the whole, errors on all ranks, and lost ranks are noticed."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fastclip.data.pairs import SourceError
from fastclip.distributed import together as module
from fastclip.distributed.together import together
from fastclip.distributed.world import World
from tests.processes import wait_for
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def world_of(rank, size, timeout=30.0):
    """The world of a rank whose collectives time out after `timeout` seconds."""
    module._EVERY = 0.1
    return World(rank, size, rank, CPU, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))


def work_for(seconds, beat):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        beat()
        time.sleep(0.01)


def test_a_rank_alone_just_works():
    assert together(World.alone(), lambda beat: (beat(), 5)[1]) == 5


def _work_long(rank, size):
    world, seen = world_of(rank, size, timeout=2.0), []

    def work(beat):
        work_for((0.0, 4.0, 0.5)[rank], beat)
        return rank

    value = together(world, work, lambda finished, ranks: seen.append((finished, ranks)))
    return value, seen, world.gather(rank)


@pytest.mark.slow
def test_ranks_that_finished_wait_longer_than_a_collective_may_take():
    results = run_ranks(_work_long, 3)
    assert [value for value, _, _ in results] == [0, 1, 2]
    assert all(gathered == [0, 1, 2] for _, _, gathered in results)  # and later collectives are in step
    _, seen, _ = results[0]
    assert {(1, 3), (2, 3)} == set(seen)


def _fail(rank, size, who):
    world, others = world_of(rank, size), []

    def work(beat):
        if rank == who:
            raise SourceError("shard.tar", "is bad.")
        try:
            work_for(20 if rank == 1 else 0, beat)
        except Exception as error:
            others.append(error)

    start = time.monotonic()
    with pytest.raises(SourceError) as caught:
        together(world, work)
    assert not others  # the work's own handlers do not see it
    assert time.monotonic() - start < 15  # nobody works to the end in vain
    return caught.value.path, caught.value.problem, world.gather(rank)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 2])
def test_an_error_on_one_rank_is_raised_on_all(who):
    assert run_ranks(_fail, 3, who) == [("shard.tar", "is bad.", [0, 1, 2])] * 3


class Unsendable(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.kept = lambda: second


def _fail_unsendably(rank, size):
    def work(beat):
        if rank == 0:
            raise Unsendable("disk full", 5)
        work_for(20, beat)

    with pytest.raises(Exception, match="disk full") as caught:
        together(world_of(rank, size), work)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.slow
def test_an_error_that_cannot_be_sent_arrives_as_its_name_and_message():
    assert run_ranks(_fail_unsendably, 2) == [
        ("Unsendable", "disk full"),
        ("RuntimeError", "Unsendable: disk full"),
    ]


def _lose(rank, size, how, folder):
    world = world_of(rank, size, timeout=1.0)

    def work(beat):
        work_for(20 if rank == 0 and how == "dies early" else 0.3, beat)
        if rank == 1 and how == "is silent":
            wait_for((folder / "noticed").exists)
        elif rank == 1:
            os._exit(0)

    try:
        together(world, work)
    except RuntimeError as error:
        (folder / ("noticed" if rank == 0 else "also")).write_text(str(error))
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "dies early", "is silent"])
def test_a_rank_that_dies_or_is_silent_for_the_timeout_is_noticed(how, tmp_path):
    with pytest.raises(TimeoutError):  # no rank returns
        run_ranks(_lose, 2, how, tmp_path)
    assert "gloo/" in (tmp_path / "noticed").read_text()
