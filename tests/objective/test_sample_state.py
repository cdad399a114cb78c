"""The state of the samples: writes, reads and saving."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastclip import GlobalContrastiveLoss
from fastclip.objective.exchange import Exchange
from fastclip.objective.sample_state import SampleState, first_of_equals
from tests.objective.features import pair


def state(n=10, tau=None):
    return SampleState(n, Exchange(), tau, torch.device("cpu"), torch.float64)


def write(held, ids, log_u, finite=True):
    fetch = held.fetch(torch.tensor(ids))
    held.write(fetch, lambda old: {"log_u": torch.tensor(log_u).double()}, torch.tensor(finite))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_first_of_equals_marks_the_lowest_position(ids):
    expected = [ids.index(i) == position for position, i in enumerate(ids)]
    assert first_of_equals(torch.tensor(ids)).tolist() == expected


def test_written_rows_are_fetched_and_the_rest_is_untouched():
    held = state()
    write(held, [7, 2], [[1.0, 2.0], [3.0, 4.0]])
    log_u, tau = held.fetch(torch.tensor([2, 5, 7])).wait()
    assert tau is None
    assert log_u.tolist() == [[3.0, 4.0], [-torch.inf, -torch.inf], [1.0, 2.0]]
    assert int(held.visited) == 2
    write(held, [7, 3], [[9.0, 9.0], [9.0, 9.0]], finite=False)
    assert held.fetch(torch.tensor([7])).wait()[0].tolist() == [[1.0, 2.0]]
    assert int(held.visited) == 2


def test_individual_temperatures_come_with_log_u():
    log_u, tau = state(tau=0.03).fetch(torch.tensor([1, 4])).wait()
    assert log_u.shape == tau.shape == (2, 2)
    assert (tau == 0.03).all()


def test_an_unknown_id_reads_nan():
    log_u, _ = state().fetch(torch.tensor([9, 10, -1])).wait()
    assert log_u.isnan().tolist() == [[False, False], [True, True], [True, True]]


def test_memory_is_eight_bytes_per_sample_with_a_global_temperature():
    loss = GlobalContrastiveLoss("fastclip-v3", 1000)
    assert sum(c.numel() * c.element_size() for c in loss.sample_state.columns.values()) == 8 * 1001


@pytest.mark.parametrize("name", ["fastclip-v2", "fastclip-v3"])
def test_an_ordinary_state_dict_holds_everything(name):
    loss = GlobalContrastiveLoss(name, 9)
    loss(*pair(4, 3, seed=0, dtype=torch.float32), torch.tensor([1, 8, 3, 4]))
    saved = {key: value.clone() for key, value in loss.state_dict().items()}
    own = {"rho", "log_scale"} if name == "fastclip-v3" else {"rho"}
    assert set(saved) == set(loss.sample_state.columns) | own
    other = GlobalContrastiveLoss(name, 9)
    other.load_state_dict(saved)
    assert int(other.sample_state.visited) == 4
    batch = (*pair(4, 3, seed=1, dtype=torch.float32), torch.tensor([1, 2, 3, 4]))
    assert torch.equal(loss(*batch).value, other(*batch).value)
    assert torch.equal(loss.state_dict()["log_u"], other.state_dict()["log_u"])


def test_a_state_of_another_loss_is_refused():
    saved = GlobalContrastiveLoss("fastclip-v3", 9).state_dict()
    with pytest.raises(RuntimeError, match=r"\b9 samples.*\b10\b"):
        GlobalContrastiveLoss("fastclip-v3", 10).load_state_dict(saved)
    other = GlobalContrastiveLoss("fastclip-v2", 9)
    with pytest.raises(RuntimeError, match='"tau", "tau_m", "tau_v", "tau_visits"'):
        other.load_state_dict(saved)
    assert other.load_state_dict({}, strict=False).missing_keys == list(other.sample_state.columns)
