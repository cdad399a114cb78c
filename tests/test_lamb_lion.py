"""LAMB and Lion take timm's steps, and a step that the device skips changes nothing."""

import pytest
import timm.optim
import torch
from torch import nn

from fastclip import lamb_lion

BETAS, EPS = (0.9, 0.98), 1e-6
OPTIMIZERS = {
    "lamb": (
        lambda groups: lamb_lion.Lamb(groups, lr=0.02, betas=BETAS, eps=EPS, adapt=True),
        lambda groups: timm.optim.Lamb(
            groups, lr=0.02, betas=BETAS, eps=EPS, max_grad_norm=None, always_adapt=True
        ),
    ),
    "lion": (
        lambda groups: lamb_lion.Lion(groups, lr=0.01, betas=BETAS),
        lambda groups: timm.optim.Lion(groups, lr=0.01, betas=BETAS),
    ),
}
SLOTS = {"lamb": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}


def parameters(dtype):
    """The same at every call: matrices, a vector, one that is all zero, a scalar."""
    draw = torch.Generator().manual_seed(3)
    shapes = [(6, 5), (3, 4, 2), (7,), (4,), ()]
    made = [nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)) for shape in shapes]
    nn.init.zeros_(made[3])
    return made


def build(name, which, dtype=torch.float64):
    params = parameters(dtype)
    groups = [{"params": params[:2], "weight_decay": 0.3}, {"params": params[2:], "weight_decay": 0.0}]
    if name == "lamb":  # α is 1 for the scalar
        groups[1]["params"] = params[2:4]
        groups.append({"params": params[4:], "weight_decay": 0.0, "adapt": False, "always_adapt": False})
    optimizer = OPTIMIZERS[name][which](groups)
    for parameter in params:
        optimizer.state[parameter].update({slot: torch.zeros_like(parameter) for slot in SLOTS[name]})
    return params, optimizer


def set_gradients(params, step):
    draw = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)


def everything(params, optimizer):
    state = [value.clone() for parameter in params for value in optimizer.state[parameter].values()]
    steps = [torch.as_tensor(group.get("step", 0)).clone() for group in optimizer.param_groups]
    return [*(parameter.detach().clone() for parameter in params), *state, *steps]


@pytest.mark.parametrize("chunk", [1, 40, lamb_lion.CHUNK])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_are_timms(name, chunk, monkeypatch):
    monkeypatch.setattr(lamb_lion, "CHUNK", chunk)
    ours, timms = (build(name, which) for which in (0, 1))
    for step in range(50):
        for params, optimizer in (ours, timms):
            set_gradients(params, step)
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (1 - step / 60)
            optimizer.step()
    for found, expected in zip(everything(*ours), everything(*timms), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, check_dtype=False)
    assert all((a - b).abs().max() > 0.01 for a, b in zip(ours[0], parameters(torch.float64), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_the_device_skips_changes_no_bit_whatever_the_gradients(name, first, dtype):
    (params, optimizer), (others, untouched) = (build(name, 0, dtype) for _ in range(2))
    if not first:
        for some, one in ((params, optimizer), (others, untouched)):
            set_gradients(some, 0)
            one.step()
    before = everything(params, optimizer)
    set_gradients(params, 9)
    for parameter, spoilt in zip(params, (torch.nan, torch.inf, 1e30, -torch.inf, torch.nan), strict=True):
        parameter.grad.fill_(spoilt)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(map(torch.equal, everything(params, optimizer), before))
    optimizer.found_inf = torch.zeros(())  # the next step is as if nothing had happened
    for some, one in ((params, optimizer), (others, untouched)):
        set_gradients(some, 1)
        one.step()
    assert all(map(torch.equal, everything(params, optimizer), everything(others, untouched)))


def test_a_float32_step_counts_exactly_beyond_float32s_integers():
    params, optimizer = build("lamb", 0, torch.float32)
    optimizer.param_groups[0]["step"].fill_(2**24)
    set_gradients(params, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2**24 + 1


def test_torch_knows_that_a_gradient_scaler_need_not_wait():
    for name in OPTIMIZERS:
        _, optimizer = build(name, 0)
        assert optimizer._step_supports_amp_scaling
        assert torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)._step_supports_amp_scaling
