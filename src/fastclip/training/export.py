"""A trained model as a folder that open_clip, and so everyone, can load."""

from __future__ import annotations

import json
import shutil
from math import inf, log
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fastclip.files import atomic_folder
from fastclip.model import TwoTowers
from fastclip.weights import CONFIG_FILE

SAFETENSORS_FILE = "open_clip_model.safetensors"
TORCH_FILE = "open_clip_model.pt"
CARD_FILE = "README.md"


def export(model: TwoTowers, folder: Path, *, tau: float | None, card: str = "") -> Path:
    """Write the whole folder, in place of an earlier export if there is one, and return it.

        model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
        tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")

    Args:
        tau: the temperature that goes into logit_scale; None leaves the model's own.
        card: the text of README.md; see `card.model_card`.
    """
    if tau is not None and not 0 < tau < inf:
        raise ValueError(f"tau={tau} must be positive; try 0.07.")
    folder = folder.expanduser().resolve()
    with atomic_folder(folder) as part:
        write_model_config(model, part)
        if model.model_cfg["text_cfg"].get("hf_tokenizer_name"):  # open_clip looks for its files here
            model.tokenizer().save_pretrained(part)
        _check_replaceable(folder, {path.name for path in part.iterdir()})
        if card:
            (part / CARD_FILE).write_text(card, encoding="utf-8")
        state = _plain_state(model, tau)
        save_file(state, part / SAFETENSORS_FILE, metadata={"format": "pt"})
        shutil.copymode(part / CONFIG_FILE, part / SAFETENSORS_FILE)  # safetensors lets no one else read it
        torch.save({"state_dict": state}, part / TORCH_FILE)
    return folder


def write_model_config(model: TwoTowers, folder: Path) -> None:
    """The file from which open_clip, and we, build the same model again without its weights."""
    config = {"model_cfg": model.model_cfg, "preprocess_cfg": model.preprocess_cfg}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_replaceable(folder: Path, written: set[str]) -> None:
    """What is there goes away: it must be an export, and nothing besides."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; export to a folder.")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if found and CONFIG_FILE not in found:
        raise FileExistsError(f"{folder} has files, and is no earlier export: choose another folder.")
    other = sorted(found - written - {SAFETENSORS_FILE, TORCH_FILE, CARD_FILE})
    if other:
        raise FileExistsError(
            f"{folder} holds {other[0]!r}, which is no part of an export and would be lost: "
            "move it away, or choose another folder."
        )


def _plain_state(model: TwoTowers, tau: float | None) -> dict[str, Tensor]:
    """Copies of the weights, each with memory of its own: float32 on the CPU, rows first."""
    state = {}
    for name, tensor in model.clip.state_dict().items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        state[name] = tensor.to("cpu", dtype).clone(memory_format=torch.contiguous_format)
    if tau is not None:
        state["logit_scale"].fill_(-log(tau))
    return state
