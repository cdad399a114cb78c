"""Weights from anyone, as a tag, a file or a folder: read as data; what would run code is refused."""

from __future__ import annotations

import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.convert import convert_state_dict
from open_clip.model import convert_to_custom_text_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from fastclip.data.remote import RemoteError

log = logging.getLogger(__name__)

CONFIG_FILE = "open_clip_config.json"  # what a folder that open_clip loads as `local-dir:` must hold
_WEIGHT_FILES = (  # of such a folder, the best first
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "model.safetensors",
    "pytorch_model.bin",
)


def find_weights(name: str, pretrained: str) -> tuple[Path, dict[str, Any]]:
    """The file that `pretrained` means, and how its images were prepared (preprocess_cfg) if known."""
    path, described = Path(pretrained).expanduser(), {}
    if tag := open_clip.get_pretrained_cfg(name, pretrained):
        _check_quick_gelu(name, pretrained, tag)
        try:
            path = Path(open_clip.download_pretrained(tag))
        except Exception as error:  # each hub's library has its own
            raise RemoteError(f"pretrained={pretrained!r} could not be fetched: {error}") from error
        described = tag
    elif path.is_dir():
        if (path / CONFIG_FILE).is_file():
            config = read_config(path / CONFIG_FILE)
            _check_quick_gelu(name, pretrained, config.get("model_cfg", config))
            described = config.get("preprocess_cfg") or {}
        file = next((file for file in _WEIGHT_FILES if (path / file).is_file()), None)
        if file is None:
            raise ValueError(f"pretrained={pretrained!r} holds no weights, such as {_WEIGHT_FILES[0]}.")
        path /= file
    elif not path.is_file():
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none"
        raise ValueError(f"pretrained={pretrained!r}: no such file, nor a tag of {name} (it has: {tags}).")
    return path, {key: value for key, value in described.items() if key != "size"}


def _check_quick_gelu(name: str, pretrained: str, source: dict) -> None:
    """Weights fit either activation, but are right with one alone."""
    wanted = source.get("quick_gelu", False)
    if wanted != open_clip.get_model_config(name).get("quick_gelu", False):
        other = f"{name}-quickgelu" if wanted else name.removesuffix("-quickgelu")
        hint = f"; try model={other!r}" if other in open_clip.list_models() else ""
        raise ValueError(
            f"pretrained={pretrained!r} was trained with quick_gelu={wanted}, which {name} is not{hint}."
        )


def load_weights(clip: nn.Module, name: str, file: Path) -> None:
    """Copy a file's weights into the model; all must be there, and of the same shape."""
    state = convert_state_dict(clip, _read_tensors(file))  # MobileCLIP's own names to open_clip's
    if "positional_embedding" in state and not hasattr(clip, "positional_embedding"):
        state = convert_to_custom_text_state_dict(state)
    state.pop("text.transformer.embeddings.position_ids", None)  # older transformers saved it
    own = clip.state_dict()
    if "logit_bias" in own:
        state.setdefault("logit_bias", own["logit_bias"])  # weights of a model without SigLIP's bias
    else:
        state.pop("logit_bias", None)
    for key in {"logit_scale", "logit_bias"} & state.keys() & own.keys():
        if state[key].numel() == 1:
            state[key] = state[key].reshape(own[key].shape)  # open_clip has it with and without a dimension
    problems = {
        "missing": [key for key in own if key not in state],
        "unexpected": [key for key in state if key not in own],
        "of another shape": [
            f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
            for key in own
            if key in state and state[key].shape != own[key].shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(
            f"{len(keys)} {problem} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
            for problem, keys in problems.items()
            if keys
        )
        raise ValueError(f"pretrained: {file} holds the weights of another model than {name!r}: {listed}.")
    clip.load_state_dict(state)
    log.info("Weights from %s", file)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """A file's tensors by name, as plain data: a pickle that asks for more is refused, and never run."""
    plain = file.suffix == ".safetensors"
    try:
        content = load_file(file) if plain else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file can raise anything
        raise ValueError(f"pretrained: {file} cannot be loaded: {_reason(error)}.") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"pretrained: {file} holds no tensors by name, nor a 'state_dict' of them.")
    if all(key.startswith("module.") for key in state):  # saved from inside DDP
        return {key.removeprefix("module."): tensor for key, tensor in state.items()}
    return dict(state)


def _reason(error: Exception) -> str:
    """Why a file was refused; not torch's own words, which advise to load it unsafely."""
    text = str(error)
    if "TorchScript" in text:
        return "it is a TorchScript archive, which holds code; save its state_dict"
    if isinstance(error, pickle.UnpicklingError):
        wanted = re.search(r"GLOBAL (\S+)", text)
        asked = f" (it asks for {wanted[1]})" if wanted else ""
        return f"its pickle holds more than tensors{asked}; save a plain state_dict"
    return f"{type(error).__name__}: {text}"


def read_config(path: Path) -> dict[str, Any]:
    """An open_clip JSON config, bare or below "model_cfg"."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    model_cfg = config.get("model_cfg", config) if isinstance(config, dict) else None
    if not isinstance(model_cfg, dict) or not (
        "embed_dim" in model_cfg
        and isinstance(model_cfg.get("vision_cfg"), dict)
        and isinstance(model_cfg.get("text_cfg"), dict)
    ):
        raise ValueError(
            f"{path} is no open_clip model config: it needs embed_dim, vision_cfg and text_cfg; "
            "see models/vit-emoji.json in fastclip's folder for one."
        )
    if (model_cfg["text_cfg"].get("tokenizer_kwargs") or {}).get("trust_remote_code"):
        raise ValueError(f"{path} asks for trust_remote_code, to run code from elsewhere; take that out.")
    return config
