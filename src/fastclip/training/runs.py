"""A run's folder, read again: the model of one of its checkpoints, and the pairs it was evaluated on."""

from __future__ import annotations

import os
from math import exp
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import yaml

from fastclip.data.cache import is_remote
from fastclip.data.sources import find_files
from fastclip.model import TwoTowers, build_model
from fastclip.training.checkpoint import load, read_facts, tensor_names
from fastclip.weights import CONFIG_FILE

Which = Literal["last", "best"]


def load_model(
    run: Path, which: Which = "last", device: torch.device | str = "cpu"
) -> tuple[TwoTowers, float | None]:
    """The model of a checkpoint in eval mode, and its temperature; None where the model holds it itself."""
    path = find_checkpoint(run, which)
    config, names = read_facts(path)["config"], tensor_names(path)
    dtype = torch.float64 if config["precision"] == "float64" else torch.float32
    towers = build_model(
        str(run / CONFIG_FILE), logit_bias="model.clip.logit_bias" in names, device=device, dtype=dtype
    )
    load(path, {f"model.{name}": tensor for name, tensor in towers.state_dict().items()})
    return towers.float().eval(), _tau(path, names, config)


def find_checkpoint(run: Path, which: Which) -> Path:
    """The folder that checkpoints/last or checkpoints/best points to."""
    path = run / "checkpoints" / which
    if path.exists():
        return path.resolve()
    if not (run / "checkpoints").is_dir():
        raise FileNotFoundError(f"{run} is not the folder of a run: it has no checkpoints.")
    if which == "best":
        raise FileNotFoundError(
            f"{run} has no best checkpoint: it was trained without evaluate.pairs. Take the last one."
        )
    raise FileNotFoundError(f"{run} has no checkpoint yet.")


class EvaluationPairs(NamedTuple):
    """Pairs that a run was evaluated on, with the columns in which its tables have them."""

    paths: list[str]
    columns: tuple[str | None, str | None] = (None, None)


def evaluation_pairs(run: Path) -> EvaluationPairs:
    """What the run's config names as evaluate.pairs; no paths if it names none, or cannot be read.

    Relative paths are seen from here, or else from where the run was trained, by what it calls its folder.
    """
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        named, out = config["evaluate"]["pairs"] or [], Path(config.get("out") or "")
        data = config.get("data") or {}
        columns = data.get("image_column"), data.get("caption_column")
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError):
        return EvaluationPairs([])
    paths, here = [named] if isinstance(named, str) else named, Path(os.path.abspath(run)).parts
    if out.is_absolute() or here[-len(out.parts) :] != out.parts or _are_there(paths):
        return EvaluationPairs(paths, columns)
    base = Path(*here[: -len(out.parts)])
    moved = [path if is_remote(path) else str(base / path) for path in paths]
    return EvaluationPairs(moved if _are_there(moved) else paths, columns)


def _are_there(paths: list[str]) -> bool:
    try:
        return bool(find_files(paths))
    except (OSError, ValueError):
        return False


def _tau(path: Path, names: dict, config: dict) -> float | None:
    """One temperature, or the mean of individual ones."""
    name = next((name for name in ("loss.log_scale", "loss.tau") if name in names), None)
    if name is None:
        return None
    size, dtype = names[name]
    values = torch.empty(size, dtype=dtype)
    load(path, {name: values})
    if name == "loss.tau":
        return float(values.double().mean())
    tau_min = config["algorithms"][config["algorithm"]]["tau_min"]
    return max(tau_min, min(1.0, exp(-float(values))))  # the last step may have left the range
