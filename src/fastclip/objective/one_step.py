"""Algorithm 1 of the paper: one step, from features, estimators and τ to the loss and all of its gradients.

Shapes: b local batch, B = K·b global batch over K ranks, d features; a last dimension of 2 holds the two
sides (1: an image among texts, 2: a text among images). Everything is in log space: at τ = 0.01 the inner
functions reach e^200, their logarithms 200. No autograd, no state: `loss.py` has both.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from fastclip.objective import estimators, kernel, temperature
from fastclip.objective.algorithms import Settings
from fastclip.objective.estimators import log_outer
from fastclip.objective.groups import Groups


class Before(NamedTuple):
    """What a step starts from, of the global batch; equal on all ranks."""

    gamma: float
    rho: float
    tau_B2: Tensor
    log_u_B2: Tensor | None
    """The estimators; None without, and in evaluation: u = g, as with γ = 1."""
    groups: Groups | None
    """Equal captions; None: all other samples are negatives."""


class After(NamedTuple):
    """A step's results."""

    value: Tensor
    image_grad_bd: Tensor | None
    text_grad_bd: Tensor | None
    log_scale_grad: Tensor | None
    """Of a learnable τ, with respect to log(1/τ)."""
    log_u_B2: Tensor
    """The new estimators."""
    tau_grad_B2: Tensor
    """Of individual temperatures; empty without."""
    writable: Tensor
    """Whether the new estimators may be stored: all of them are finite, and there are negatives."""
    stats: dict[str, Tensor]


Share = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def one_step(
    settings: Settings,
    features: kernel.Features,
    before: Before,
    share: Share,
    needs: tuple[bool, bool],
    tile_bytes: int,
) -> After:
    """Compute a step.

    Args:
        share: maps rows of the local batch (b×c) and totals of this rank to those of all ranks.
        needs: which of the two towers requires a gradient.
        tile_bytes: memory for similarities.
    """
    power, groups = settings.algorithm.tau_power, before.groups
    b, B = len(features.image_bd), len(features.image_Bd)
    local = slice(features.offset, features.offset + b)
    tau_B2, tau_b2 = before.tau_B2, before.tau_B2[local]
    log_n_B1, log_n_b1 = _log_negatives(B, groups, local)
    features = features if groups is None else features._replace(code_B=groups.code_B)

    # Pass A: inner functions, then the estimators u, eq. (u:ema)
    sims = kernel.similarities(features, tile_bytes)
    inner = kernel.inner_estimates(features, sims, tau_b2, log_n_b1)
    if groups is not None:  # without negatives: placeholders with zero weight
        inner = kernel.Inner(inner.s_ii, *(torch.where(groups.has_negatives, x, 0.0) for x in inner[1:]))
    log_u_b2 = inner.log_g
    if before.log_u_B2 is not None:
        log_u_b2 = _moved(settings, before.log_u_B2[local].to(log_u_b2.dtype), inner.log_g, before.gamma)
    log_epsilon = settings.log_epsilon
    log_outer_b2 = log_outer(log_u_b2, -log_n_b1 if log_epsilon is None else log_epsilon)
    weight_b2 = (inner.log_g - log_outer_b2).exp()  # g/(ε + u)
    q_b2 = inner.mean_a * weight_b2
    lambda_b2 = inner.s_ii[:, None] + tau_b2 * (log_n_b1 + log_outer_b2 + (1 - power) * tau_b2.log())
    if groups is not None:
        lambda_b2 = torch.where(groups.has_negatives, lambda_b2, -kernel.EXCLUDED)  # no gradient

    # Gathered: λ and log u of each sample (and the gradient of its τ), Σq and the largest weight
    scalars = [lambda_b2, log_u_b2]
    if settings.algorithm.temperature == "individual":
        scalars.append(temperature.individual_gradient(before.rho, log_outer_b2, q_b2))
    shared_Bc, totals_K2 = share(torch.cat(scalars, dim=1), torch.stack([q_b2.sum(), weight_b2.max()]))
    lambda_B2, log_u_B2 = shared_Bc[:, 0:2], shared_Bc[:, 2:4]

    # The outer mean, and the gradient of a global τ: from the same numbers on every rank
    log_outer_B2 = log_outer(log_u_B2, -log_n_B1 if log_epsilon is None else log_epsilon)
    mean = temperature.BatchMeans(
        log_outer_B2.sum(1).mean(), log_u_B2.sum(1).mean(), totals_K2[:, 0].sum() / B
    )
    value = settings.scale * (tau_B2**power * (log_outer_B2 + before.rho)).sum(1).mean()
    log_scale_grad = None
    if settings.algorithm.temperature == "learnable":
        tau = tau_B2[0, 0]
        log_scale_grad = -tau * temperature.global_gradient(settings, before.rho, tau, mean)

    # Pass B: gradients of the local features, ready to be averaged over ranks: 1/b = K/B
    gradients = kernel.feature_gradients(features, sims, tau_B2, lambda_B2, settings.scale / b, needs)
    stats = _stats(value, mean, tau_B2, log_u_B2, totals_K2[:, 1].max())
    writable = shared_Bc.isfinite().all()
    if groups is not None:
        value, log_scale_grad, stats = _only_if(groups.has_negatives, value, log_scale_grad, stats)
        stats["left_out"] = groups.left_out
        writable = writable & groups.has_negatives
    if settings.adaptive and before.log_u_B2 is not None:
        stats["gamma"] = estimators.adaptive_log_gamma(before.log_u_B2, before.gamma).exp().mean()
    return After(value, *gradients, log_scale_grad, log_u_B2, shared_Bc[:, 4:], writable, stats)


def _log_negatives(
    B: int, groups: Groups | None, local: slice
) -> tuple[float, float] | tuple[Tensor, Tensor]:
    """log of the number of negatives of the global batch and of the local one: log(B−1), or one each (×1)."""
    if groups is None:
        return log(B - 1), log(B - 1)
    return groups.log_negatives_B[:, None], groups.log_negatives_B[local, None]


def _moved(settings: Settings, log_u: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """The estimators after this step."""
    move = estimators.moved_adaptively if settings.adaptive else estimators.moved
    return move(log_u, log_g, gamma)


def _stats(
    value: Tensor, mean: temperature.BatchMeans, tau_B2: Tensor, log_u_B2: Tensor, max_weight: Tensor
) -> dict[str, Tensor]:
    sorted_log_u = log_u_B2.flatten().sort().values
    quantiles = {q: sorted_log_u[round(q / 100 * (len(sorted_log_u) - 1))] for q in (5, 50, 95)}
    return {
        "loss": value,
        "radius": (mean.q - mean.log_outer) / 2,
        "tau": tau_B2.mean(),
        **{f"log_u_q{q:02d}": quantile for q, quantile in quantiles.items()},
        "max_weight": max_weight,
    }


def _only_if(
    there: Tensor, value: Tensor, log_scale_grad: Tensor | None, stats: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """These if there are negatives, otherwise zeros; τ is what it is."""
    kept = {name: x if name == "tau" else torch.where(there, x, 0.0) for name, x in stats.items()}
    gradient = None if log_scale_grad is None else torch.where(there, log_scale_grad, 0.0)
    return kept["loss"], gradient, kept
