"""Which layer of which tower a parameter belongs to: for partial training and rates by layer.

A tower is its embeddings, its blocks, what follows them (norms, pooling) and its projection into the space of
features. Blocks are counted from the projection: "the last 2".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from open_clip.hf_model import HFTextEncoder, arch_dict
from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from timm.models import group_parameters
from torch import nn

from fastclip.errors import OptionError

Side = Literal["image", "text"]
SIDES: tuple[Side, ...] = ("image", "text")
Freeze = Literal["none", "image", "text", "trunks"] | dict[str, int]

_WORDS = ("none", "image", "text", "trunks")

EVERYTHING = None  # the whole tower trains
NOTHING = -1  # not even its projection

# In the names of parameters before the blocks: embeddings, and the first convolutions of open_clip's ResNets
_EMBEDDINGS = ("embed", "conv", "bn", "ln_pre", "shared", "cls_", "wpe", "wte")


def trained_blocks(freeze: Freeze) -> dict[Side, int | None]:
    """How many of its last blocks each tower trains, with what follows them; EVERYTHING or NOTHING."""
    if isinstance(freeze, Mapping):
        return {side: freeze.get(side, EVERYTHING) for side in SIDES}
    if freeze not in _WORDS:
        raise OptionError.unknown("model.freeze", freeze, _WORDS)
    if freeze == "trunks":
        return dict.fromkeys(SIDES, 0)
    return {side: NOTHING if freeze == side else EVERYTHING for side in SIDES}


class Place(NamedTuple):
    """Where a parameter is."""

    side: Side | None
    """None: the scale and bias of the similarities."""
    depth: int
    """0: embeddings; 1 to n: blocks; n + 1: norms and pooling after them; n + 2: the projection."""


class Layers:
    """The layers of a model's towers. Names are those of `clip.named_parameters()`."""

    def __init__(self, clip: nn.Module):
        self._blocks = {"image": _image_blocks(clip), "text": _text_blocks(clip)}
        self.number: dict[Side, int] = {side: len(self._blocks[side]) for side in SIDES}
        self._depths = {
            prefix: depth
            for blocks in self._blocks.values()
            for depth, prefixes in enumerate(blocks, start=1)
            for prefix in prefixes
        }
        self._projections = _projections(clip)
        self._timm_stem = _timm_groups(clip)[0]

    def place(self, name: str) -> Place:
        """The place of a parameter."""
        side = side_of(name)
        if side is None:
            return Place(None, 0)
        if name.startswith(self._projections):
            return Place(side, self.number[side] + 2)
        depth = next((self._depths[start] for start in _starts(name) if start in self._depths), None)
        if depth is None:
            depth = 0 if self._is_embedding(name) else self.number[side] + 1
        return Place(side, depth)

    def _is_embedding(self, name: str) -> bool:
        """Whether a parameter outside the blocks comes before them."""
        if name.startswith("visual.trunk."):
            return name in self._timm_stem
        return any(part in name.lower() for part in _EMBEDDINGS)

    def is_trained(self, name: str, blocks: Mapping[Side, int | None]) -> bool:
        """Whether a parameter trains if each tower trains so many of its last blocks."""
        side, depth = self.place(name)
        if side is None or blocks[side] is EVERYTHING:
            return True
        wanted = blocks[side]
        assert wanted is not None
        if wanted <= 0:
            return wanted == 0 and depth == self.number[side] + 2
        return depth > self.number[side] - wanted

    def rate_factor(self, name: str, tower_factors: Mapping[str, float], layer_decay: float) -> float:
        """The factor of a parameter's learning rate: the tower's, and smaller from block to block."""
        side, depth = self.place(name)
        if side is None:
            return 1.0
        return tower_factors[side] * layer_decay ** max(0, self.number[side] + 1 - depth)

    def check(self, blocks: Mapping[Side, int | None], freeze: Freeze) -> None:
        """OptionError if a tower has fewer blocks than are to be trained."""
        for side, wanted in blocks.items():
            if wanted is not EVERYTHING and wanted > self.number[side]:
                has = f"{self.number[side]} blocks" if self.number[side] else "no blocks that fastclip knows"
                rule = f"asks for more than the {side} tower has: {has}"
                raise OptionError("model.freeze", freeze, rule, example="{image: 2}")


def side_of(name: str) -> Side | None:
    """The tower of a parameter or module of open_clip's model; its scale and bias have none."""
    if name.startswith("logit_"):
        return None
    return "image" if name.split(".")[0] == "visual" else "text"


def block_modules(clip: nn.Module, side: Side) -> dict[str, nn.Module]:
    """The modules of a tower's blocks by name; in timm's models, all modules of the trunk."""
    visual = getattr(clip, "visual", None)
    if side == "image" and isinstance(visual, TimmModel):
        return {"visual.trunk": visual.trunk}
    blocks = _image_blocks(clip) if side == "image" else _text_blocks(clip)
    return {name: clip.get_submodule(name) for prefixes in blocks for name in prefixes}


def _image_blocks(clip: Any) -> list[list[str]]:
    """Names of the modules, or parameters, that make up each block."""
    visual = clip.visual
    if isinstance(visual, TimmModel):
        blocks = _timm_groups(clip)[1:]
        while blocks and not any(part.isdigit() for name in blocks[-1] for part in name.split(".")):
            blocks.pop()  # norms or pooling after the blocks
        return blocks
    if isinstance(visual, ModifiedResNet):
        stages = (visual.layer1, visual.layer2, visual.layer3, visual.layer4)
        return [
            [f"visual.layer{number}.{i}"]
            for number, stage in enumerate(stages, start=1)
            for i in range(len(stage))
        ]
    return _resblocks(visual, "visual.transformer")


def _timm_groups(clip: Any) -> list[list[str]]:
    """The names of a timm trunk's parameters, in timm's own groups: first the embeddings."""
    if not isinstance(clip.visual, TimmModel):
        return [[]]
    trunk = clip.visual.trunk
    groups = group_parameters(trunk, trunk.group_matcher(coarse=False))
    return [[f"visual.trunk.{name}" for name in groups[number]] for number in sorted(groups)]


def _text_blocks(clip: Any) -> list[list[str]]:
    text = getattr(clip, "text", None)
    if isinstance(text, HFTextEncoder):
        kind = arch_dict.get(text.config.model_type)
        number = getattr(text.config, kind["config_names"]["layers"]) if kind else 0
        for name, module in text.transformer.named_modules(prefix="text.transformer"):
            if isinstance(module, nn.ModuleList) and len(module) == number:
                return [[f"{name}.{i}"] for i in range(number)]
        return []
    return _resblocks(clip, "transformer") if text is None else _resblocks(text, "text.transformer")


def _resblocks(tower: Any, name: str) -> list[list[str]]:
    blocks = getattr(getattr(tower, "transformer", None), "resblocks", ())
    return [[f"{name}.resblocks.{i}"] for i in range(len(blocks))]


def _projections(clip: Any) -> tuple[str, ...]:
    """How the names of the projections' parameters begin."""
    visual = clip.visual
    if isinstance(visual, TimmModel):
        own = visual.trunk.pretrained_cfg.get("classifier") if not len(visual.head) else None
        image = f"visual.trunk.{own}." if isinstance(own, str) else "visual.head."
    else:
        image = "visual.attnpool." if isinstance(visual, ModifiedResNet) else "visual.proj"
    return image, "text_projection", "text.text_projection", "text.proj."


def _starts(name: str) -> list[str]:
    """A name and the names of the modules that contain it, from the inside."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
