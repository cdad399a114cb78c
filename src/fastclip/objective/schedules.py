"""The schedule of γ, the learning rate of the estimators u, over the epochs."""

from __future__ import annotations

from math import cos, pi


def cosine(epoch: int, decay_epochs: int, *, start: float, end: float) -> float:
    """Half a cosine from `start` in epoch 0 to `end` in epoch `decay_epochs`; `end` from there on."""
    if epoch >= decay_epochs:
        return end
    return 0.5 * (1 + cos(pi * epoch / decay_epochs)) * (start - end) + end
