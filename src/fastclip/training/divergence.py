"""A run whose loss or weights leave their own history: its checkpoints are marked suspect from then on.

Judged at every record (weights and skipped steps at every save, too), with thresholds that have no unit:

- the norm of the trained weights is not finite, 4 times the median of its last 5 records, or 100 times its
  smallest: weights drift over a whole run, but not that far in a few records;
- the loss rose above the median of its last 5 records by half of the range that it ever covered, and by
  8 times its usual change between records: so neither noise nor a loss that changes with τ counts. This rule
  needs 10 records: the range is that of training by then;
- the last 3 steps were skipped.

A record that is suspect does not become part of the history; a run that returns to it is trusted again.
Checkpoints that were saved since the last record that was not suspect are marked as well.
"""

from __future__ import annotations

from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fastclip.config.resolved import Resolved, named_options
from fastclip.errors import CommandError, PathError
from fastclip.files import free_name
from fastclip.run.checkpoint import Checkpoints
from fastclip.run.folder import CHECKPOINTS
from fastclip.run.suspect import newest_trusted

MOST_SKIPPED = 10  # consecutive steps with a non-finite loss or gradient that end the run
_RECENT = 5  # records whose median is compared
_WINDOW = 50  # records that define the usual change of the loss
_FEWEST = 10  # records before the loss is judged
_RANGE, _NOISE = 0.5, 8.0  # the rise of the loss, in units of its range and of its usual change
_FASTEST, _LARGEST = 4.0, 100.0  # growth of the weights' norm over a few records, and over the run
_SKIPPED = 3  # consecutive skipped steps; float16 skips one now and then


class History:
    """The loss and the norm of the weights at earlier records, except suspect ones."""

    def __init__(self) -> None:
        self.losses: list[float] = []  # of the last records
        self.low, self.high = inf, -inf  # of all records
        self.norms: list[float] = []
        self.smallest = inf
        self.good = 0
        """Step of the last record."""
        self.suspect: str | None = None
        """Why the run is suspect now."""

    def add(self, step: int, loss: float | None, norm: float) -> None:
        """Extend it by a record; its loss is None before the first step, NaN if all steps were skipped."""
        self.good = step
        if loss is not None and isfinite(loss):
            self.losses = [*self.losses, loss][-_WINDOW:]
            self.low, self.high = min(self.low, loss), max(self.high, loss)
        self.norms = [*self.norms, norm][-_RECENT:]
        self.smallest = min(self.smallest, norm)

    def judge(self, loss: float | None, norm: float, skipped: int) -> str | None:
        """Why these values are far outside the history; None if they are not.

        Args:
            loss: mean since the last record; NaN if all steps since then were skipped, None at a save.
            skipped: consecutive steps up to now.
        """
        if not isfinite(norm):
            return "the norm of the weights is not finite"
        if self.norms and norm > min(_FASTEST * median(self.norms), _LARGEST * self.smallest):
            return f"the norm of the weights is {norm:.3g}, after {self.norms[-1]:.3g}"
        if skipped >= _SKIPPED:
            return f"the last {skipped} steps had a non-finite loss or gradient"
        if loss is None or not isfinite(loss):
            return self.suspect  # nothing new is known
        if len(self.losses) >= _FEWEST and loss > self._highest_loss():
            return f"the loss is {loss:.3g}, after {median(self.losses[-_RECENT:]):.3g}"
        return None

    def _highest_loss(self) -> float:
        changes = [abs(b - a) for a, b in zip(self.losses, self.losses[1:], strict=False)]
        rise = max(_RANGE * (self.high - self.low), _NOISE * median(changes))
        return median(self.losses[-_RECENT:]) + rise

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        bounds = {"low": self.low, "high": self.high, "smallest": self.smallest}
        known = {name: value for name, value in bounds.items() if isfinite(value)}
        return {"good": self.good, "losses": self.losses, "norms": self.norms, **known}

    def load_state(self, saved: dict[str, Any], suspect: str | None) -> None:
        """Restore the result of `state`, and the reason that the checkpoint was marked with."""
        self.good, self.suspect = saved["good"], suspect
        self.losses, self.norms = list(saved["losses"]), list(saved["norms"])
        self.low, self.high = saved.get("low", inf), saved.get("high", -inf)
        self.smallest = saved.get("smallest", inf)


@torch.no_grad()
def weight_norm(model: nn.Module) -> Tensor:
    """The norm of the trained weights, on their device."""
    return get_total_norm([p.detach() for p in model.parameters() if p.requires_grad])


class Diverged(CommandError):
    """Too many consecutive steps had a non-finite loss or gradient, or the final weights are not finite.

    Args:
        step: the last of them.
        skipped: their number.
    """

    def __init__(self, step: int, skipped: int, problem: str):
        super().__init__(problem)
        self.step, self.skipped = step, skipped

    def __reduce__(self):
        return type(self), (self.step, self.skipped, str(self))


def diverged(step: int, skipped: int, run: Path, config: Resolved) -> Diverged:
    """The error of a run that skips every step."""
    return Diverged(
        step,
        skipped,
        f"{skipped} consecutive steps up to step {step} had a non-finite loss or gradient and were skipped; "
        f"the weights have not changed since. {advice(run, config)}",
    )


def advice(run: Path, config: Resolved) -> str:
    """What to do about a diverged run: the command that starts from its newest trusted checkpoint."""
    lr = f"--optim.lr {named_options(config)['optim.lr'] / 2:g}"
    others = "a longer --optim.warmup, --optim.clip 1.0, or --precision bfloat16 instead of float16"
    trusted = newest_trusted(run / CHECKPOINTS)
    if trusted is None:
        return (
            "No checkpoint is from before the trouble: start again in another --out with a lower rate "
            f"({lr}), {others}."
        )
    return (
        f"Start a new run from before the trouble: `fastclip train --from {trusted} {lr} "
        f"--out {free_name(run)}`. Instead of a lower rate, try {others}."
    )


def report_change(suspect: str | None, good: int, checkpoints: Checkpoints) -> str:
    """Mark what was saved since the step `good` when a run becomes suspect; return what to say about it.

    All ranks must call it.
    """
    if suspect is None:
        return "the loss and the weights are within their history again; new checkpoints are not suspect."
    checkpoints.mark_suspect(good, suspect)
    trusted = checkpoints.newest_trusted()
    kept = "there is no earlier one" if trusted is None else f"{trusted} is kept"
    return f"{suspect}. Checkpoints are marked as suspect from here on; {kept}."


def broken_weights(checkpoint: Path | None, name: str, config: Resolved) -> PathError:
    """The error of weights that are not finite before training begins.

    Args:
        checkpoint: that they are from; None: they are pretrained, or the model's own.
        name: of the first such tensor.
    """
    source = checkpoint or config.model.pretrained or config.model.name
    fix = "Use other weights, or another copy of the file."
    return PathError(
        source,
        f"has weights that are not finite, first of all {name}. "
        + (fix if checkpoint is None else advice(checkpoint.parent.parent, config)),
    )
