"""Pretrained weights from a tag, a file or a folder: read as data; files that would run code are refused."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import open_clip
import torch
from open_clip.convert import convert_state_dict
from open_clip.model import convert_to_custom_text_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from fastclip.data.remote import RemoteError
from fastclip.errors import OptionError, PathError
from fastclip.finite import first_non_finite
from fastclip.model_config import read_config
from fastclip.text import did_you_mean

log = logging.getLogger(__name__)

CONFIG_FILE = "open_clip_config.json"  # required in a folder that open_clip loads as `local-dir:`
_RESIZE = "Weights of other sizes are resized with --model.image_size or --model.context_length."
_RUN = "run.json"  # in the folder of a run
_WEIGHT_FILES = (  # in such a folder, best first
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "model.safetensors",
    "pytorch_model.bin",
)


def find_weights(name: str, pretrained: str) -> tuple[Path, dict[str, Any]]:
    """Return the file of `pretrained`, and its preprocess_cfg as far as it is known."""
    path, described = Path(pretrained).expanduser(), {}
    if tag := open_clip.get_pretrained_cfg(name, pretrained):
        _check_quick_gelu(name, pretrained, tag)
        try:
            path = Path(open_clip.download_pretrained(tag))
        except Exception as error:  # each hub's library raises its own
            raise RemoteError(f"model.pretrained={pretrained} could not be downloaded: {error}") from error
        described = tag
    elif path.is_dir():
        if (path / _RUN).is_file():
            path = _exported_by(path)
        if (path / CONFIG_FILE).is_file():
            config = read_config(path / CONFIG_FILE)
            _check_quick_gelu(name, pretrained, config.get("model_cfg", config))
            described = config.get("preprocess_cfg") or {}
        file = next((file for file in _WEIGHT_FILES if (path / file).is_file()), None)
        if file is None:
            advice = "Pass a folder that `fastclip export` wrote."
            raise PathError(path, f"contains no weights, such as {_WEIGHT_FILES[0]}. {advice}")
        path /= file
    elif not path.is_file():
        tags = open_clip.list_pretrained_tags_by_model(name)
        advice = f"Its tags: {', '.join(tags) or 'none'}.{did_you_mean(pretrained, tags)}"
        rule = f"is neither a file, nor a folder, nor a tag of {name}"
        raise OptionError("model.pretrained", pretrained, rule, advice=advice)
    return path, {key: value for key, value in described.items() if key != "size"}


def _exported_by(run: Path) -> Path:
    """The model that a run exported at its end."""
    if not (run / "model" / CONFIG_FILE).is_file():
        advice = f"Export it with: fastclip export {run} FOLDER, and pass that folder."
        raise PathError(run, f"is a run that has not exported its model yet. {advice}")
    return run / "model"


def _check_quick_gelu(name: str, pretrained: str, source: dict) -> None:
    """Weights load with either activation, but are correct with only one."""
    trained = source.get("quick_gelu", False)
    if trained != open_clip.get_model_config(name).get("quick_gelu", False):
        other = f"{name}-quickgelu" if trained else name.removesuffix("-quickgelu")
        advice = f"Try --model.name {other}." if other in open_clip.list_models() else ""
        rule = f"was trained with quick_gelu={trained}, but {name} has quick_gelu={not trained}"
        raise OptionError("model.pretrained", pretrained, rule, advice=advice)


def load_weights(
    clip: nn.Module,
    name: str,
    file: Path,
    *,
    only: Callable[[str], bool] | None = None,
    resize: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> None:
    """Copy a file's weights into the model; names and shapes must match.

    Args:
        only: whether a tensor of this name is copied; the others of the model stay as they are.
        resize: adapts the tensors to other sizes first.
    """
    state = convert_state_dict(clip, read_tensors(file))  # MobileCLIP's names to open_clip's
    if "positional_embedding" in state and not hasattr(clip, "positional_embedding"):
        state = convert_to_custom_text_state_dict(state)
    state.pop("text.transformer.embeddings.position_ids", None)  # older transformers saved it
    own = clip.state_dict()
    if "logit_bias" in own:
        state.setdefault("logit_bias", own["logit_bias"])  # the weights may lack SigLIP's bias
    else:
        state.pop("logit_bias", None)
    for key in {"logit_scale", "logit_bias"} & state.keys() & own.keys():
        if state[key].numel() == 1:
            state[key] = state[key].reshape(own[key].shape)  # open_clip has it with shape () and (1,)
    if resize is not None:
        state = resize(state)
    if only is not None:
        state = {key: tensor for key, tensor in state.items() if only(key)}
        own = {key: tensor for key, tensor in own.items() if only(key)}
    require_same_tensors(own, state, file, name)
    if broken := first_non_finite(state):
        raise PathError(file, f"has NaN or infinite values in {broken}. Use weights from before they broke.")
    clip.load_state_dict(clip.state_dict() | state)
    log.info("Weights from %s", file)


def require_same_tensors(own: dict[str, Tensor], state: dict[str, Tensor], file: Path, name: str) -> None:
    """PathError, with the first tensors that differ, unless a file's are those of the model of this name."""
    problems = {
        "missing": [key for key in own if key not in state],
        "unexpected": [_shown(key) for key in state if key not in own],
        "of a different shape": [
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
        sizes = f" {_RESIZE}" if any("pos" in key for key in problems["of a different shape"]) else ""
        raise PathError(file, f"contains weights of a different model than {name}: {listed}.{sizes}")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """A file's tensors by name, as plain data: a pickle with more than tensors is refused, and never run."""
    try:
        content = load_file(file) if file.suffix == ".safetensors" else _unpickle(file)
    except Exception as error:  # a damaged file can raise anything
        raise PathError(file, f"cannot be loaded: {_reason(error)}.") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in state.items()
    ):
        raise PathError(file, "is not a dict of tensors, nor of a 'state_dict' with tensors.")
    for key, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise PathError(
                file, f"has {_shown(key)} as a sparse, quantized or empty tensor; save plain ones."
            )
    if all(key.startswith("module.") for key in state):  # saved from inside DDP
        return {key.removeprefix("module."): tensor for key, tensor in state.items()}
    return dict(state)


def _shown(key: str) -> str:
    """A name from a file, as it may be printed."""
    return (key if key.isprintable() else ascii(key))[:100]


def _unpickle(file: Path) -> Any:
    if is_zipfile(file):
        with ZipFile(file) as archive:  # torch.save compresses nothing
            size = sum(part.file_size for part in archive.infolist())
        if size > 2 * file.stat().st_size + 2**24:
            raise BadZipFile(f"its {file.stat().st_size:,} bytes would unpack to {size:,}")
    return torch.load(file, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """Why a file was refused; without torch's message, which advises to load it unsafely."""
    text = str(error)
    if "TorchScript" in text:
        return "it is a TorchScript archive, which contains code; save its state_dict"
    if isinstance(error, pickle.UnpicklingError):
        code = re.search(r"GLOBAL (\S+)", text)
        example = f" (it calls {code[1]})" if code else ""
        return f"its pickle contains more than tensors{example}; save a plain state_dict"
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"
