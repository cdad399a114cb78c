"""The options `model.…`: towers, sizes, what trains, adapters, patch dropout, the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from fastclip.config.tower_options import check_towers
from fastclip.errors import OptionError


def check(option: str, value: object, good: bool, rule: str, example: object) -> None:
    """OptionError unless the value is good."""
    if not good:
        raise OptionError(option, value, f"must be {rule}", example=example)


@dataclass(frozen=True)
class PatchDropout:
    """Patch dropout (FLIP): training on a part of each image."""

    share: float = 0.0
    """Share of its patches that each image loses, others each epoch: 0.5 halves the image tower's work."""
    until: float = 1.0
    """Fraction of the steps after which images are whole, as in evaluation: 0.9 for the last tenth."""

    def __post_init__(self) -> None:
        check("model.patch_dropout.share", self.share, 0 <= self.share < 1, "in [0, 1)", 0.5)
        check("model.patch_dropout.until", self.until, 0 < self.until <= 1, "in (0, 1]", 0.9)


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (LoRA), trained instead of the weights of pretrained towers."""

    rank: int = 0
    """Rank of the adapters, e.g. 8; 0: none. Of an adapted tower only they and the projection are trained."""
    alpha: float | None = None
    """Adapters are scaled by alpha/rank. Default: twice the rank."""
    targets: list[str] | None = None
    """Layers to adapt, by a part of their names, e.g. [attn, mlp.c_fc]. Default: all attention and linear
    layers of the blocks."""

    def __post_init__(self) -> None:
        check("model.lora.rank", self.rank, self.rank >= 0, "0 or more", 8)
        alpha = self.alpha
        check("model.lora.alpha", alpha, alpha is None or 0 < alpha < inf, "finite and above 0", 16)
        if not self.rank and (alpha is not None or self.targets is not None):
            raise OptionError("model.lora.rank", 0, "switches LoRA off", example=8)
        if self.targets is not None and not self.targets:
            raise OptionError("model.lora.targets", [], "matches no layer", example="[attn]")

    @property
    def scale(self) -> float:
        return 2.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    """The image and text towers."""

    name: str = "ViT-B-32"
    """An open_clip model (ViT-B-32, RN50, …), a small one for CPUs (vit-scenes, vit-emoji, vit-icons), or the
    path of an open_clip JSON config."""
    pretrained: str | None = None
    """Weights to start from: an open_clip tag, a .safetensors or .pt file, an exported folder, or a run."""
    image: str | None = None
    """Image tower instead of the model's: timm:NAME, e.g. timm:vit_small_patch14_dinov2.lvd142m."""
    image_weights: str = "own"
    """Weights of model.image: `own` are timm's, downloaded once; `none`: new ones; or a file."""
    text: str | None = None
    """Text tower instead of the model's, with its tokenizer: hf:NAME on Hugging Face, or hf:FOLDER."""
    text_weights: Literal["own", "none"] = "own"
    """Weights of model.text: `own`, or `none`: new ones."""
    embed_dim: int | None = None
    """Length of the features. Default: the model's."""
    projection: Literal["linear", "mlp"] | None = None
    """From model.image and model.text to the features. Default: linear."""
    image_size: int | None = None
    """Pixels per side. Default: the model's, or that of model.image. Pretrained weights are resized."""
    context_length: int | None = None
    """Tokens per caption. Default: the model's. Pretrained weights are resized."""
    freeze: Literal["none", "image", "text", "trunks"] | dict[str, int] = "none"
    """What is not trained: a tower (`image` with pretrained weights is LiT), `trunks` (all but the two
    projections), or all but the last blocks of a tower and its projection: {image: 6, text: 0}."""
    lora: LoraOptions = field(default_factory=LoraOptions)
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile the towers. `auto`: on GPUs, if a trial step compiles."""
    channels_last: bool = False
    """Use NHWC memory layout, and measure which convolutions are fastest: for ResNets on GPUs."""
    text_padding: Literal["auto", "keep"] = "auto"
    """`auto`: leave the captions' padding out of the text tower where that is exact; `keep`: compute it."""
    batch_norm: Literal["local", "sync", "frozen"] = "local"
    """BatchNorm statistics: per rank (`local`), over the global batch (`sync`, GPUs only), or `frozen`."""
    patch_dropout: PatchDropout = field(default_factory=PatchDropout)
    ema: float | None = None
    """Decay of an exponential moving average of the trained weights, e.g. 0.999: the average is evaluated,
    exported and loaded in place of the last weights. Default: no average."""

    def __post_init__(self) -> None:
        check_towers(self)
        check("model.ema", self.ema, self.ema is None or 0 < self.ema < 1, "in (0, 1)", 0.999)
        if self.lora.rank and not self.sources():
            advice = "Pass --model.pretrained, or towers with weights of their own."
            raise OptionError("model.lora", self.lora.rank, "adapts pretrained weights", advice=advice)
        share = self.patch_dropout.share
        if isinstance(self.freeze, dict):
            sides, counts = self.freeze.keys() <= {"image", "text"}, all(n >= 0 for n in self.freeze.values())
            rule = "a table of towers and the number of their last blocks to train"
            check("model.freeze", self.freeze, bool(self.freeze) and sides and counts, rule, "{image: 6}")
        if share > 0 and self.freeze == "image":
            rule = "has no effect with model.freeze=image: a frozen tower encodes whole images"
            raise OptionError("model.patch_dropout", share, rule, advice="Omit one of them.")

    def sources(self) -> list[str]:
        """Where the first weights come from; none if all are new."""
        found = [self.pretrained]
        if self.image is not None:
            found.append({"own": self.image, "none": None}.get(self.image_weights, self.image_weights))
        if self.text is not None and self.text_weights == "own":
            found.append(self.text)
        return [source for source in found if source is not None]
