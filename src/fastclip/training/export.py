"""Export a trained model as a folder that open_clip can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, log
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fastclip.errors import InputError, PathError
from fastclip.files import atomic_folder, atomic_write
from fastclip.finite import first_non_finite
from fastclip.lora import merged_state
from fastclip.model import TwoTowers
from fastclip.weights import CONFIG_FILE

SAFETENSORS_FILE = "open_clip_model.safetensors"
TORCH_FILE = "open_clip_model.pt"
CARD_FILE = "README.md"


class NonFiniteModel(InputError):
    """A model whose weights, or whose features, are not finite: it is worth nothing, and never exported."""


class NotWritten(PathError, OSError):
    """An export that the disk refused."""


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
    state = _plain_state(model, tau)
    _require_finite(model, state)
    folder = folder.expanduser().resolve()
    with _explained(folder), atomic_folder(folder) as part:
        write_model_config(model, part)
        if model.model_cfg["text_cfg"].get("hf_tokenizer_name"):  # open_clip expects its files here
            model.tokenizer().save_pretrained(part)
        _check_replaceable(folder, {path.name for path in part.iterdir()})
        if card:
            (part / CARD_FILE).write_text(card, encoding="utf-8")
        save_file(state, part / SAFETENSORS_FILE, metadata={"format": "pt"})
        shutil.copymode(part / CONFIG_FILE, part / SAFETENSORS_FILE)  # safetensors makes it private
        with open(part / TORCH_FILE, "wb") as file:  # torch's own writer does not say why it failed
            torch.save({"state_dict": state}, file)
    return folder


def write_model_config(model: TwoTowers, folder: Path) -> None:
    """Write the files from which open_clip and fastclip build the same model without its weights."""
    model.design.write(folder, model.clip)
    config = {"model_cfg": model.model_cfg, "preprocess_cfg": model.preprocess_cfg}
    atomic_write(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def _require_finite(model: TwoTowers, state: dict[str, Tensor]) -> None:
    """Raise if a weight is not finite, or the features of a blank image and an empty text are not."""
    if name := first_non_finite(state):
        raise NonFiniteModel("model", f"has weights that are not finite, first of all {name}: not exported.")
    clip, side, training = model.clip, model.image_size, model.training
    image = torch.zeros(1, 3, side, side, device=clip.logit_scale.device, dtype=clip.logit_scale.dtype)
    tokens = torch.ones(1, model.context_length, dtype=torch.int64, device=image.device)
    model.eval()
    features = {"image": clip.encode_image(image), "text": clip.encode_text(tokens)}
    model.train(training)
    if name := first_non_finite(features):
        problem = f"has weights so large that {name} features are not finite: not exported."
        raise NonFiniteModel("model", problem)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Name the folder in the error of a full or failing disk, which torch and safetensors do not."""
    try:
        yield
    except PathError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _disk_error(error)
        if reason is None:
            raise
        raise NotWritten(
            folder,
            f"could not be written: {reason}. Nothing incomplete was left there. Free some space, or make it "
            "writable, and run the same command again.",
        ) from error


def _disk_error(error: BaseException) -> str | None:
    """The system's reason, also of an error that torch replaced by its own; None if there is none."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno is not None:
            return found.strerror
        if isinstance(found, SafetensorError):
            return str(found)
        found = found.__cause__ or found.__context__
    return None


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
    for name, tensor in merged_state(model.clip).items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        state[name] = tensor.to("cpu", dtype).clone(memory_format=torch.contiguous_format)
    if tau is not None:
        state["logit_scale"].fill_(-log(tau))
    return state
