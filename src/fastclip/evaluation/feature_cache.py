"""Image features cached in a file: encoded once per model, and again when it or an image changes."""

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
from fastclip.evaluation.features import Encoder, ImageFeatures, Images, Progress
from fastclip.model import TwoTowers

log = logging.getLogger(__name__)
VERSION = 1  # of how features are made; change it to encode everything again


def model_key(model: TwoTowers, autocast: torch.dtype | None) -> str:
    """A digest of everything that features depend on: weights, preprocessing, precision.

    The temperature is excluded: a run and its export have the same features.
    """
    hasher = blake2b(digest_size=16)
    hasher.update(json.dumps([VERSION, model.model_cfg, model.preprocess_cfg, str(autocast)]).encode())
    for name, tensor in model.clip.state_dict().items():
        if not name.startswith("logit_"):
            hasher.update(name.encode())
            hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def cached_features(
    images: Images, encoder: Encoder, file: Path, key: str, progress: Progress | None = None
) -> ImageFeatures:
    """The features in `file` if every rank finds them there under this key; else encode and save them."""
    cached = _read(file, key, encoder.device)
    if encoder.all_agree(cached is not None) and cached is not None:
        return cached
    features = encoder.images(images, progress)
    if encoder.world.is_main:
        _write(file, key, features)
    return features


def _read(file: Path, key: str, device: torch.device) -> ImageFeatures | None:
    if not file.exists():
        return None
    try:
        tensors = load_file(file, device=str(device))
        about = json.loads(bytes(tensors["about"].tolist()))
        if about["key"] != key:
            return None
        bad = [BadSample(*sample) for sample in about["bad"]]
        return ImageFeatures(tensors["image_bd"], tensors["kept_b"], bad)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s); encoding the images again.", file, error)
        return None


def _write(file: Path, key: str, features: ImageFeatures) -> None:
    about = json.dumps({"key": key, "bad": features.bad}).encode()
    tensors = {
        "image_bd": features.image_bd.cpu().contiguous(),
        "kept_b": features.kept_b.cpu().contiguous(),
        "about": torch.tensor(list(about), dtype=torch.uint8),
    }
    part = file.with_suffix(f".{os.getpid()}.part")  # another process may be writing the same file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part)
        part.rename(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink()
        log.warning("Features could not be cached in %s: %s", file, error)
