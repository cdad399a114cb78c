"""Where a run started: the source of its first weights, and their digest.

A checkpoint of a run with LoRA holds only what trains, so the rest is built again from here; a blend is made
of the weights at the start and at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_128

from fastclip.config.options import ModelConfig
from fastclip.config.resolved import Resolved
from fastclip.errors import OptionError, PathError
from fastclip.lora import merged_state
from fastclip.model import TwoTowers, build_model
from fastclip.towers.design import Parts
from fastclip.weights import CONFIG_FILE


class Start(NamedTuple):
    """The first weights of a run."""

    source: str
    """What they were made from: a file, a folder, a tag, or a seed."""
    digest: str
    """Of all of them, except the scale and bias of the similarities."""


def start_of(towers: TwoTowers, model: ModelConfig, seed: int) -> Start:
    """The start of a run whose towers have just been built."""
    return Start(", ".join(model.sources()) or f"new weights from seed {seed}", weights_digest(towers))


def recorded_start(saved: Mapping[str, Any], towers: TwoTowers) -> Start | None:
    """The start of a run that continues, by the metadata of its checkpoint; its adapters need those weights.

    None for a run of an earlier version, which has no LoRA.
    """
    start = Start(**saved["start"]) if saved.get("start") else None
    if towers.adapted and start is not None:
        check_start(towers, start)
    return start


def weights_digest(towers: TwoTowers) -> str:
    """The digest of a model's weights without adapters, the same in every precision."""
    hasher = xxh3_128()
    for name, tensor in sorted(merged_state(towers.clip, merge=False).items()):
        if not name.startswith("logit_"):
            plain = tensor.float() if tensor.is_floating_point() else tensor
            hasher.update(name.encode())
            hasher.update(plain.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def build_first(
    run: Path, config: Resolved, record: Start | None, start: str | Path | None = None, **options: Any
) -> TwoTowers:
    """The model with the weights at which a run started; PathError if these cannot be had.

    Args:
        record: what the run says of its start; None in runs of earlier versions.
        start: a file or folder with the same weights, if their source is gone.
        options: further ones of `build_model`.
    """
    model = config.model
    options |= {"logit_bias": config.loss.algorithm.logit_bias, "seed": config.seed}
    if start is not None:
        towers = build_model(str(run / CONFIG_FILE), pretrained=start, **options)
    else:
        try:
            parts = Parts.of(model)
            towers = build_model(model.name, pretrained=model.pretrained, parts=parts, **options)
        except (OptionError, PathError) as error:
            source = ", ".join(model.sources())
            advice = "Restore it, or pass --start with a file or folder that has the same weights."
            raise PathError(run, f"started from {source}, which cannot be used: {error} {advice}") from error
    if record is not None:
        check_start(towers, record, start)
    return towers


def check_start(towers: TwoTowers, record: Start, start: str | Path | None = None) -> None:
    """PathError if these are not the weights at which the run started."""
    if weights_digest(towers) != record.digest:
        source = f", from {record.source}" if start is not None else ""
        raise PathError(
            start or record.source,
            f"has other weights than those at which the run started{source}. Restore them.",
        )
