"""The learning rate of each step: a warm-up, then a cosine, a constant rate, or a constant rate with a decay.

`constant` and `wsd` (warm-up, stable, decay; arXiv:2404.06395) have the same rates up to the decay, whatever
the length of the run. So a run can be prolonged, and decayed later, as if its length had been known: see
`training/prolonging.py`. The decay is 1 − √t over a fifth of the steps: in Hägele et al. (arXiv:2405.18392),
on language models, this form was better than a linear one, and a fifth as good as a cosine of that length.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from fastclip.config.options import DECAY_SHARE, Schedule
from fastclip.optim import learning_rate


@dataclass(frozen=True)
class RateSchedule:
    """The learning rate of the model as a function of the step."""

    peak: float
    warmup: int
    """Steps."""
    total: int
    """Steps of the run."""
    kind: Schedule = "cosine"
    decay_share: float = DECAY_SHARE
    """Share of the steps that the decay of wsd takes."""
    min_lr: float = 0.0
    """The rate that the cosine, or the decay of wsd, would reach in step `total`."""

    def __call__(self, step: int) -> float:
        if self.kind == "cosine" or step < self.warmup:
            return learning_rate(
                step, peak=self.peak, warmup=self.warmup, total=self.total, min_lr=self.min_lr
            )
        if step < self.decay_from:
            return self.peak
        part = (step - self.decay_from) / (self.total - self.decay_from)
        return self.min_lr + (self.peak - self.min_lr) * (1 - sqrt(part))

    @property
    def decay_from(self) -> int:
        """The first step whose rate depends on the length of the run; `total` if there is none."""
        if self.kind == "cosine":
            return min(self.warmup, self.total)
        decay = max(1, round(self.decay_share * self.total)) if self.kind == "wsd" else 0
        return min(self.total, max(self.warmup, self.total - decay))
