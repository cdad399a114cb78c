"""The optimizers, one row each: import path of the class, the paper's values, and its state.

The algorithms' rows are in `fastclip.objective.algorithms`. Neither needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer. It may take any of the betas, eps and momentum of `OptimOptions`."""

    cls: str
    """Import path of its class."""
    lr: float
    weight_decay: float
    options: dict[str, Any]
    """Further options that it takes, with their defaults."""
    slots: tuple[str, ...]
    """State per parameter: tensors of its shape, initially zero."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Constant arguments of the class."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Arguments for the parameter groups of temperatures (ours and open_clip's) and SigLIP's bias."""
    counts: Literal["parameter", "group"] | None = None
    """Where it counts steps: in a tensor per parameter, in a number per group, or not at all."""


# The paper's values for its large setting (ViT-B/32 on CC12M); the momentum and Lion's betas are ours.
# Proc. parameter_update. A fused step, and ours, can be skipped by a flag on the device.
OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        "torch.optim.AdamW",
        lr=4e-4,
        weight_decay=0.1,
        options={"betas": (0.9, 0.98), "eps": 1e-6},
        slots=("exp_avg", "exp_avg_sq"),
        fixed={"fused": True},
        counts="parameter",
    ),
    "lamb": OptimizerRow(
        "fastclip.lamb_lion.Lamb",
        lr=2e-3,
        weight_decay=0.1,
        options={"betas": (0.9, 0.98), "eps": 1e-6},
        slots=("exp_avg", "exp_avg_sq"),
        fixed={"adapt": True},
        scalars={"adapt": False},  # α = 1
        counts="group",
    ),
    "lion": OptimizerRow(
        "fastclip.lamb_lion.Lion",
        lr=1e-4,
        weight_decay=0.3,
        options={"betas": (0.9, 0.99)},
        slots=("exp_avg",),
    ),
    "sgd": OptimizerRow(
        "torch.optim.SGD",
        lr=2.0,
        weight_decay=3e-6,
        options={"momentum": 0.9},
        slots=("momentum_buffer",),
        fixed={"fused": True},
    ),
}
