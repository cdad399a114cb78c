"""Export a trained model as a folder that open_clip can load."""

from __future__ import annotations

import json
import shutil
from math import inf, log
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fastclip.errors import InputError, PathError
from fastclip.files import atomic_folder
from fastclip.model import TwoTowers
from fastclip.weights import CONFIG_FILE

SAFETENSORS_FILE = "open_clip_model.safetensors"
TORCH_FILE = "open_clip_model.pt"
CARD_FILE = "README.md"


class NotReplaceable(PathError, FileExistsError):
    """A folder with files that an export would delete."""


def export(model: TwoTowers, folder: Path, *, tau: float | None, card: str = "") -> Path:
    """Write the folder, replacing an earlier export, and return its path.

        model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
        tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")

    Args:
        tau: the temperature to store in logit_scale; None keeps the model's own.
        card: the text of README.md; see `model_card.model_card`.
    """
    if tau is not None and not 0 < tau < inf:
        raise InputError("tau", f"must be positive and finite, not {tau}.")
    folder = folder.expanduser().resolve()
    with atomic_folder(folder) as part:
        write_model_config(model, part)
        if model.model_cfg["text_cfg"].get("hf_tokenizer_name"):  # open_clip expects its files here
            model.tokenizer().save_pretrained(part)
        _check_replaceable(folder, {path.name for path in part.iterdir()})
        if card:
            (part / CARD_FILE).write_text(card, encoding="utf-8")
        state = _plain_state(model, tau)
        save_file(state, part / SAFETENSORS_FILE, metadata={"format": "pt"})
        shutil.copymode(part / CONFIG_FILE, part / SAFETENSORS_FILE)  # safetensors makes it private
        torch.save({"state_dict": state}, part / TORCH_FILE)
    return folder


def write_model_config(model: TwoTowers, folder: Path) -> None:
    """Write the files from which open_clip and fastclip build the same model without its weights."""
    model.design.write(folder, model.clip)
    config = {"model_cfg": model.model_cfg, "preprocess_cfg": model.preprocess_cfg}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_replaceable(folder: Path, written: set[str]) -> None:
    """Raise if the folder has files that are not part of an earlier export: they would be deleted."""
    if folder.exists() and not folder.is_dir():
        raise NotReplaceable(folder, "is a file: choose a folder.")
    existing = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if existing and CONFIG_FILE not in existing:
        raise NotReplaceable(folder, "is neither empty nor an earlier export: choose another folder.")
    other = sorted(existing - written - {SAFETENSORS_FILE, TORCH_FILE, CARD_FILE})
    if other:
        raise NotReplaceable(
            folder / other[0],
            "is not part of an export and would be deleted: move it away, or choose another folder.",
        )


def _plain_state(model: TwoTowers, tau: float | None) -> dict[str, Tensor]:
    """Copies of the weights, each with its own memory: float32 on the CPU, contiguous."""
    state = {}
    for name, tensor in model.clip.state_dict().items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        state[name] = tensor.to("cpu", dtype).clone(memory_format=torch.contiguous_format)
    if tau is not None:
        state["logit_scale"].fill_(-log(tau))
    return state
