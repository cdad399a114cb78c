"""Image features cached in a file: encoded once per model, and again when it or an image changes."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from xxhash import xxh3_128

from fastclip.data.bad_samples import BadSample
from fastclip.evaluation.features import Encoder, ImageFeatures, Images, Progress
from fastclip.files import sync, temporary_path
from fastclip.lora import merged_state
from fastclip.model import TwoTowers

log = logging.getLogger(__name__)
VERSION = 1  # of how features are made; change it to encode everything again


def model_key(model: TwoTowers, autocast: torch.dtype | None) -> str:
    """A digest of everything that features depend on: weights, preprocessing, precision.

    The temperature is excluded: a run and its export have the same features.
    """
    hasher = blake2b(digest_size=16)
    hasher.update(json.dumps([VERSION, model.model_cfg, model.preprocess_cfg, str(autocast)]).encode())
    for name, tensor in merged_state(model.clip).items():
        if not name.startswith("logit_"):
            hasher.update(name.encode())
            hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def cached_features(
    images: Images, encoder: Encoder, file: Path, key: str, progress: Progress | None = None
) -> ImageFeatures:
    """The features in `file` if every rank finds them there under this key; else encode and save them."""
    # With the precision, as earlier versions computed convolutions in TF32 on a GPU
    key = " ".join([key, "in", encoder.precision, *encoder.formats])
    cached = _read(file, key, encoder.device)
    if encoder.all_agree(cached is not None) and cached is not None:
        return cached
    features = encoder.images(images, progress)
    if encoder.world.is_main:
        _write(file, key, features)
    return features


def _read(file: Path, key: str, device: torch.device) -> ImageFeatures | None:
    try:
        tensors = load_file(file)
        image_bd, kept_b = tensors["image_bd"], tensors["kept_b"]
        about = json.loads(bytes(tensors["about"].tolist()))
        bad = [BadSample(*sample) for sample in about["bad"]]
        if about["digest"] != _digest(about["key"], image_bd, kept_b, bad):
            raise ValueError("its digest differs")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged or cannot be read (%r); encoding the images again.", file, error)
        return None
    return ImageFeatures(image_bd.to(device), kept_b.to(device), bad) if about["key"] == key else None


def _digest(key: str, image_bd: Tensor, kept_b: Tensor, bad: list[BadSample]) -> str:
    """A digest of everything that is read from the file: no damage in it is used."""
    digest = xxh3_128(json.dumps([key, bad]).encode())
    for tensor in (image_bd, kept_b):
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(file: Path, key: str, features: ImageFeatures) -> None:
    image_bd, kept_b = features.image_bd.cpu().contiguous(), features.kept_b.cpu().contiguous()
    digest = _digest(key, image_bd, kept_b, features.bad)
    about = json.dumps({"key": key, "bad": features.bad, "digest": digest}).encode()
    tensors = {
        "image_bd": image_bd,
        "kept_b": kept_b,
        "about": torch.tensor(list(about), dtype=torch.uint8),
    }
    part = temporary_path(file)  # another process may be writing the same file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part)
        sync(part)
        part.rename(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink()
        log.warning("Features could not be cached in %s: %s", file, error)
