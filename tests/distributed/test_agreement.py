"""Ranks that differ stop together, and the error names the first difference and the rank that has it."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fastclip.distributed.agreement import RanksDiffer, first_difference, require_same
from fastclip.distributed.world import Place, World, _require_same_device
from tests.ranks import run_ranks

VALUES = st.none() | st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=2) | st.text(max_size=1)


def fields(error):
    return error.name, error.rank, error.value, error.first


def test_the_first_option_that_differs_is_named_with_both_values_and_the_rank():
    first = {"seed": 0, "optim.lr": 0.001, "out": "a"}
    error = first_difference([first, first, first | {"optim.lr": 0.002, "out": "b"}, first | {"out": "c"}])
    assert fields(error) == ("optim.lr", 2, 0.002, 0.001)
    assert all(part in str(error) for part in ("ank 2", "ank 0", "optim.lr=0.002", "0.001"))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [([{}, {"optim.clip": 1.0}], (1.0, None)), ([{"optim.clip": 1.0}, {}], (None, 1.0))],
)
def test_an_option_that_one_rank_lacks_differs(facts, expected):
    assert fields(first_difference(facts)) == ("optim.clip", 1, *expected)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), VALUES), min_size=1, max_size=4))
def test_there_is_a_difference_exactly_if_the_set_values_are_not_all_equal(facts):
    plain = [{name: value for name, value in one.items() if value is not None} for one in facts]
    error = first_difference(facts)
    assert (error is None) == all(one == plain[0] for one in plain)
    if error is not None:
        assert facts[error.rank].get(error.name) == error.value != error.first == facts[0].get(error.name)


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(RanksDiffer("seed", 1, 2, 3)))
    assert fields(error) == ("seed", 1, 2, 3)


def test_a_rank_that_is_alone_agrees():
    require_same(World.alone(), {"seed": 1})


def compare(rank, size):
    world = World(rank, size, rank, torch.device("cpu"), dist.group.WORLD)
    require_same(world, {"seed": 1})
    with pytest.raises(RanksDiffer) as caught:
        require_same(world, {"seed": rank // 2, "more": [rank] * 1000 * rank})
    return fields(caught.value)[:2]


@pytest.mark.slow
def test_real_ranks_get_the_same_error_and_can_still_communicate():
    assert run_ranks(compare, 3) == [("seed", 2)] * 3


# The type of device, compared before torch chooses how ranks communicate.


def meet(types):
    """What each rank raises if it has this type of device."""
    store = dist.HashStore()

    def join(rank):
        place = Place(rank, len(types), rank, "localhost", 1)
        try:
            _require_same_device(store, place, torch.device(types[rank]))
        except RanksDiffer as error:
            return fields(error)

    with ThreadPoolExecutor(len(types)) as pool:
        return list(pool.map(join, range(len(types))))


def test_ranks_with_the_same_type_of_device_agree():
    assert meet(["cuda:0", "cuda:1", "cuda:0"]) == [None] * 3


@pytest.mark.parametrize(("types", "rank"), [(["cuda", "cuda", "cpu"], 2), (["cpu", "cuda", "cuda"], 1)])
def test_another_type_of_device_stops_every_rank_before_a_collective(types, rank):
    assert meet(types) == [("device type", rank, types[rank], types[0])] * 3
