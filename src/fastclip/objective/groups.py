"""Samples with equal captions: they are not negatives of each other with `negatives="distinct"`.

All tensors are of the global batch B and on the device; nothing here has a data-dependent shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """The groups of equal captions in a global batch."""

    code_B: Tensor
    """Equal numbers for equal captions; int32, so that tiles of them are compared quickly."""
    log_negatives_B: Tensor
    """log n_i, n_i = B − |group of i|; 0 if n_i = 0."""
    has_negatives: Tensor
    """Whether there are negatives at all: false if all captions are equal, when n_i = 0 for every i."""
    left_out: Tensor
    """Mean number of negatives that a sample loses."""


def groups_of(group_B: Tensor, dtype: torch.dtype) -> Groups:
    """Group the samples of a batch by their captions' hashes."""
    sorted_B, order_B = torch.sort(group_B)
    begins_B = torch.ones_like(sorted_B, dtype=torch.int32)
    begins_B[1:] = sorted_B[1:] != sorted_B[:-1]
    code_B = torch.empty_like(begins_B).scatter_(0, order_B, begins_B.cumsum(0, dtype=torch.int32) - 1)
    ones_B, long_B = torch.ones_like(sorted_B), code_B.long()
    size_B = torch.zeros_like(sorted_B).scatter_add_(0, long_B, ones_B).gather(0, long_B)
    negatives_B = len(group_B) - size_B
    return Groups(
        code_B,
        negatives_B.clamp(min=1).to(dtype).log(),
        (negatives_B > 0).any(),
        (size_B - 1).to(dtype).mean(),
    )
