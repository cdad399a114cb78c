"""Other sizes: which image sizes a tower takes, and position embeddings resized when weights are loaded."""

from __future__ import annotations

from math import isqrt
from typing import Any

from open_clip.model import resize_pos_embed, resize_text_pos_embed
from open_clip.modified_resnet import ModifiedResNet
from torch import Tensor

from fastclip.errors import OptionError
from fastclip.towers.timm_image import filter_checkpoint

_IMAGE, _TRUNK = "visual.positional_embedding", "visual.trunk."


def check_image_size(visual: Any, size: int) -> None:
    """OptionError if an image does not divide into the tower's patches: the rest would be cut off."""
    patch = _patch_size(visual)
    if patch is not None and size % patch:
        works = [near for near in (size // patch * patch, (size // patch + 1) * patch) if near]
        rule = f"must be a multiple of {patch}, the {'stride' if patch == 32 else 'patch'} of the image tower"
        raise OptionError("model.image_size", size, rule, example=" or ".join(map(str, works)))


def _patch_size(visual: Any) -> int | None:
    if isinstance(visual, ModifiedResNet):
        return 32  # the stride at its attention pool, which has position embeddings
    place = getattr(getattr(visual, "trunk", visual), "patch_embed", visual)  # timm's, or open_clip's own
    patch = getattr(place, "patch_size", None)
    return patch[0] if isinstance(patch, tuple) else patch


def resize_positions(state: dict[str, Tensor], clip: Any, *, image: bool, text: bool) -> dict[str, Tensor]:
    """The weights with position embeddings of the model's sizes, as open_clip and timm resize them.

    What cannot be resized is left, and refused with the other tensors that do not fit.
    """
    state = dict(state)
    if image and _IMAGE in state and isqrt(len(state[_IMAGE]) - 1) ** 2 == len(state[_IMAGE]) - 1:
        resize_pos_embed(state, clip)
    if image and hasattr(clip.visual, "trunk"):
        trunk = {key.removeprefix(_TRUNK): state.pop(key) for key in [*state] if key.startswith(_TRUNK)}
        state |= {_TRUNK + key: tensor for key, tensor in filter_checkpoint(clip.visual.trunk, trunk).items()}
    for key in ("positional_embedding", "text.positional_embedding"):
        own = clip.state_dict().get(key)
        if text and key in state and own is not None and own.shape[1:] == state[key].shape[1:]:
            resize_text_pos_embed(state, clip)
    return state
