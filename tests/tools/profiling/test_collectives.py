"""Bytes sent by kind of collective, counted with a process group that sends nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastclip.tools.profiling.collectives import bytes_sent

K = 4


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", rank=0, world_size=K, store=FakeStore())
    yield
    dist.destroy_process_group()


def rows(n, dtype=torch.float32):
    return torch.zeros(n, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: dist.all_reduce(rows(100)), {"all_reduce": 2 * 3 / 4 * 400}),
        (lambda: dist.all_reduce(rows(100, torch.float64)), {"all_reduce": 2 * 3 / 4 * 800}),
        (lambda: dist.all_gather_into_tensor(rows(40), rows(10)), {"all_gather": 3 * 40}),
        (lambda: dist.all_gather([rows(10) for _ in range(K)], rows(10)), {"all_gather": 3 * 40}),
        (lambda: dist.reduce_scatter_tensor(rows(10), rows(40)), {"reduce_scatter": 3 * 40}),
        (lambda: dist.scatter(rows(10), [rows(10) for _ in range(K)], src=0), {"scatter": 3 * 40}),
        (lambda: dist.scatter(rows(10), src=1), {"scatter": 0}),
        (lambda: dist.broadcast(rows(10), src=0), {"broadcast": 3 / 4 * 40}),
        (lambda: dist.send(rows(10), dst=1), {"send": 40}),
        (lambda: dist.recv(rows(10), src=1), {}),
        (lambda: dist.barrier(), {}),
        (lambda: rows(10) + 1, {}),
    ],
)
def test_bytes_sent_by_each_collective_of_a_ring(four_ranks, call, expected):
    assert bytes_sent(call) == pytest.approx(expected)


def test_calls_of_one_kind_add_up(four_ranks):
    def step():
        dist.all_reduce(rows(10))
        dist.all_gather_into_tensor(rows(40), rows(10))
        dist.all_reduce(rows(30), async_op=True).wait()

    assert bytes_sent(step) == {"all_gather": 120, "all_reduce": 2 * 3 / 4 * 160}


def test_a_single_rank_sends_nothing():
    done = []
    assert bytes_sent(lambda: done.append(1)) == {}
    assert done
