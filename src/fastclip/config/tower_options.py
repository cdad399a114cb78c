"""Rules of the options that choose towers and sizes: `model.image`, `model.text` and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastclip.errors import OptionError

if TYPE_CHECKING:
    from fastclip.config.model_options import ModelConfig

TIMM, HF = "timm:", "hf:"


def check_towers(model: ModelConfig) -> None:
    """OptionError if an option of the towers is not possible, or has no effect."""
    _check_prefix("model.image", model.image, TIMM, "timm:vit_small_patch16_224")
    _check_prefix("model.text", model.text, HF, "hf:sentence-transformers/all-MiniLM-L6-v2")
    for name, least in (("embed_dim", 1), ("image_size", 1), ("context_length", 3)):
        value = getattr(model, name)
        if value is not None and value < least:
            raise OptionError(f"model.{name}", value, f"must be at least {least}")
    for side in ("image", "text"):
        weights = getattr(model, f"{side}_weights")
        if weights != "own" and getattr(model, side) is None:
            _refuse(f"model.{side}_weights", weights, f"has no effect without model.{side}")
    if model.projection is not None and model.image is None and model.text is None:
        _refuse("model.projection", model.projection, "has no effect without model.image or model.text")
    if model.pretrained is not None and model.image is not None and model.text is not None:
        advice = (
            "Omit it; or, to start from a model that has these towers, pass its folder as "
            "--model.name and --model.pretrained, without model.image and model.text."
        )
        rule = "has no effect with model.image and model.text, which have weights of their own"
        raise OptionError("model.pretrained", model.pretrained, rule, advice=advice)


def _check_prefix(option: str, value: str | None, prefix: str, example: str) -> None:
    if value is not None and (not value.startswith(prefix) or value == prefix):
        raise OptionError(option, value, f"must begin with {prefix}", example=example)


def _refuse(option: str, value: str, rule: str) -> None:
    raise OptionError(option, value, rule, advice="Omit it.")
