"""The kept patches: a pure function of (seed, epoch, id), uniform and without repetition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastclip.data.order import Samples, seed_of
from fastclip.data.patches import PatchChoice

MASK = 2**64 - 1
choices = st.integers(1, 60).flatmap(lambda n: st.builds(PatchChoice, st.just(n), st.integers(1, n)))
pairs = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 50)), min_size=1, max_size=20)


def draw(choice, seed, pairs):
    """The patches of (id, epoch) pairs."""
    ids, epochs = np.array(pairs, dtype=np.int64).T
    return choice.draw(seed, Samples(ids, epochs))


def one_by_one(choice, seed, sample, epoch):
    """SplitMix64 of each patch, in plain integers: a changed function would change resumed runs."""

    def scrambled(x):
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ x >> 33) * factor & MASK
        return x ^ x >> 33

    key = scrambled(seed_of(seed, epoch, -2) + sample & MASK)
    numbers = [scrambled(key + 0x9E3779B97F4A7C15 * (i + 1) & MASK) for i in range(choice.patches)]
    return sorted(sorted(range(choice.patches), key=numbers.__getitem__)[: choice.kept])


@given(choice=choices, seed=st.integers(0, 2**63 - 1), pairs=pairs)
def test_a_batch_has_the_patches_of_its_samples_one_by_one(choice, seed, pairs):
    found = draw(choice, seed, pairs)
    assert found.dtype == torch.int64
    assert found.tolist() == [one_by_one(choice, seed, *pair) for pair in pairs]


@given(choice=choices, seed=st.integers(0, 2**63 - 1), pairs=pairs)
def test_the_right_number_of_patches_is_kept_without_repetition(choice, seed, pairs):
    for row in draw(choice, seed, pairs).tolist():
        assert len(set(row)) == len(row) == choice.kept
        assert row == sorted(row)
        assert set(row) <= set(range(choice.patches))


@pytest.mark.parametrize("along", ["ids", "epochs", "seeds"])
def test_every_pair_of_patches_is_kept_equally_often(along):
    n, k, draws = 12, 5, 20_000
    choice = PatchChoice(n, k)
    if along == "ids":
        kept = draw(choice, 3, [(i, 7) for i in range(draws)])
    elif along == "epochs":
        kept = draw(choice, 3, [(7, i) for i in range(draws)])
    else:
        kept = torch.cat([draw(choice, i, [(7, 3)]) for i in range(draws)])
    is_kept = torch.zeros(draws, n).scatter_(1, kept, 1.0)
    together = (is_kept.T @ is_kept) / draws
    off_diagonal = together[~torch.eye(n, dtype=torch.bool)]
    for found, p in ((together.diag(), k / n), (off_diagonal, k * (k - 1) / (n * (n - 1)))):
        assert (found - p).abs().max() < 5 * (p * (1 - p) / draws) ** 0.5


def test_patches_of_neighbours_and_of_successive_epochs_are_independent():
    n, k, draws = 12, 5, 20_000
    first = draw(PatchChoice(n, k), 3, [(i, 7) for i in range(draws)])
    for other in ([(i + 1, 7) for i in range(draws)], [(i, 8) for i in range(draws)]):
        both = torch.zeros(draws, n).scatter_(1, first, 1.0)
        both *= torch.zeros(draws, n).scatter_(1, draw(PatchChoice(n, k), 3, other), 1.0)
        common = both.sum(dim=1)  # hypergeometric
        deviation = (k * k / n * (n - k) ** 2 / (n * (n - 1)) / draws) ** 0.5
        assert abs(float(common.mean()) - k * k / n) < 5 * deviation
