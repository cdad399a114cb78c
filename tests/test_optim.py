"""The optimizers against the paper's Proc. parameter_update; learning rates; skipped steps; checkpoints."""

import copy
import json
import re
from itertools import pairwise
from math import log, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fastclip.config.optimizers import OPTIMIZERS, OptimizerRow
from fastclip.config.options import OptimOptions, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.errors import InputError, OptionError
from fastclip.objective.loss import GlobalContrastiveLoss
from fastclip.optim import (
    Stepper,
    build_optimizer,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)

OPTIONS = {
    "adamw": {"betas": (0.8, 0.95), "eps": 1e-3},
    "lamb": {"betas": (0.8, 0.95), "eps": 1e-3},
    "lion": {"betas": (0.8, 0.95)},
    "sgd": {"momentum": 0.7},
}
SHAPES = {"matrix": (3, 5), "kernel": (2, 3, 2, 2), "bias": (5,), "zero_bias": (4,), "logit_bias": ()}
LR, DECAY, TAU_LR = 0.05, 0.3, 0.02


def parameters(dtype=torch.float64, device="cpu"):
    """A small model: the same weights at every call; one bias starts at zero."""
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}
    weights["zero_bias"].zero_()
    return {name: nn.Parameter(weight.to(device)) for name, weight in weights.items()}


class Run:
    """A model, its τ and their optimizer, with gradients that depend on the step only."""

    def __init__(self, name, tau=0.05, dtype=torch.float64, device="cpu", **stepper):
        self.params = parameters(dtype, device)
        self.log_scale = nn.Parameter(torch.tensor(-log(tau), dtype=dtype, device=device))
        groups = [{"params": [self.log_scale], "lr": TAU_LR, "weight_decay": 0.0}]
        self.optimizer = build_optimizer(
            name, self.params.items(), groups, lr=LR, weight_decay=DECAY, **OPTIONS[name]
        )
        self.all = {**self.params, "log_scale": self.log_scale}
        slow = self.log_scale if stepper.pop("slow", False) else None
        self.stepper = Stepper(self.optimizer, slow_tau=slow, **stepper)

    @property
    def names(self):
        return {parameter: name for name, parameter in self.all.items()}

    def set_gradients(self, step, scale=1.0):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in self.all.values():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = (scale * gradient).to(parameter.device)

    def step(self, step):
        self.set_gradients(step)
        return self.stepper.step(self.log_scale.new_ones(()))

    def everything(self):
        """Weights, state and counters, for bitwise comparison."""
        tensors, metadata = optimizer_tensors(self.optimizer, self.names)
        weights = {name: p.detach().clone() for name, p in self.all.items()}
        return {**weights, **{name: tensor.clone() for name, tensor in tensors.items()}}, metadata


def assert_same_bits(one, other):
    (tensors, metadata), (other_tensors, other_metadata) = one, other
    assert metadata == other_metadata
    assert tensors.keys() == other_tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other_tensors[name]), name


def paper(name, theta, gradients, *, lr, decay, adapt, betas=None, eps=None, momentum=None):
    """Proc. parameter_update, line by line; `adapt` is False where α is set to 1."""
    m = v = torch.zeros_like(theta)
    for t, gradient in enumerate(gradients):
        if name == "sgd":
            m = momentum * m + gradient + decay * theta
            theta = theta - lr * m
            continue
        beta1, beta2 = betas
        if name == "lion":
            c = beta1 * m + (1 - beta1) * gradient
            m = beta2 * m + (1 - beta2) * gradient
            theta = theta - lr * (c.sign() + decay * theta)
            continue
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        m_hat, v_hat = m / (1 - beta1 ** (t + 1)), v / (1 - beta2 ** (t + 1))
        r = m_hat / (v_hat.sqrt() + eps)
        alpha = 1.0
        if name == "lamb" and adapt and theta.norm() > 0:
            alpha = theta.norm() / (r + decay * theta).norm()
        theta = theta - lr * alpha * (r + decay * theta)
    return theta


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_takes_the_papers_steps(name):
    run, gradients = Run(name), []
    start = {key: parameter.detach().clone() for key, parameter in run.all.items()}
    for step in range(7):
        run.set_gradients(step)
        gradients.append({key: parameter.grad.clone() for key, parameter in run.all.items()})
        run.stepper.step(torch.ones(()))
    for key, parameter in run.all.items():
        is_tau = key == "log_scale"
        expected = paper(
            name,
            start[key],
            [g[key] for g in gradients],
            lr=TAU_LR if is_tau else LR,
            decay=DECAY if key in ("matrix", "kernel") else 0.0,
            adapt=start[key].ndim > 0,
            **OPTIONS[name],
        )
        # AdamW's kernel computes powers of β differently: the last digits differ
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-11, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_have_roles_and_exclude_frozen_parameters(name):
    params = parameters()
    params["bias"].requires_grad_(False)
    loss = GlobalContrastiveLoss("fastclip-v3", num_samples=10, tau_lr=3e-4)
    optimizer = build_optimizer(
        name, params.items(), loss.parameter_groups(), lr=LR, weight_decay=DECAY, **OPTIONS[name]
    )
    decayed, plain, scalar, tau = optimizer.param_groups
    assert [group["role"] for group in optimizer.param_groups] == ["decayed", "plain", "scalar", "tau"]
    assert [id(p) for p in decayed["params"]] == [id(params["matrix"]), id(params["kernel"])]
    assert [id(p) for p in plain["params"]] == [id(params["zero_bias"])]
    assert [id(p) for p in scalar["params"]] == [id(params["logit_bias"])]
    assert [id(p) for p in tau["params"]] == [id(loss.log_scale)]
    assert (decayed["weight_decay"], plain["weight_decay"], tau["weight_decay"]) == (DECAY, 0.0, 0.0)
    assert scalar["weight_decay"] == 0.0
    assert (decayed["lr"], plain["lr"], tau["lr"]) == (LR, LR, 3e-4)
    set_learning_rate(optimizer, 0.5)
    assert (decayed["lr"], plain["lr"], tau["lr"]) == (0.5, 0.5, 3e-4)


def test_parameters_without_gradients_are_unchanged():
    for name in OPTIMIZERS:
        run = Run(name)
        before = run.everything()[0]
        run.set_gradients(0)
        run.params["logit_bias"].grad = None
        run.log_scale.grad = None
        run.stepper.step(torch.ones(()))
        after = run.everything()[0]
        assert torch.equal(before["logit_bias"], after["logit_bias"])
        assert torch.equal(before["log_scale"], after["log_scale"])
        assert not torch.equal(before["matrix"], after["matrix"])


# Learning rates


@given(peak=st.floats(1e-6, 10), warmup=st.integers(0, 30), rest=st.integers(1, 50), share=st.floats(0, 1))
@pytest.mark.slow
def test_the_rate_rises_to_its_peak_and_falls_to_its_minimum(peak, warmup, rest, share):
    total, low = warmup + rest, share * peak
    rates = [
        learning_rate(step, peak=peak, warmup=warmup, total=total, min_lr=low) for step in range(total + 1)
    ]
    assert rates[0] > 0
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[max(warmup - 1, 0)] == pytest.approx(peak)
    assert rates[warmup] == pytest.approx(peak)
    falling = rates[warmup:]
    assert all(a >= b - 1e-12 * peak for a, b in pairwise(falling))
    assert rates[total] == low


def test_the_rate_of_chosen_steps():
    def rate(step):
        return learning_rate(step, peak=8.0, warmup=4, total=12, min_lr=2.0)

    assert [rate(step) for step in range(4)] == [2.0, 4.0, 6.0, 8.0]
    assert rate(8) == pytest.approx(5.0)  # half of the cosine
    assert rate(6) == pytest.approx(5 + 3 / sqrt(2))  # a quarter of it
    assert rate(12) == rate(100) == 2.0


def test_a_warm_up_as_long_as_the_run_does_not_divide_by_zero():
    assert learning_rate(3, peak=1.0, warmup=4, total=4, min_lr=0.1) == 1.0
    assert learning_rate(4, peak=1.0, warmup=4, total=4, min_lr=0.1) == 0.1
    assert learning_rate(5, peak=1.0, warmup=9, total=4, min_lr=0.1) == pytest.approx(6 / 9)
    assert learning_rate(0, peak=1.0, warmup=0, total=0, min_lr=0.1) == 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("tau", "share"), [(0.029, 1 / 3), (0.031, 1.0)])
def test_a_small_tau_learns_at_a_third_of_its_rate(name, tau, share):
    ruled, plain = Run(name, tau, slow=True), Run(name, tau)
    plain.optimizer.param_groups[-1]["lr"] = TAU_LR * share
    for run in (ruled, plain):
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.01  # so that τ stays on its side of 0.03
        for step in range(4):
            run.step(step)
    for (key, one), other in zip(ruled.all.items(), plain.all.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0, msg=key)


def test_the_slow_rate_depends_on_tau_before_the_step_and_ends_above_the_bound():
    run = Run("sgd", tau=0.0299, slow=True)
    for gradient, expected in ((30.0, 0.2), (30.0, 1.02)):  # m = 30, then 0.7·30 + 30 = 51; rate 0.02
        before = run.log_scale.item()
        run.set_gradients(0)
        run.log_scale.grad.fill_(gradient)
        run.stepper.step(torch.ones(()))
        assert before - run.log_scale.item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tau_of_exactly_003_has_its_full_rate(dtype):
    ruled, plain = Run("adamw", 0.03, dtype, slow=True), Run("adamw", 0.03, dtype)
    ruled.step(0)
    plain.step(0)
    assert torch.equal(ruled.log_scale, plain.log_scale)


# Skipped steps


def spoil(run, how):
    """Make gradients or the value non-finite; return the value."""
    value = run.log_scale.new_ones(())
    if how in ("value", "infinite value"):
        return value * (torch.nan if how == "value" else torch.inf)
    parameter = {"weight": run.params["kernel"], "bias": run.params["bias"], "tau": run.log_scale}[how]
    parameter.grad.view(-1)[-1] = torch.inf if how == "bias" else torch.nan
    return value


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("how", ["weight", "bias", "tau", "value", "infinite value"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_no_trace(name, how, scaled):
    def build():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000) if scaled else None
        return Run(name, tau=0.02, dtype=torch.float32, slow=True, clip=0.5, scaler=scaler)

    def step(run, number, spoilt=False):
        value = torch.ones(())
        if scaled:
            run.stepper.scaler.scale(value)
        run.set_gradients(number, scale=run.stepper.scaler.get_scale() if scaled else 1.0)
        if spoilt:
            value = spoil(run, how)
        return run.stepper.step(value).finite.item()

    spoilt, untouched = build(), build()
    for number in range(3):  # before the first step, and before later ones
        before = spoilt.everything()
        assert step(spoilt, number=50, spoilt=True) is False
        assert_same_bits(spoilt.everything(), before)
        assert step(spoilt, number) is True
        assert step(untouched, number) is True
        assert_same_bits(spoilt.everything(), untouched.everything())
    if scaled:
        backed_off = 8.0 if "value" in how else 1.0
        assert spoilt.stepper.scaler.get_scale() == backed_off
        assert untouched.stepper.scaler.get_scale() == 8.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_whose_norm_overflows_is_skipped_although_gradients_are_finite(name):
    run = Run(name, dtype=torch.float32, clip=1.0)
    run.set_gradients(0, scale=1e30)
    before = run.everything()
    update = run.stepper.step(torch.ones(()))
    assert not update.finite
    assert_same_bits(run.everything(), before)


def test_a_scaler_does_not_change_a_step_and_its_scale_grows():
    for name in OPTIMIZERS:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scaled, plain = Run(name, scaler=scaler), Run(name)
        for step in range(2):
            scaler.scale(torch.ones(()))
            scaled.set_gradients(step, scale=1024.0)
            norm = scaled.stepper.step(torch.ones(())).grad_norm
            torch.testing.assert_close(norm, plain.step(step).grad_norm)
        assert_same_bits(scaled.everything(), plain.everything())
        assert scaler.get_scale() == 2048.0


def test_a_stepper_leaves_no_flag_behind():
    run = Run("adamw")
    run.set_gradients(0)
    run.stepper.step(torch.tensor(torch.nan))
    before = run.everything()[0]
    run.optimizer.step()
    assert not torch.equal(run.params["matrix"], before["matrix"])


# Norms and clipping


@pytest.mark.parametrize("clip", [0.01, 1e6])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_is_torchs_and_affects_only_the_models_gradients(name, clip):
    ours, torchs = Run(name, clip=clip), Run(name)
    for step in range(3):
        ours.step(step)
        torchs.set_gradients(step)
        torch.nn.utils.clip_grad_norm_(torchs.params.values(), clip)
        torchs.stepper.step(torch.ones(()))
        for key, parameter in ours.all.items():
            assert torch.equal(parameter.grad, torchs.all[key].grad), key
    assert_same_bits(ours.everything(), torchs.everything())


def test_the_norm_is_of_all_gradients_before_clipping():
    run = Run("adamw", clip=0.01)
    run.set_gradients(0)
    expected = torch.cat([p.grad.flatten() for p in run.all.values()]).norm()
    update = run.stepper.step(torch.ones(()))
    torch.testing.assert_close(update.grad_norm, expected)
    assert update.finite.dtype == torch.bool
    assert update.finite.shape == update.grad_norm.shape == ()


def test_a_tau_of_another_precision_than_the_model_is_updated():
    for name in OPTIMIZERS:
        params, log_scale = parameters(torch.float32), nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
        groups = [{"params": [log_scale], "lr": TAU_LR, "weight_decay": 0.0}]
        optimizer = build_optimizer(name, params.items(), groups, lr=LR, weight_decay=DECAY, **OPTIONS[name])
        for parameter in (*params.values(), log_scale):
            parameter.grad = torch.ones_like(parameter)
        assert Stepper(optimizer, slow_tau=log_scale, clip=1.0).step(torch.ones(())).finite
        assert log_scale != 3.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_never_waits_for_a_gpu(name):
    """Fake CUDA tensors raise if the host reads one, or if devices are mixed."""
    with FakeTensorMode():
        run = Run(name, tau=0.02, dtype=torch.float32, device="cuda", slow=True, clip=1.0)
        assert run.log_scale.device.type == "cuda"
        if name == "sgd":  # fake tensors do not support fused sgd
            run.optimizer.step = lambda: None
        for parameter in run.all.values():
            parameter.grad = torch.empty_like(parameter)
        update = run.stepper.step(torch.empty((), device="cuda"))
        assert update.finite.device.type == update.grad_norm.device.type == "cuda"


def test_for_an_optimizer_without_such_a_flag_the_host_decides():
    run = Run("adamw")
    plain = torch.optim.SGD(run.optimizer.param_groups, lr=LR)
    run.stepper = Stepper(plain)
    before = run.everything()[0]["matrix"]
    run.set_gradients(0)
    assert not run.stepper.step(torch.tensor(torch.nan)).finite
    assert torch.equal(run.params["matrix"], before)
    assert run.step(0).finite
    assert not torch.equal(run.params["matrix"], before)
    with FakeTensorMode():
        fake, value = nn.Parameter(torch.empty(3, device="cuda")), torch.empty((), device="cuda")
        fake.grad = torch.empty_like(fake)
        waiting = Stepper(torch.optim.SGD([{"params": [fake], "role": "plain"}]))
        with pytest.raises(DataDependentOutputException):
            waiting.step(value)


# Checkpoints


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_optimizer_continues_like_the_saved_one(name, steps):
    saved = Run(name)
    for step in range(steps):
        saved.step(step)
    tensors, metadata = optimizer_tensors(saved.optimizer, saved.names)
    tensors, metadata = copy.deepcopy(tensors), json.loads(json.dumps(metadata))
    loaded = Run(name)
    for key, parameter in loaded.all.items():
        parameter.data.copy_(saved.all[key].data)
    load_optimizer_tensors(loaded.optimizer, loaded.names, tensors, metadata)
    assert_same_bits(loaded.everything(), saved.everything())
    for step in range(steps, steps + 3):
        saved.step(step)
        loaded.step(step)
        assert_same_bits(loaded.everything(), saved.everything())
    slot = "matrix.momentum_buffer" if name == "sgd" else "matrix.exp_avg"
    assert not torch.equal(tensors[slot], loaded.everything()[0][slot])  # the saved tensors are not modified


def test_state_is_named_after_parameters_and_includes_counters():
    run = Run("adamw")
    run.step(0)
    tensors, metadata = optimizer_tensors(run.optimizer, run.names)
    assert tensors.keys() == {
        f"{name}.{slot}" for name in run.all for slot in ("step", "exp_avg", "exp_avg_sq")
    }
    assert tensors["matrix.step"].item() == 1
    assert metadata == {}
    run = Run("lamb")
    run.step(0)
    assert optimizer_tensors(run.optimizer, run.names)[1] == {"step": 1}


def test_options_come_from_the_new_optimizer_not_from_the_checkpoint():
    for name in OPTIMIZERS:
        saved, loaded = Run(name), Run(name)
        saved.step(0)
        set_learning_rate(saved.optimizer, 0.9)
        load_optimizer_tensors(
            loaded.optimizer, loaded.names, *optimizer_tensors(saved.optimizer, saved.names)
        )
        assert [group["lr"] for group in loaded.optimizer.param_groups] == [LR, LR, LR, TAU_LR]
        roles = [group["role"] for group in loaded.optimizer.param_groups]
        assert roles == ["decayed", "plain", "scalar", "tau"]


def test_sgd_without_momentum_has_nothing_to_save():
    params = parameters()
    optimizer = build_optimizer("sgd", params.items(), [], lr=LR, weight_decay=DECAY, momentum=0.0)
    params["matrix"].grad = torch.ones_like(params["matrix"])
    expected = params["matrix"].detach() * (1 - LR * DECAY) - LR
    assert Stepper(optimizer).step(torch.ones(())).finite
    torch.testing.assert_close(params["matrix"].detach(), expected)
    assert optimizer_tensors(optimizer, {p: name for name, p in params.items()}) == ({}, {})


def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing():
    run, other = Run("adamw"), Run("adamw")
    other.step(0)
    tensors, metadata = optimizer_tensors(other.optimizer, other.names)
    before = run.everything()

    def problem(tensors, metadata=metadata, into=run):
        with pytest.raises(InputError) as caught:
            load_optimizer_tensors(into.optimizer, into.names, tensors, metadata)
        assert_same_bits(run.everything(), before)
        return caught.value.argument, caught.value.problem

    def differences(*saved, **options):
        """The argument, the missing and the unexpected names."""
        argument, text = problem(*saved, **options)
        return argument, *re.search(r"missing (.*); unexpected (.*)\.", text).groups()

    without_step = {name: tensor for name, tensor in tensors.items() if name != "bias.step"}
    assert differences(without_step) == ("tensors", "bias.step", "none")
    extra = {**tensors, "head.exp_avg": torch.ones(1)}
    assert differences(extra) == ("tensors", "none", "head.exp_avg")
    assert differences(tensors, {"step": 3}) == ("metadata", "none", "step")
    argument, text = problem({**tensors, "bias.exp_avg": torch.ones(6)})
    assert argument == "tensors"
    assert all(part in text for part in ("bias.exp_avg", "(6,)", "(5,)"))
    assert differences({})[1].endswith(" 13 more")
    lamb = Run("lamb")
    lamb_tensors, lamb_metadata = optimizer_tensors(lamb.optimizer, lamb.names)
    assert "matrix.step" in differences(lamb_tensors, lamb_metadata)[1]
    assert differences(lamb_tensors, {}, into=lamb) == ("metadata", "step", "none")
    with pytest.raises(InputError) as caught:
        optimizer_tensors(run.optimizer, {})
    assert (caught.value.argument, "(3, 5)" in caught.value.problem) == ("names", True)


# Invalid arguments

ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-6}


@pytest.mark.parametrize(
    ("name", "extra", "required"), [("adamw", "momentum", "betas, eps"), ("lion", "eps", "betas")]
)
def test_options_of_other_optimizers_are_refused(name, extra, required):
    given = {"lr": LR, "weight_decay": DECAY} | OPTIMIZERS[name].options | {extra: 0.5}
    with pytest.raises(InputError) as caught:
        build_optimizer(name, parameters().items(), [], **given)
    assert caught.value.argument == "options"
    assert f" {required};" in caught.value.problem
    assert f", {extra}." in caught.value.problem


@pytest.mark.parametrize("lr", [-1.0, float("nan")])
def test_an_invalid_learning_rate_is_refused(lr):
    with pytest.raises(OptionError) as caught:
        build_optimizer("adamw", parameters().items(), [], **ADAMW | {"lr": lr})
    assert (caught.value.option, caught.value.example) == ("optim.lr", 4e-4)
    assert caught.value.value == pytest.approx(lr, nan_ok=True)


def test_an_optimizer_is_added_by_one_row(monkeypatch):
    """No other code depends on names of optimizers: config, steps and checkpoints work with a new row."""
    slots, fixed = ("exp_avg", "exp_avg_sq"), {"fused": True}
    row = OptimizerRow(
        "torch.optim.Adam", 2e-3, 0.05, {"betas": (0.9, 0.95)}, slots, fixed, counts="parameter"
    )
    monkeypatch.setitem(OPTIMIZERS, "adam", row)
    monkeypatch.setitem(OPTIONS, "adam", {"betas": (0.8, 0.9)})
    config = resolve(TrainConfig(optimizer="adam", optim=OptimOptions(betas=(0.8, 0.9))))
    assert (config.optim.lr, config.optim.options) == (2e-3, {"betas": (0.8, 0.9)})
    with pytest.raises(OptionError) as caught:
        resolve(TrainConfig(optimizer="adam", optim=OptimOptions(eps=1e-8)))
    assert (caught.value.option, caught.value.value) == ("optim.eps", 1e-8)
    run, again = Run("adam"), Run("adam")
    assert run.step(0).finite
    tensors, metadata = run.everything()
    assert {name.rpartition(".")[2] for name in tensors} >= {"exp_avg", "exp_avg_sq", "step"}
    again.step(0)
    load_optimizer_tensors(
        again.optimizer, again.names, optimizer_tensors(run.optimizer, run.names)[0], metadata
    )
    run.step(1), again.step(1)
    assert_same_bits(run.everything(), again.everything())


def test_an_invalid_learning_rate_of_tau_is_refused():
    group = {"params": [nn.Parameter(torch.ones(()))], "lr": -1e-4, "weight_decay": 0.0}
    with pytest.raises(OptionError) as caught:
        build_optimizer("adamw", [], [group], **ADAMW)
    assert (caught.value.option, caught.value.value, caught.value.example) == ("loss.tau_lr", -1e-4, 2e-4)


def test_nothing_to_train_is_refused():
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    with pytest.raises(InputError) as caught:
        build_optimizer("adamw", [("weight", frozen)], [], **ADAMW)
    assert caught.value.argument == "model_parameters"


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_a_clip_that_is_not_positive_is_refused(clip):
    with pytest.raises(OptionError) as caught:
        Run("adamw", clip=clip)
    assert (caught.value.option, caught.value.example) == ("optim.clip", 1.0)
    assert caught.value.value == pytest.approx(clip, nan_ok=True)


def test_a_slow_tau_that_is_not_trained_is_refused():
    run = Run("adamw")
    with pytest.raises(InputError) as caught:
        Stepper(run.optimizer, slow_tau=run.params["logit_bias"])
    assert caught.value.argument == "slow_tau"
