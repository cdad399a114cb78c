"""A model of timm as an image tower: open_clip's config for it, its preprocessing, and its weights.

open_clip builds a model of timm at its own image size alone. A vision transformer of another size is named by
a folder with timm's config (`local-dir:image_tower`), which timm reads relative to the working directory.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from open_clip.timm_model import TimmModel

from fastclip.config.tower_options import TIMM
from fastclip.data.remote import RemoteError
from fastclip.errors import OptionError
from fastclip.text import did_you_mean
from fastclip.weights import read_tensors, require_same_tensors


class ImageTower(NamedTuple):
    """A model of timm at an image size."""

    name: str
    size: int
    resized: bool
    """Whether it must be built for this size: it has position embeddings for another one."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Of timm's create_model."""
        return {"img_size": self.size} if self.resized else {}

    @property
    def config(self) -> dict[str, Any]:
        """timm's config.json, from which timm builds it at this size."""
        known = _known(self.name).to_dict(remove_source=True, remove_null=True)
        known["input_size"] = [3, self.size, self.size]
        return {
            "architecture": self.name.partition(".")[0],
            "pretrained_cfg": known,
            "model_args": self.arguments,
        }

    @property
    def preprocess(self) -> dict[str, Any]:
        """What its weights were trained with: the fields of open_clip's preprocess_cfg."""
        known = _known(self.name)
        usual = {"mean": list(known.mean), "std": list(known.std)}
        interpolation = {"interpolation": known.interpolation}
        return usual | (interpolation if known.interpolation in ("bicubic", "bilinear") else {})


def find_image_tower(name: str, size: int | None, option: str = "model.image") -> ImageTower:
    """The model of timm of this name, at its own size unless another is asked for."""
    name = name.removeprefix(TIMM)
    if not timm.is_model(name) or ":" in name:
        near = did_you_mean(name.partition(".")[0], timm.list_models())
        advice = f'{near.strip()} List all with: python -c "import timm; print(timm.list_models())"'
        raise OptionError(option, f"{TIMM}{name}", "is not a model of timm", advice=advice.strip())
    architecture, _, tag = name.partition(".")
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        advice = f"Its weights: {', '.join(tags) or 'none'}."
        raise OptionError(option, f"{TIMM}{name}", f"has no weights called {tag}", advice=advice)
    known = _known(name)
    own = known.input_size[-1]
    return ImageTower(name, size or own, bool(known.fixed_input_size and size not in (None, own)))


def load_trunk(tower: TimmModel, image: ImageTower, weights: str) -> None:
    """Copy timm's own weights (`own`), or those of a file, into the tower; `none` keeps new ones."""
    if weights == "own":
        tower.trunk.load_state_dict(_download(image).state_dict())
    elif weights != "none":
        _load_file(tower.trunk, image.name, weights)


def filter_checkpoint(trunk: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """timm's own conversion of weights for a model: position embeddings of another size are resized."""
    convert = getattr(sys.modules[type(trunk).__module__], "checkpoint_filter_fn", None)
    return state if convert is None else dict(convert(dict(state), trunk))


def _download(image: ImageTower) -> torch.nn.Module:
    if not _known(image.name).has_weights:
        advice = "Pass --model.image_weights with a file, or none for new weights."
        raise OptionError("model.image", f"{TIMM}{image.name}", "has no weights of its own", advice=advice)
    try:
        with torch.device("cpu"):
            model: Any = timm.create_model(image.name, pretrained=True, **image.arguments)
    except Exception as error:  # each hub's library raises its own
        raise RemoteError(
            f"model.image={TIMM}{image.name}: its weights could not be downloaded: {error}. "
            "Pass --model.image_weights with a file, or none for new weights."
        ) from error
    model.reset_classifier(0)
    return model


def _known(name: str) -> Any:
    """timm's record of a model: its input, preprocessing and weights."""
    return timm.get_pretrained_cfg(name)


def _load_file(trunk: Any, name: str, weights: str) -> None:
    file, own = Path(weights).expanduser(), trunk.state_dict()
    if not file.is_file():
        rule = "must be own, none or the path of a file with a timm model's tensors"
        raise OptionError("model.image_weights", weights, rule)
    state = read_tensors(file)
    classifier = trunk.pretrained_cfg.get("classifier") or ()
    parts = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    heads = tuple(f"{part}." for part in parts)
    kept = {key: tensor for key, tensor in state.items() if key in own or not key.startswith(heads)}
    with suppress(Exception):  # with another model's names, which are refused below
        kept = filter_checkpoint(trunk, kept)
    require_same_tensors(own, kept, file, f"{TIMM}{name}")
    trunk.load_state_dict(kept)
