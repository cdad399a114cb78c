"""The order of samples: a pure function, each id once per epoch, the same at every world size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.data.order import Order, permute, seed_of
from fastclip.errors import InputError, OptionError


@given(n=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**40), st.integers(0, 100)))
def test_permute_is_a_permutation_and_can_be_evaluated_in_parts(n, key):
    whole = permute(np.arange(n), n, key)
    assert sorted(whole.tolist()) == list(range(n))
    part = np.arange(n)[:: max(1, n // 7)]
    assert (permute(part, n, key) == whole[part]).all()


@pytest.mark.slow
def test_permutations_look_random():
    """Over many keys, samples and gaps between neighbours are uniform over positions."""
    n, keys = 24, 8_000
    places = np.stack([permute(np.arange(n), n, (key, 0)) for key in range(keys)])
    counts = np.stack([np.bincount(places[:, i], minlength=n) for i in range(n)])
    chi = ((counts - keys / n) ** 2 / (keys / n)).sum()
    assert abs(chi - n * (n - 1)) < 6 * (2 * n * (n - 1)) ** 0.5
    gaps = np.bincount((places[:, 1] - places[:, 0]) % n, minlength=n)[1:]
    expected = keys / (n - 1)
    assert ((gaps - expected) ** 2 / expected).sum() < 22 + 6 * 44**0.5


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["full", "blocks"])
def test_every_epoch_sees_each_sample_once_at_every_world_size(shuffle):
    random = np.random.default_rng(0)
    for case in range(5000):
        n, batch = int(random.integers(1, 25)), int(random.choice([8, 12, 40]))
        ends = np.array([*np.sort(random.integers(0, n + 1, random.integers(0, 5))), n])
        seed, window = int(random.integers(10**9)), int(random.choice([1, 7, 1000]))
        epoch, K = int(random.integers(0, 6)), int(random.choice([1, 2, 4]))
        order = Order(n, batch, seed, shuffle, ends, window)
        seen = []
        for step in range(epoch * n // batch, ((epoch + 1) * n - 1) // batch + 1):
            whole = order.global_batch(step)
            parts = [order.local_batch(step, rank, K) for rank in range(K)]
            assert np.concatenate([part.ids for part in parts]).tolist() == whole.ids.tolist(), case
            assert np.concatenate([part.epochs for part in parts]).tolist() == whole.epochs.tolist(), case
            seen += whole.ids[whole.epochs == epoch].tolist()
        assert sorted(seen) == list(range(n)), case


def test_batch_continues_into_the_next_epoch():
    order = Order(10, 4, shuffle="none")
    assert order.global_batch(2).ids.tolist() == [8, 9, 0, 1]
    assert order.global_batch(2).epochs.tolist() == [0, 0, 1, 1]
    assert [order.epoch_of(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]


def test_epochs_and_seeds_differ():
    first = Order(1000, 100, seed=1).global_batch(0).ids
    assert (first != Order(1000, 100, seed=1).global_batch(10).ids).any()
    assert (first != Order(1000, 100, seed=2).global_batch(0).ids).any()


def test_blocks_read_few_shards_at_a_time():
    ends = np.arange(100, 10_001, 100)
    order = Order(10_000, 50, seed=3, shuffle="blocks", block_ends=ends, window=400)
    for step in range(8):  # the first window
        shards = set((order.global_batch(step).ids // 100).tolist())
        assert len(shards) <= 4
    window = np.concatenate([order.global_batch(step).ids for step in range(8)])
    assert len(set((window // 100).tolist())) == 4
    assert (np.sort(window) != window).any()


def test_seeds_are_distinct_and_fit_63_bits():
    seeds = {seed_of(s, e, i) for s in range(3) for e in range(5) for i in range(300)}
    assert len(seeds) == 3 * 5 * 300
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"n": 0}, "n"),
        ({"batch": 0}, "batch"),
        ({"shuffle": "blocks", "block_ends": np.array([3, 5])}, "block_ends"),
        ({"shuffle": "blocks", "block_ends": np.array([5, 3, 10])}, "block_ends"),
    ],
)
def test_invalid_arguments_are_rejected(options, argument):
    with pytest.raises(InputError) as caught:
        Order(**({"n": 10, "batch": 4} | options))
    assert caught.value.argument == argument


@pytest.mark.parametrize(("name", "value"), [("shuffle", "some"), ("window", 0)])
def test_invalid_options_are_rejected(name, value):
    with pytest.raises(OptionError) as caught:
        Order(10, 4, **{name: value})
    assert (caught.value.option, caught.value.value) == (f"data.{name}", value)


def test_batch_must_be_divisible_by_the_number_of_ranks():
    with pytest.raises(OptionError) as caught:
        Order(100, 10).local_batch(0, 0, 4)
    assert (caught.value.option, caught.value.value, caught.value.example) == ("batch.size", 10, 8)
