"""The two passes against the paper's equations for one rank of K, in one process."""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip.objective import kernel
from tests.objective.features import pair, relative_error
from tests.objective.reference import inner, negatives, rank_gradients


def passes(e1, e2, tau_B2, u_B2, k, K, tile_bytes, epsilon=1e-14, power=1):
    """Pass A and pass B of rank k, with estimators u given."""
    B, b = len(e1), len(e1) // K
    local = slice(k * b, (k + 1) * b)
    features = kernel.Features(e1[local], e2[local], e1, e2, k * b)
    sims = kernel.similarities(features, tile_bytes)
    estimates = kernel.inner_estimates(features, sims, tau_B2[local], log(B - 1))
    log_outer_B2 = torch.log(epsilon + u_B2)
    s_ii = (e1 * e2).sum(1)[:, None]
    lambda_B2 = s_ii + tau_B2 * (log(B - 1) + log_outer_B2 + (1 - power) * tau_B2.log())
    gradients = kernel.feature_gradients(features, sims, tau_B2, lambda_B2, 1 / b)
    return estimates, gradients


@pytest.mark.slow
@pytest.mark.parametrize("K", [1, 2, 4, 8])
@given(
    b=st.integers(1, 5),
    d=st.integers(2, 7),
    seed=st.integers(0, 10_000),
    tile=st.sampled_from([1, 8 * 3, 8 * 20, 1 << 20]),
    power=st.sampled_from([0, 1]),
)
def test_every_rank_gets_the_papers_gradient(K, b, d, seed, tile, power):
    B = max(2, b * K) if K == 1 else b * K
    e1, e2 = (x.detach() for x in pair(B, d, seed))
    generator = torch.Generator().manual_seed(seed)
    tau_B2 = 0.05 + 0.2 * torch.rand(B, 2, generator=generator, dtype=torch.float64)
    u_B2 = torch.stack(inner(e1, e2, *tau_B2.T, negatives(B, None)), dim=1) * (
        0.5 + torch.rand(B, 2, generator=generator, dtype=torch.float64)
    )
    w = tau_B2**power / (1e-14 + u_B2)
    g = torch.stack(inner(e1, e2, *tau_B2.T, negatives(B, None)), dim=1)
    for k in range(K):
        estimates, gradients = passes(e1, e2, tau_B2, u_B2, k, K, tile, power=power)
        local = slice(k * (B // K), (k + 1) * (B // K))
        assert torch.allclose(estimates.log_g, g[local].log(), rtol=1e-10, atol=1e-12)
        expected = rank_gradients(e1, e2, *tau_B2.T, *w.T, k, K, negatives(B, None))
        for actual, wanted in zip(gradients, expected, strict=True):
            assert relative_error(actual, wanted) < 1e-10


def test_mean_a_is_the_softmax_mean_of_the_exponents():
    e1, e2 = (x.detach() for x in pair(9, 4, seed=1))
    tau_B2 = torch.full((9, 2), 0.1, dtype=torch.float64)
    estimates, _ = passes(e1, e2, tau_B2, torch.ones_like(tau_B2), 0, 1, 8 * 12)
    s = e1 @ e2.T
    for i in range(9):
        others = [j for j in range(9) if j != i]
        for side, row in enumerate((s[i, others], s[others, i])):
            a = (row - s[i, i]) / 0.1
            assert float(estimates.mean_a[i, side]) == pytest.approx(float(a.softmax(0) @ a), rel=1e-12)


@pytest.mark.parametrize(("b", "B"), [(12, 12), (4, 12)])
def test_the_budget_decides_between_caching_and_recomputing(b, B):
    e1, e2 = (x.detach().float() for x in pair(B, 5, seed=0))
    sides, tau_B2 = (1 if b == B else 2), torch.full((B, 2), 0.1)
    for budget, products in ((sides * b * B * 4, sides), (sides * b * B * 4 - 1, None)):
        with CalledOps() as called:
            passes(e1, e2, tau_B2, torch.ones_like(tau_B2), 0, B // b, budget)
        count = called.ops.count(torch.ops.aten.mm.out)
        if products:
            assert count == products  # one similarity when b = B, one per side otherwise; none twice
        else:
            assert count > 2 * sides


class CalledOps(TorchDispatchMode):
    """Records the operators that run inside it."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(op)
        return op(*args, **kwargs or {})


def test_float32_gives_float32_and_float64_gives_float64():
    for dtype in (torch.float32, torch.float64):
        e1, e2 = (x.detach().to(dtype) for x in pair(4, 3, seed=0))
        tau_B2 = torch.full((4, 2), 0.1, dtype=dtype)
        estimates, gradients = passes(e1, e2, tau_B2, torch.ones_like(tau_B2), 0, 1, 1 << 20)
        assert {x.dtype for x in (*estimates, *gradients)} == {dtype}
