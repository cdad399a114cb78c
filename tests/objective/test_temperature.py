"""The Adam step of individual temperatures. (The gradients of τ are tested in test_loss.py.)"""

import torch

from fastclip.objective.algorithms import LossOptions, resolve
from fastclip.objective.temperature import clamp_log_scale_, individual_step


def start(tau):
    zero = torch.zeros(1, 2, dtype=torch.float64)
    return {"tau": zero + tau, "tau_m": zero, "tau_v": zero, "tau_visits": zero[:, :1]}


def test_the_step_is_torchs_adamw_without_weight_decay():
    settings = resolve("fastclip-v2", LossOptions(tau=0.5, tau_lr=3e-3, tau_betas=(0.8, 0.95)))
    columns = start(0.5)
    parameter = columns["tau"].clone().requires_grad_()
    adam = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.8, 0.95), eps=1e-8, weight_decay=0)
    for step in range(20):
        gradient = torch.tensor([[1.0, -2.0]], dtype=torch.float64) * torch.cos(torch.tensor(float(step)))
        columns |= individual_step(settings, columns, gradient)
        parameter.grad = gradient.clone()
        adam.step()
        assert torch.allclose(columns["tau"], parameter.detach(), rtol=1e-14)


def test_tau_stays_between_its_bounds():
    settings = resolve("fastclip-v2", LossOptions(tau=0.02, tau_lr=5.0))
    moved = individual_step(settings, start(0.02), torch.tensor([[1.0, -1.0]], dtype=torch.float64))
    assert moved["tau"].tolist() == [[0.01, 1.0]]


def test_clamp_keeps_tau_above_its_minimum():
    log_scale = torch.tensor([9.0, -3.0, 1.0], dtype=torch.float64)
    clamp_log_scale_(log_scale, 0.01)
    assert torch.allclose((-log_scale).exp(), torch.tensor([0.01, 1.0, 0.36787944117144233]).double())
