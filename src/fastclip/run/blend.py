"""Blends: weights between those at which a run started and those at which it ended (WiSE-FT).

A fine-tuned model gains on its new task and forgets others; a blend often keeps most of both.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fastclip.config.resolved import resolve_again
from fastclip.errors import OptionError, PathError
from fastclip.lora import merged_state
from fastclip.model import TwoTowers
from fastclip.run.folder import Which, find_checkpoint, is_run, read_metadata
from fastclip.run.load import load_model
from fastclip.run.start import Start, build_first


class Blends:
    """The blends of a run.

    Args:
        run: its folder.
        which: the checkpoint at the end.
        start: a file or folder with the first weights, if their source is gone.
    """

    def __init__(
        self,
        run: Path,
        which: Which = "last",
        start: str | Path | None = None,
        device: torch.device | str = "cpu",
    ):
        if not is_run(run):
            raise PathError(run, "is not the folder of a run: only a run says where it started.")
        metadata = read_metadata(find_checkpoint(run, which))
        config = resolve_again(metadata["config"])
        record = Start(**metadata["start"]) if metadata.get("start") else None
        if start is None and not config.model.sources():
            raise PathError(run, "started from new weights: there is nothing to blend with.")
        if start is None and record is None:
            problem = "was trained by an earlier version, which did not record its start: pass --start."
            raise PathError(run, problem)
        end, self.tau = load_model(run, which, device, start)
        self.towers = build_first(run, config, record, start, device=device)
        self._start = {name: tensor.clone() for name, tensor in self.towers.clip.state_dict().items()}
        self._end = merged_state(end.clip)

    def blend(self, share: float) -> TwoTowers:
        """The model with weights (1 − share)·start + share·end; the same one at each call.

        Scale, bias and counts are those of the end.
        """
        if not 0 <= share <= 1:
            raise OptionError("blend", share, "must be in [0, 1]", example=0.5)
        state = {name: _between(name, self._start[name], end, share) for name, end in self._end.items()}
        self.towers.clip.load_state_dict(state)
        return self.towers.eval()


def _between(name: str, start: Tensor, end: Tensor, share: float) -> Tensor:
    if name.startswith("logit_") or not end.is_floating_point():
        return end
    return torch.lerp(start, end, share)
