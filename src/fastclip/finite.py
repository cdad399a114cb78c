"""Find values that are not numbers: one NaN or infinity in a model's weights spoils all that it computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def first_non_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; the host waits for a device once."""
    flags = {name: _is_finite(tensor) for name, tensor in tensors.items() if _has_numbers(tensor)}
    if not flags:
        return None
    device = next(iter(flags.values())).device
    finite = torch.stack([flag.to(device) for flag in flags.values()]).tolist()
    return next((name for name, good in zip(flags, finite, strict=True) if not good), None)


def _has_numbers(tensor: torch.Tensor) -> bool:
    floating = tensor.is_floating_point() or tensor.is_complex()
    return floating and not tensor.is_meta and tensor.numel() > 0


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.element_size() == 1:  # float8 has few operations
        tensor = tensor.float()
    least, most = torch.aminmax(tensor)  # one pass and no copy; a NaN makes both NaN
    return torch.isfinite(least) & torch.isfinite(most)
