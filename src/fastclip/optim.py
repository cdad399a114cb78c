"""Updates of the weights: the paper's four optimizers, their learning rates, and steps that may be skipped.

`build_optimizer` sorts parameters into groups, each with a key "role": "decayed" (matrices and the like),
"plain" (norms and biases: no weight decay), "scalar" (open_clip's own temperature and bias: no decay, and
LAMB's α is 1) and "tau" (the loss's temperature: as scalar, with its own rate); "counts", as in its row; and
"factor", of the learning rate.
`Stepper` does one guarded update. `optimizer_tensors` returns the state for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from math import isfinite, log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from fastclip.config.optimizers import OPTIMIZERS, OptimizerRow
from fastclip.errors import InputError, OptionError
from fastclip.objective.schedules import cosine

SLOW_TAU = 0.03  # below this temperature, v3's τ learns at a third of its rate


def build_optimizer(
    name: str,
    model_parameters: Iterable[tuple[str, Parameter]],
    tau_groups: list[dict[str, Any]],
    *,
    lr: float,
    weight_decay: float,
    factor: Callable[[str], float] | None = None,
    **options: Any,
) -> Optimizer:
    """An optimizer for the model's trainable parameters and for τ, with its state initialized.

    Weight decay applies to parameters of two or more dimensions. With LAMB, α is 1 for τ, as in the paper,
    and for a layer whose weights are all zero, which would never change otherwise.

    Args:
        name: one of `config.optimizers.OPTIMIZERS`.
        model_parameters: from `model.named_parameters()`; frozen ones are ignored.
        tau_groups: from `GlobalContrastiveLoss.parameter_groups()`; may be empty.
        lr: learning rate of the model; `set_learning_rate` changes it.
        weight_decay: λ; decoupled, except for sgd, where it is part of the gradient.
        factor: from a parameter's name to the factor of its learning rate; None: 1 for all.
        options: all further options of the optimizer's row, such as betas and eps.
    """
    row = OPTIMIZERS[name]
    if options.keys() != row.options.keys():
        required, given = (", ".join(names) or "none" for names in (row.options, options))
        raise InputError("options", f"of {name} must be {required}; got {given}.")
    _check_rate("optim.lr", lr, row.lr)
    of_dimension: dict[int, dict[str, Any]] = {
        2: {"role": "decayed", "weight_decay": weight_decay},
        1: {"role": "plain", "weight_decay": 0.0},
        0: {**row.scalars, "role": "scalar", "weight_decay": 0.0},
    }
    params: dict[tuple[int, float], list[Parameter]] = {}
    for parameter_name, parameter in model_parameters:
        if parameter.requires_grad:
            own = 1.0 if factor is None else factor(parameter_name)
            params.setdefault((min(parameter.ndim, 2), own), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {**of_dimension[dimension], "params": params[dimension, own], "factor": own, "lr": lr * own}
        for dimension, own in sorted(params, reverse=True)
    ]
    for group in tau_groups:
        _check_rate("loss.tau_lr", group["lr"], 2e-4)
        groups.append({**group, **row.scalars, "role": "tau"})
    groups = [group | {"counts": row.counts} for group in groups if group["params"]]
    if not groups:
        raise InputError("model_parameters", "has nothing to train: every parameter has requires_grad=False.")
    module, _, cls = row.cls.rpartition(".")
    optimizer = getattr(import_module(module), cls)(groups, lr=lr, **options, **row.fixed)
    _start_state(optimizer, row)
    return optimizer


def learning_rate(step: int, *, peak: float, warmup: int, total: int, min_lr: float) -> float:
    """The model's learning rate in this step: linear warm-up over `warmup` steps, then half a cosine.

    Step 0 has peak/warmup, not 0, which would waste it; the last step of the warm-up has `peak`. The cosine
    starts at `peak` in the step after the warm-up and would reach `min_lr` in step `total`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return cosine(step - warmup, total - warmup, start=peak, end=min_lr)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the model's groups, times their factors. τ has its own, without a schedule."""
    for group in optimizer.param_groups:
        if group["role"] != "tau":
            group["lr"] = lr * group["factor"]


class Update(NamedTuple):
    """The outcome of a step, as scalars on the device."""

    finite: Tensor
    """False if the step was skipped."""
    grad_norm: Tensor
    """The norm of all gradients, τ's included, before clipping."""


class Stepper:
    """One update of the weights from their gradients, skipped if anything is not finite.

        stepper = Stepper(optimizer, slow_tau=loss.log_scale, clip=1.0, scaler=None)
        out.value.backward()
        update = stepper.step(out.value)
        optimizer.zero_grad()

    A skipped step changes neither the weights, nor the optimizer's state, nor τ. The device decides;
    for an optimizer that does not read `found_inf` the host waits once per step. Ranks agree on a skip if
    they have the same gradients and the same value.

    Args:
        optimizer: from `build_optimizer`.
        slow_tau: the loss's log_scale = log(1/τ) for v3's rule: a third of the rate while τ < 0.03. The
            paper's rate decays "when τ becomes smaller than 0.03"; here τ has its full rate again once it is
            back above.
        clip: largest norm of the model's gradients (τ's is neither counted nor clipped); None: no clipping.
        scaler: for float16 training; gradients are unscaled here, and its scale is updated. It backs off if
            gradients are not finite, but not if only the value is not: no scale would help there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        slow_tau: Parameter | None = None,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ):
        if clip is not None and not (isfinite(clip) and clip > 0):
            advice = "Omit it for no clipping."
            raise OptionError("optim.clip", clip, "must be finite and above 0", example=1.0, advice=advice)
        self.optimizer, self.slow_tau, self.clip, self.scaler = optimizer, slow_tau, clip, scaler
        self._model: list[Parameter] = []
        self.tau: list[Parameter] = []
        for group in optimizer.param_groups:
            (self.tau if group["role"] == "tau" else self._model).extend(group["params"])
        if slow_tau is not None and not any(slow_tau is tau for tau in self.tau):
            problem = "is not in the optimizer's group of τ. Pass the loss's trained log_scale, or None."
            raise InputError("slow_tau", problem)
        self._device_skips = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's name for it

    @torch.no_grad()
    def step(self, value: Tensor) -> Update:
        """Update the weights. `value` is the loss before any scaling; the caller zeroes the gradients."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        model_norm, norm = self._norms()
        finite = norm.isfinite() & value.isfinite()
        if self.clip is not None:
            clip_grads_with_norm_(self._model, self.clip, model_norm)
        old = None if self.slow_tau is None else self.slow_tau.detach().clone()
        self._step_if(finite)
        if self.slow_tau is not None and old is not None:
            _slow_down(self.slow_tau, old)
        if self.scaler is not None:
            self.scaler.update()  # from what unscale_ found
        return Update(finite, norm)

    def _norms(self) -> tuple[Tensor, Tensor]:
        """The norms of the model's gradients, and of all gradients."""
        model = get_total_norm([p.grad for p in self._model if p.grad is not None])
        tau = [p.grad for p in self.tau if p.grad is not None]
        return model, get_total_norm([model, *tau]) if tau else model

    def _step_if(self, finite: Tensor) -> None:
        """The optimizer's step. Not through the scaler, which checks the gradients but not the value."""
        if self._device_skips:
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.found_inf  # type: ignore[attr-defined]
        elif finite:  # the host waits
            self.optimizer.step()


def _slow_down(log_scale: Tensor, old: Tensor) -> None:
    """Take a third of the step from `old` if τ was below 0.03 there.

    τ has no weight decay and no α, so every optimizer's step is linear in its rate.
    """
    third = torch.lerp(old, log_scale, 1 / 3)
    log_scale.copy_(torch.where(old > -log(SLOW_TAU), third, log_scale))


def optimizer_tensors(
    optimizer: Optimizer, names: Mapping[Parameter, str]
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The optimizer's state for a checkpoint: tensors as "NAME.exp_avg" (not copies), and JSON metadata."""
    tensors = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise InputError("names", f"lacks a trained parameter, of shape {tuple(parameter.shape)}.")
            for slot, tensor in optimizer.state[parameter].items():
                tensors[f"{names[parameter]}.{slot}"] = tensor
    if optimizer.param_groups[0].get("counts") == "group":  # all alike
        return tensors, {"step": int(optimizer.param_groups[0].get("step", 0))}
    return tensors, {}


def load_optimizer_tensors(
    optimizer: Optimizer,
    names: Mapping[Parameter, str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
) -> None:
    """Restore the result of `optimizer_tensors`; nothing changes unless all of it fits.

    Learning rates and other options stay those of this optimizer.
    """
    own_tensors, own_metadata = optimizer_tensors(optimizer, names)
    for kind, own, saved in (("tensors", own_tensors, tensors), ("metadata", own_metadata, metadata)):
        missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        if missing or unexpected:
            raise InputError(
                kind,
                "of the saved state do not match this optimizer and model: "
                f"missing {_shown(missing)}; unexpected {_shown(unexpected)}.",
            )
    for name, tensor in own_tensors.items():
        if tensors[name].shape != tensor.shape:
            shapes = f"has shape {tuple(tensors[name].shape)}, but the model's has {tuple(tensor.shape)}"
            raise InputError("tensors", f"do not match the model: {name} {shapes}.")
    for name, tensor in own_tensors.items():
        tensor.copy_(tensors[name])
    if optimizer.param_groups[0].get("counts") == "group":
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group["step"] = metadata["step"]
        optimizer.load_state_dict(state)  # converts it to the optimizer's own kind of counter


def _shown(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def _start_state(optimizer: Optimizer, row: OptimizerRow) -> None:
    """Create the state now, as zeros: if a skipped first step did, sgd's would be uninitialized memory."""
    for group in optimizer.param_groups:
        if group.get("momentum") == 0:  # then sgd has no state
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if row.counts == "parameter":
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update({slot: torch.zeros_like(parameter) for slot in row.slots})


def _check_rate(option: str, value: float, example: float) -> None:
    if not (isfinite(value) and value >= 0):
        raise OptionError(option, value, "must be finite and at least 0", example=example)
