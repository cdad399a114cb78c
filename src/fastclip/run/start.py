"""Where a run started: the source of its first weights, and their digest.

A checkpoint of a run with LoRA holds only what trains, so the rest is built again from here; a blend is made
of the weights at the start and at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from xxhash import xxh3_128

from fastclip.config.options import ModelConfig
from fastclip.errors import PathError
from fastclip.lora import merged_state
from fastclip.model import TwoTowers


class Start(NamedTuple):
    """The first weights of a run."""

    source: str
    """What they were made from: a file, a folder, a tag, or a seed."""
    digest: str
    """Of all of them, except the scale and bias of the similarities."""


def start_of(towers: TwoTowers, model: ModelConfig, seed: int) -> Start:
    """The start of a run whose towers have just been built."""
    return Start(model.pretrained or f"new weights from seed {seed}", weights_digest(towers))


def weights_digest(towers: TwoTowers) -> str:
    """The digest of a model's weights without adapters, the same in every precision."""
    hasher = xxh3_128()
    for name, tensor in sorted(merged_state(towers.clip, merge=False).items()):
        if not name.startswith("logit_"):
            plain = tensor.float() if tensor.is_floating_point() else tensor
            hasher.update(name.encode())
            hasher.update(plain.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def check_start(towers: TwoTowers, start: Start) -> None:
    """PathError if these are not the weights that the run started from."""
    if weights_digest(towers) != start.digest:
        raise PathError(
            start.source,
            "no longer has the weights that the run started from; they are needed, as the run's checkpoints "
            "hold only what was trained. Restore it.",
        )
