"""LAMB and Lion with a step that the device can skip, as torch's fused optimizers have it.

A skip is a tensor, `optimizer.found_inf` (1: skip), so the host never waits for it: gradients become 0, which
removes any NaN, and all factors become those of "no change". The numbers are timm's up to rounding; timm's
optimizers cannot be skipped without the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

CHUNK = 1 << 25  # elements that are updated at a time, which bounds the memory of intermediate values


class _Skippable(Optimizer):
    """An optimizer that reads `found_inf`, a tensor on the device; without it, every step is taken."""

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any):
        super().__init__(groups, defaults)
        self._step_supports_amp_scaling = True  # torch's name for optimizers that read found_inf

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            with_gradients = [p for p in group["params"] if p.grad is not None]
            if with_gradients:
                skip = getattr(self, "found_inf", None)
                device = with_gradients[0].device
                taken = torch.ones((), device=device) if skip is None else 1 - skip
                self._update(group, _chunks(with_gradients), taken)

    def _update(self, group: dict[str, Any], chunks: Iterator[list[Tensor]], taken: Tensor) -> None:
        raise NotImplementedError

    def _gradients_and_state(self, params: list[Tensor], taken: Tensor, *slots: str) -> list[list[Tensor]]:
        """The gradients, 0 if the step is skipped, and the state of each slot."""
        take, zero = taken > 0, torch.zeros_like(taken)  # tensors: made once, not for each parameter
        gradients = [torch.where(take, p.grad, zero) for p in params]  # type: ignore[arg-type]
        return [gradients, *([self.state[p][slot] for p in params] for slot in slots)]


class Lion(_Skippable):
    """θ ← θ − lr·(sign(β1·m + (1−β1)·g) + λθ), m ← β2·m + (1−β2)·g (Proc. parameter_update)."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]):
        super().__init__(groups, lr=lr, betas=betas, weight_decay=0.0)

    def _update(self, group: dict[str, Any], chunks: Iterator[list[Tensor]], taken: Tensor) -> None:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        for params in chunks:
            taken = taken.to(params[0].dtype)
            gradients, averages = self._gradients_and_state(params, taken, "exp_avg")
            updates = list(torch._foreach_mul(averages, beta1))
            torch._foreach_add_(updates, gradients, alpha=1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(updates, lr * taken)
            torch._foreach_mul_(params, 1 - lr * decay * taken)
            torch._foreach_add_(params, updates, alpha=-1)
            _average(averages, gradients, beta2, taken)


class Lamb(_Skippable):
    """Adam's direction r + λθ, scaled by α = ‖θ‖ / ‖r + λθ‖ for each parameter (Proc. parameter_update).

    α is 1 where `adapt` is False, and for weights or directions that are all zero. Steps are counted on the
    device, in each group's "step".
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, adapt: bool
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, adapt=adapt, weight_decay=0.0)
        self._count_on_device()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._count_on_device()

    def _count_on_device(self) -> None:
        for group in self.param_groups:  # float64: 1 − β² in float32 would lose half of its digits
            count = {"dtype": torch.float64, "device": group["params"][0].device}
            group["step"] = torch.as_tensor(group.get("step", 0), **count)

    def _update(self, group: dict[str, Any], chunks: Iterator[list[Tensor]], taken: Tensor) -> None:
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        group["step"] += taken
        step = group["step"].clamp(min=1)  # a skipped first step divides nothing by 0
        root_1, root_2 = 1 - beta1**step, (1 - beta2**step).sqrt()
        for params in chunks:
            dtype = params[0].dtype
            taken = taken.to(dtype)
            gradients, first, second = self._gradients_and_state(params, taken, "exp_avg", "exp_avg_sq")
            _average(first, gradients, beta1, taken)
            torch._foreach_mul_(second, _kept(beta2, taken))
            torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
            scales = torch._foreach_sqrt(second)
            torch._foreach_div_(scales, root_2.to(dtype))
            torch._foreach_add_(scales, eps)
            updates = list(torch._foreach_div(first, root_1.to(dtype)))
            torch._foreach_div_(updates, scales)
            if decay:
                torch._foreach_add_(updates, params, alpha=decay)
            sizes = [group["lr"] * taken] * len(params)
            if group["adapt"]:
                sizes = list(_alphas(params, updates) * sizes[0])
            torch._foreach_addcmul_(params, updates, sizes, value=-1)


def _average(averages: list[Tensor], gradients: list[Tensor], beta: float, taken: Tensor) -> None:
    """m ← β·m + (1−β)·g, where g is 0 if the step is skipped."""
    torch._foreach_mul_(averages, _kept(beta, taken))
    torch._foreach_add_(averages, gradients, alpha=1 - beta)


def _kept(beta: float, taken: Tensor) -> Tensor:
    """β, or 1 if the step is skipped; both exactly."""
    return beta * taken + (1 - taken)


def _alphas(params: list[Tensor], updates: list[Tensor]) -> Tensor:
    weight_norms, update_norms = (torch.stack(torch._foreach_norm(some)) for some in (params, updates))
    adapted = (weight_norms > 0) & (update_norms > 0)
    return torch.where(adapted, weight_norms / update_norms, 1.0)


def _chunks(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive parameters with at most CHUNK elements together, or a single one."""
    chunk: list[Tensor] = []
    for parameter in params:
        if chunk and sum(p.numel() for p in (*chunk, parameter)) > CHUNK:
            yield chunk
            chunk = []
        chunk.append(parameter)
    yield chunk
