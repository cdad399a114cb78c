"""Features of images, kept in a file: encoded once for a model, and again when it or an image changes."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fastclip.data.loader import BadSample
from fastclip.evaluation.features import Encoder, ImageFeatures, Pictures, Progress
from fastclip.model import TwoTowers

log = logging.getLogger(__name__)
VERSION = 1  # of how features come about; another one encodes all anew


def model_key(model: TwoTowers, autocast: torch.dtype | None) -> str:
    """A digest of everything that features depend on: weights, preprocessing, precision.

    The temperature is no part of it: a run's model and its export have the same features.
    """
    found = blake2b(digest_size=16)
    found.update(json.dumps([VERSION, model.model_cfg, model.preprocess_cfg, str(autocast)]).encode())
    for name, tensor in model.clip.state_dict().items():
        if not name.startswith("logit_"):
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def cached_features(
    pictures: Pictures, encoder: Encoder, file: Path, key: str, progress: Progress | None = None
) -> ImageFeatures:
    """Those of `file` if every worker finds them there under this key; else encoded, and put there."""
    found = _read(file, key, encoder.device)
    if encoder.all_agree(found is not None) and found is not None:
        return found
    found = encoder.images(pictures, progress)
    if encoder.world.is_main:
        _write(file, key, found)
    return found


def _read(file: Path, key: str, device: torch.device) -> ImageFeatures | None:
    if not file.exists():
        return None
    try:
        found = load_file(file, device=str(device))
        about = json.loads(bytes(found["about"].tolist()))
        if about["key"] != key:
            return None
        return ImageFeatures(found["image_bd"], found["kept_b"], [BadSample(*bad) for bad in about["bad"]])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is broken (%s); the images are encoded again.", file, error)
        return None


def _write(file: Path, key: str, features: ImageFeatures) -> None:
    about = json.dumps({"key": key, "bad": features.bad}).encode()
    tensors = {
        "image_bd": features.image_bd.cpu().contiguous(),
        "kept_b": features.kept_b.cpu().contiguous(),
        "about": torch.tensor(list(about), dtype=torch.uint8),
    }
    part = file.with_suffix(f".{os.getpid()}.part")  # another process may be at the same task
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part)
        part.rename(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink()
        log.warning("Features could not be kept in %s: %s", file, error)
