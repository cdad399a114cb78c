"""Tensors that must hold numbers: one NaN or infinity in a model's weights spoils all that it computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def first_non_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; the host waits for a device once."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    flags = [tensor.detach().isfinite().all() for tensor in floating.values()]
    if not flags:
        return None
    finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return next((name for name, good in zip(floating, finite, strict=True) if not good), None)
