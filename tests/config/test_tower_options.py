"""Options of towers and sizes that are not possible, or without effect."""

import pytest

from fastclip.config.options import ModelConfig
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve, resolve_again
from fastclip.errors import OptionError

BOTH = {"image": "timm:test_vit", "text": "hf:someone/encoder"}


@pytest.mark.parametrize(
    ("option", "value", "others"),
    [
        ("image", "vit_small_patch16_224", {}),
        ("image", "timm:", {}),
        ("text", "someone/encoder", {}),
        ("text", "timm:vit", {}),
        ("embed_dim", 0, {}),
        ("image_size", 0, {}),
        ("context_length", 2, {}),
        ("image_weights", "none", {}),
        ("image_weights", "file.pth", {"text": "hf:someone/encoder"}),
        ("text_weights", "none", {"image": "timm:test_vit"}),
        ("projection", "mlp", {}),
        ("pretrained", "laion2b_s34b_b79k", BOTH),
    ],
)
def test_what_is_not_possible_or_without_effect_is_refused(option, value, others):
    with pytest.raises(OptionError) as caught:
        ModelConfig(**{option: value}, **others)
    assert (caught.value.option, caught.value.value) == (f"model.{option}", value)


@pytest.mark.parametrize(
    "options",
    [
        {"pretrained": "laion2b_s34b_b79k", "text": "hf:someone/encoder", "projection": "mlp"},
        {"image": "timm:test_vit", "image_weights": "file.pth", "image_size": 96, "embed_dim": 64},
        {"pretrained": "runs/low", "image_size": 224, "context_length": 32},
    ],
)
def test_towers_and_sizes_are_options_that_a_run_keeps(options):
    words = [word for name, value in options.items() for word in (f"--model.{name}", str(value))]
    config = resolve(parse(["--config", "emoji", *words]))
    assert all(getattr(config.model, name) == value for name, value in options.items())
    assert resolve_again(config.written).model == config.model
