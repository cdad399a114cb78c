"""The state as it is saved and loaded: whole, sharded, or refused."""

import copy
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastclip import GlobalContrastiveLoss
from fastclip.objective import saved_state
from fastclip.objective.exchange import MissingRanks
from tests.objective.features import pair
from tests.ranks import run_ranks

N, D = 37, 6


def trained(name, seed=0, group=None):
    loss = GlobalContrastiveLoss(name, N, rho=0.5, process_group=group)
    K, rank = loss.exchange.world_size, loss.exchange.rank
    local = slice(rank * 4, rank * 4 + 4)
    image, text = (x.detach()[local] for x in pair(4 * K, D, seed=seed, dtype=torch.float32))
    ids = torch.randperm(N, generator=torch.Generator().manual_seed(seed))[: 4 * K]
    loss(image, text, ids[local])
    return loss


def rows_of(loss):
    return {
        key: column[: loss.sample_state.held].clone() for key, column in loss.sample_state.columns.items()
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# One rank


@pytest.mark.parametrize("name", ["fastclip-v2", "fastclip-v3"])
def test_a_whole_state_has_memory_of_its_own(name):
    loss = trained(name)
    saved = loss.state_dict()
    for key in loss.sample_state.columns:
        column = saved[key]
        assert column.is_contiguous()
        assert column.untyped_storage().nbytes() == column.numel() * column.element_size()
        assert not column.requires_grad
    before = saved["log_u"].clone()
    loss(*pair(4, D, seed=3, dtype=torch.float32), torch.arange(4))
    assert torch.equal(saved["log_u"], before)  # a copy: later steps do not change it


def test_a_sharded_state_of_one_rank_is_not_copied():
    loss = trained("fastclip-v3")
    assert list(loss.sharded_state_dict()) == ["log_scale", "log_u"]
    rows = loss.sharded_state_dict()["log_u"]
    assert rows.shape == (N, 2)
    assert rows.data_ptr() == loss.sample_state.columns["log_u"].data_ptr()


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(0, 2),  # another rank's state_dict()
        torch.zeros(N // 2, 2),  # a rank's part
        torch.zeros(N + 1, 2),
        torch.zeros(N, 1),
        torch.zeros(N),
        [1.0, 2.0],
    ],
    ids=lambda wrong: str(getattr(wrong, "shape", "list")),
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(wrong):
    loss = trained("fastclip-v3")
    before, visited = rows_of(loss), int(loss.sample_state.visited)
    with pytest.raises(RuntimeError, match="log_u"):
        loss.load_state_dict(loss.state_dict() | {"log_u": wrong})
    assert same(rows_of(loss), before)
    assert int(loss.sample_state.visited) == visited


def test_half_a_state_is_refused_even_if_keys_may_be_missing():
    with pytest.raises(RuntimeError, match="tau is missing"):
        trained("fastclip-v2").load_state_dict(trained("fastclip-v3").state_dict(), strict=False)


def test_a_large_state_is_saved_with_a_hint_at_the_sharded_form(monkeypatch, caplog):
    loss = trained("fastclip-v3")
    loss.state_dict()
    assert not caplog.records
    monkeypatch.setattr(saved_state, "LARGE_BYTES", N * 8 - 1)
    loss.state_dict()
    assert [record.name for record in caplog.records] == ["fastclip.objective.saved_state"]
    assert "sharded_state_dict" in caplog.text


@pytest.mark.parametrize("name", ["fastclip-v2", "fastclip-v3"])
def test_copies_and_pickles_of_the_loss_are_losses_of_their_own(name):
    loss = trained(name)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert same(rows_of(other), rows_of(loss))
        batch = (*pair(4, D, seed=3, dtype=torch.float32), torch.arange(4))
        other(*batch)
        assert not same(rows_of(other), rows_of(loss))


def test_a_loss_without_estimators_has_an_ordinary_state():
    loss = GlobalContrastiveLoss("mbcl", N)
    assert list(loss.state_dict()) == list(loss.sharded_state_dict()) == ["log_scale"]


# Several ranks


def three_ranks(rank, world_size, folder):
    saved_state.CHUNK_BYTES = 3 * 8 * 5  # five rows of each rank at a time
    for name in ("fastclip-v2", "fastclip-v3"):
        gather_whole(rank, world_size, trained(name), trained(name, seed=1))
    foreign_shards_are_refused(rank, Path(folder))
    sharded_states_need_no_whole_one(trained("fastclip-v2"))
    one_rank_alone_is_told_so(rank)
    a_group_of_some_ranks(rank)
    return True


def gather_whole(rank, world_size, loss, other):
    """Rank 0 gets everything, the others nothing; it loads everywhere."""
    whole, mine = loss.state_dict(), rows_of(loss)
    for key, column in loss.sample_state.columns.items():
        parts = [None] * world_size
        dist.all_gather_object(parts, mine[key])
        expected = torch.cat(parts) if rank == 0 else column[:0]
        assert torch.equal(whole[key], expected)
        assert type(whole[key]) is torch.Tensor
    assert len(whole["log_u"]) == (N if rank == 0 else 0)
    before = rows_of(other)
    with pytest.raises(RuntimeError):  # on rank 0 too, although its own part is whole
        other.load_state_dict(whole)
    assert same(rows_of(other), before)
    shared = [whole]
    dist.broadcast_object_list(shared)
    other.load_state_dict(shared[0])
    assert same(rows_of(other), mine)
    assert int(other.sample_state.visited) == 4 * world_size


def foreign_shards_are_refused(rank, folder):
    """A DTensor that rank 0 pickled holds rank 0's rows, whoever loads it."""
    loss = trained("fastclip-v3")
    torch.save(loss.sharded_state_dict(), folder / f"{rank}.pt")
    dist.barrier()
    other = trained("fastclip-v3", seed=1)
    before = rows_of(other)
    saved = torch.load(folder / "0.pt", weights_only=False)
    with pytest.raises(RuntimeError, match="rank"):
        other.load_state_dict(saved)
    assert same(rows_of(other), before)
    larger = GlobalContrastiveLoss("fastclip-v3", N + 1)
    with pytest.raises(RuntimeError, match="rank"):
        larger.load_state_dict(loss.sharded_state_dict())
    other.load_state_dict(torch.load(folder / f"{rank}.pt", weights_only=False))  # each rank its own: fine
    assert same(rows_of(other), rows_of(loss))


def sharded_states_need_no_whole_one(loss):
    whole, saved_state._whole_column = saved_state._whole_column, None  # not callable
    other = trained("fastclip-v2", seed=1)
    other.load_state_dict(loss.sharded_state_dict())
    assert same(rows_of(other), rows_of(loss))
    saved_state._whole_column = whole


def one_rank_alone_is_told_so(rank):
    """And after that, state_dict() works again."""
    loss = trained("fastclip-v3")
    loss.state_dict_timeout = 0.3
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(MissingRanks) as caught:
            loss.state_dict()
        assert 0.3 <= time.monotonic() - start < 30
        assert (caught.value.call, caught.value.ranks) == ("state_dict()", [1, 2])
        assert isinstance(caught.value, RuntimeError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.ranks, again.seconds) == ([1, 2], 0.3)
    dist.barrier()
    if rank != 1:  # those who wait together stop together
        with pytest.raises(MissingRanks) as caught:
            loss.state_dict()
        assert caught.value.ranks == [1]
    dist.barrier()
    loss.state_dict_timeout = 30
    assert len(loss.state_dict()["log_u"]) == (N if rank == 0 else 0)


def a_group_of_some_ranks(rank):
    group = dist.new_group([1, 2])
    if rank > 0:
        loss = trained("fastclip-v3", group=group)
        assert len(loss.state_dict()["log_u"]) == (N if rank == 1 else 0)
        shared = [loss.state_dict()]
        dist.broadcast_object_list(shared, src=1, group=group)
        other = trained("fastclip-v3", seed=1, group=group)
        other.load_state_dict(shared[0])
        assert same(rows_of(other), rows_of(loss))
        other.load_state_dict(loss.sharded_state_dict())


@pytest.mark.slow
def test_several_ranks_save_and_load_a_state_together_or_not_at_all(tmp_path):
    assert run_ranks(three_ranks, 3, str(tmp_path)) == [True] * 3
