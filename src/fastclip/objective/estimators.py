"""The estimators u of the inner functions, in log space: how they move, and the outer function of them."""

from __future__ import annotations

from math import inf, log

import torch
from torch import Tensor
from torch.nn.functional import softplus

SCENT_OFFSET = 10.0  # A, the log of SCENT's step size α


def moved(log_u: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """eq. (u:ema), u ← (1−γ)·u + γ·g; a sample's first visit takes the batch's estimate g."""
    new = torch.logaddexp(_log1m(gamma) + log_u, log(gamma) + log_g)
    return torch.where(log_u == -inf, log_g, new)


def moved_adaptively(log_u: Tensor, log_g: Tensor, least_gamma: float) -> Tensor:
    """The same with SCENT's separate γ for each sample, max(σ(A + log u), least_gamma).

    Without the floor it is u·(1 + αg)/(1 + αu). The floor bounds the weights g/(ε + u) by 1/least_gamma:
    a very small u would otherwise stay small after a large g.
    """
    log_gamma = adaptive_log_gamma(log_u, least_gamma)
    log_rest = (-softplus(SCENT_OFFSET + log_u)).clamp(max=_log1m(least_gamma))
    new = torch.logaddexp(log_rest + log_u, log_gamma + log_g)
    return torch.where(log_u == -inf, log_g, new)


def adaptive_log_gamma(log_u: Tensor, least_gamma: float) -> Tensor:
    """log of SCENT's γ; 0 on a sample's first visit."""
    log_gamma = (-softplus(-(SCENT_OFFSET + log_u))).clamp(min=log(least_gamma))
    return log_gamma.masked_fill(log_u == -inf, 0.0)


def log_outer(log_u: Tensor, log_epsilon: float | Tensor) -> Tensor:
    """log(ε + u), the outer function f."""
    if not isinstance(log_epsilon, Tensor):
        log_epsilon = log_u.new_full((), log_epsilon)
    return torch.logaddexp(log_u, log_epsilon)


def _log1m(gamma: float) -> float:
    """log(1 − γ), −inf at γ = 1."""
    return log(1 - gamma) if gamma < 1 else -inf
