"""Layers: every parameter has its place, and partial training freezes what it says, bit for bit."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from fastclip.errors import OptionError
from fastclip.layers import EVERYTHING, NOTHING, Layers, block_modules, trained_blocks
from fastclip.model import build_model
from tests.test_model import batch
from tests.text_models import TEXT, write_config

RESNET = {"layers": [1, 2, 1, 1], "width": 8, "head_width": 64, "image_size": 64}
VIT = {"layers": 3, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
TIMM = {
    "timm_model_name": "test_vit",
    "timm_model_pretrained": False,
    "timm_proj": "linear",
    "image_size": 160,
}
EFFICIENTNET = TIMM | {"timm_model_name": "test_efficientnet", "timm_proj": "mlp"}


def build(folder, vision=VIT, text="clip", **options):
    """A tiny model; "bert" is a Hugging Face encoder with 2 layers."""
    config = json.loads(Path(write_config(folder, text)).read_text()) | {"vision_cfg": vision}
    path = folder / f"layers-{folder.name}-{vision.get('timm_model_name', len(vision))}.json"
    path.write_text(json.dumps(config))
    return build_model(str(path), device="cpu", **options)


@pytest.mark.parametrize(
    ("vision", "blocks"),
    [(VIT, 3), (RESNET, 5), (TIMM, 6), (EFFICIENTNET, 5)],
    ids=["vit", "resnet", "timm", "cnn"],
)
@pytest.mark.parametrize("text", ["clip", "custom", "bert"])
def test_every_parameter_has_a_place_and_blocks_are_equal_in_number_to_the_towers(
    tmp_path, vision, blocks, text
):
    model = build(tmp_path, vision, text)
    layers = Layers(model.clip)
    assert layers.number == {"image": blocks, "text": 2}
    places = Counter(layers.place(name) for name, _ in model.clip.named_parameters())
    for side in ("image", "text"):
        depths = {depth for of, depth in places if of == side}
        assert {0, *range(1, layers.number[side] + 1), layers.number[side] + 2} <= depths


def test_the_order_of_a_vits_layers(tmp_path):
    layers = Layers(build(tmp_path).clip)
    names = [
        "visual.conv1.weight",
        "visual.transformer.resblocks.2.mlp.c_fc.bias",
        "visual.ln_post.bias",
        "visual.proj",
    ]
    assert [layers.place(name) for name in names] == [("image", 0), ("image", 3), ("image", 4), ("image", 5)]
    assert layers.place("logit_scale") == (None, 0)
    assert layers.place("text_projection") == ("text", 4)


@pytest.mark.parametrize(
    ("freeze", "blocks"),
    [
        ("none", (EVERYTHING, EVERYTHING)),
        ("image", (NOTHING, EVERYTHING)),
        ("trunks", (0, 0)),
        ({"image": 2}, (2, EVERYTHING)),
        ({"image": 1, "text": 0}, (1, 0)),
    ],
)
def test_what_freeze_leaves_to_train(tmp_path, freeze, blocks):
    assert trained_blocks(freeze) == dict(zip(("image", "text"), blocks, strict=True))
    model = build(tmp_path, freeze=freeze)
    trained = {name for name, parameter in model.clip.named_parameters() if parameter.requires_grad}
    expected = {
        EVERYTHING: lambda depth, n: True,
        NOTHING: lambda depth, n: False,
        0: lambda depth, n: depth == n + 2,
        1: lambda depth, n: depth >= n,
        2: lambda depth, n: depth >= n - 1,
    }
    layers = Layers(model.clip)
    for name, _ in model.clip.named_parameters():
        side, depth = layers.place(name)
        if side is not None:
            of_side = blocks[("image", "text").index(side)]
            assert (name in trained) == expected[of_side](depth, layers.number[side]), name


@pytest.mark.parametrize("vision", [VIT, RESNET, EFFICIENTNET], ids=["vit", "resnet", "timm"])
@pytest.mark.parametrize("freeze", ["trunks", {"image": 1, "text": 1}])
def test_frozen_parts_do_not_move_by_a_bit_and_the_rest_does(tmp_path, vision, freeze):
    model = build(tmp_path, vision, freeze=freeze)
    model.freeze_logit_scale()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [module for module in model.modules() if [*module.parameters()] and not any(
        parameter.requires_grad for parameter in module.parameters()
    )]  # fmt: skip
    assert frozen
    assert not any(module.training for module in frozen)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    for seed in range(3):
        images, texts = model(*batch(model, b=4, seed=seed))
        optimizer.zero_grad()
        nn.functional.cross_entropy(images @ texts.T, torch.arange(4)).backward()
        optimizer.step()
    own_statistics = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    for name, tensor in model.state_dict().items():
        may_move = name in trained or name.rpartition(".")[0] in own_statistics
        assert torch.equal(tensor, before[name]) != may_move, name


def test_more_blocks_than_there_are_and_unknown_words_are_refused(tmp_path):
    for freeze in ({"image": 4}, {"text": 3}, "images"):
        with pytest.raises(OptionError) as caught:
            build(tmp_path, freeze=freeze)
        assert caught.value.option == "model.freeze"


def test_rates_fall_by_block_from_the_projection_and_towers_have_their_own(tmp_path):
    layers = Layers(build(tmp_path, text="clip").clip)
    factor = {
        name: layers.rate_factor(name, {"image": 0.1, "text": 1.0}, 0.5)
        for name in (
            "visual.proj", "visual.ln_post.weight", "visual.transformer.resblocks.2.ln_1.weight",
            "visual.transformer.resblocks.0.ln_1.weight", "visual.conv1.weight",
            "text_projection", "token_embedding.weight", "logit_scale",
        )
    }  # fmt: skip
    assert [*factor.values()] == pytest.approx([0.1, 0.1, 0.05, 0.0125, 0.00625, 1, 0.125, 1])
    assert TEXT["layers"] == 2


def test_the_blocks_of_a_tower_hold_its_layers(tmp_path):
    model = build(tmp_path, text="bert")
    assert [*block_modules(model.clip, "text")] == [f"text.transformer.encoder.layer.{i}" for i in range(2)]
    assert len(block_modules(model.clip, "image")) == 3
