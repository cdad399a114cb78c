"""Find values that are not numbers: NaN and infinities in weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def first_non_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; None if there is none."""
    return next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None)


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:  # float8 has few operations
        tensor = tensor.float()
    least, most = torch.aminmax(tensor.detach())  # one pass and no copy; a NaN makes both NaN
    return bool(torch.isfinite(least) & torch.isfinite(most))
