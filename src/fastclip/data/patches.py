"""Which patches of an image training keeps: a pure function of (seed, epoch, id).

So neither the number of ranks nor of loader workers changes them, nor do micro-batches or a resume.
Shapes: b images, n patches each, k of them kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastclip.data.order import Samples, mix, seed_of

_PATCHES = -2  # in the key, where the order of shards has −1 and augmentation has an id
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64


class PatchChoice(NamedTuple):
    """How many patches an image has, and how many are kept."""

    patches: int
    kept: int

    def draw(self, seed: int, samples: Samples) -> Tensor:
        """The kept patches of each sample, ascending, as [b, k]: those with the k smallest random numbers."""
        epochs, which_b = np.unique(samples.epochs, return_inverse=True)
        epoch_keys = np.array([seed_of(seed, int(epoch), _PATCHES) for epoch in epochs], dtype=np.uint64)
        key_b = mix(epoch_keys[which_b] + samples.ids.astype(np.uint64))
        random_bn = mix(key_b[:, None] + _INCREMENT * np.arange(1, self.patches + 1, dtype=np.uint64))
        kept_bk = np.argpartition(random_bn, self.kept - 1, axis=1)[:, : self.kept]
        return torch.from_numpy(np.sort(kept_bk, axis=1))
