"""Updates of the temperature: the gradients of a global τ, and the Adam step of individual ones.

q_i = ā_i·g_i/(ε + u_i) is the inner function's part of a sample's gradient: τ·∂g_i/∂τ/(ε + u_i) = −q_i.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

import torch
from torch import Tensor

from fastclip.objective.algorithms import TAU_MAX, Settings
from fastclip.objective.sample_state import Columns


class BatchMeans(NamedTuple):
    """Means over the global batch of sums over the two sides."""

    log_outer: Tensor  # log(ε + u1) + log(ε + u2)
    log_u: Tensor  # log u1 + log u2
    q: Tensor  # q1 + q2


def clamp_log_scale_(log_scale: Tensor, tau_min: float) -> None:
    """Keep τ in [tau_min, 1]."""
    with torch.no_grad():
        log_scale.clamp_(-log(TAU_MAX), -log(tau_min))


def clamped_log_scale(log_scale: Tensor, tau_min: float) -> Tensor:
    """log(1/τ) with τ in [tau_min, 1], which the last step may have left."""
    return log_scale.clamp(-log(TAU_MAX), -log(tau_min))


def clamped_tau(log_scale: Tensor, tau_min: float) -> float:
    """τ as a number in [tau_min, 1], which the last step may have left."""
    return max(tau_min, min(TAU_MAX, exp(-float(log_scale.detach()))))


def global_gradient(settings: Settings, rho: float, tau: Tensor, mean: BatchMeans) -> Tensor:
    """The gradient of the loss with respect to one τ for all samples."""
    if not settings.algorithm.tau_power:
        # eq. (fastclipv0:gradtau); the released code halves the feature gradients but not this one
        scale = 1.0 if settings.estimator == "released" else settings.scale
        return -scale * mean.q / tau
    if settings.estimator == "released":
        return settings.scale * (mean.log_u - 2 * mean.q) + rho
    return mean.log_outer - mean.q + 2 * rho  # eq. (fastclipv3:gradtau)


def individual_gradient(rho: float, log_outer: Tensor, q: Tensor) -> Tensor:
    """n times each sample's gradient, eq. (isogclr:gradtau): n only rescales the learning rate."""
    return log_outer + rho - q


def individual_step(settings: Settings, old: Columns, gradient: Tensor) -> Columns:
    """Proc. parameter_update, AdamW without weight decay; t counts the sample's own visits."""
    beta1, beta2 = settings.tau_betas
    visits = old["tau_visits"] + 1
    m = beta1 * old["tau_m"] + (1 - beta1) * gradient
    v = beta2 * old["tau_v"] + (1 - beta2) * gradient.square()
    m_hat, v_hat = m / (1 - beta1**visits), v / (1 - beta2**visits)
    tau = old["tau"] - settings.tau_lr * m_hat / (v_hat.sqrt() + 1e-8)
    return {"tau": tau.clamp(settings.tau_min, TAU_MAX), "tau_m": m, "tau_v": v, "tau_visits": visits}
