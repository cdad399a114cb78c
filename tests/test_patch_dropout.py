"""Patch dropout in the image tower: only the given patches are encoded, where they were; else all of them."""

import json
from types import SimpleNamespace

import open_clip
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastclip.data.patches import PatchChoice
from fastclip.errors import InputError, OptionError
from fastclip.model import build_model
from fastclip.patch_dropout import KeepPatches, drop_patches

TEXT = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
VIT = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 16}
TOWERS = {  # the vision config, and the side of a patch in pixels
    "vit": (VIT, 4),
    "average": (VIT | {"pool_type": "avg"}, 4),
    "pooler": (VIT | {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 4}, 4),
    "timm": ({"timm_model_name": "test_vit", "timm_pool": "", "image_size": 160}, 16),
    "timm-pooler": ({"timm_model_name": "test_vit3", "timm_pool": "", "image_size": 160}, 16),
    "rotary": ({"timm_model_name": "eva02_tiny_patch14_224", "timm_pool": "", "image_size": 224}, 14),
}


def build(tmp_path, tower="vit", share=0.5, **options):
    vision = TOWERS[tower][0] if isinstance(tower, str) else tower
    path = tmp_path / f"patches-{tmp_path.name}.json"
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": TEXT}))
    return build_model(str(path), device="cpu", dtype=torch.float64, patch_dropout=share, **options)


def images_of(towers):
    """Two images."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, towers.image_size, towers.image_size, generator=generator)


def some_patches(towers):
    """Patches of each image to keep, ascending."""
    patches, kept = towers.keep_patches.choice
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(patches, generator=generator)[:kept].sort()[0] for _ in range(2)])


def encode(towers, images, patches):
    tokens = torch.ones(len(images), 8, dtype=torch.int64)
    with torch.no_grad():
        return towers(images, tokens, patches=patches)[0]


def with_other_pixels(images, patches, side):
    """The images with new pixels in these patches."""
    changed, columns = images.clone(), images.shape[-1] // side
    for image, numbers in zip(changed, patches.tolist(), strict=True):
        for row, column in (divmod(number, columns) for number in numbers):
            image[:, row * side : (row + 1) * side, column * side : (column + 1) * side] += 1
    return changed


every_tower = pytest.mark.parametrize("tower", TOWERS)


@every_tower
def test_features_depend_on_the_given_patches_alone_and_not_on_their_order(tower, tmp_path):
    towers, side = build(tmp_path, tower), TOWERS[tower][1]
    images, kept = images_of(towers), some_patches(towers)
    found = encode(towers, images, kept)
    n = towers.keep_patches.choice.patches
    dropped = torch.tensor([sorted(set(range(n)) - set(row)) for row in kept.tolist()])
    assert (encode(towers, with_other_pixels(images, dropped, side), kept) - found).abs().max() < 1e-12
    one = with_other_pixels(images, kept[:, -1:], side)
    assert ((encode(towers, one, kept) - found).abs().amax(dim=1) > 1e-6).all()
    assert (encode(towers, images, kept.flip(1)) - found).abs().max() < 1e-12


@every_tower
def test_all_patches_are_the_whole_image_and_none_given_are_too(tower, tmp_path):
    towers, plain = build(tmp_path, tower), build(tmp_path, tower, share=0.0)
    images = images_of(towers)
    whole = encode(plain, images, None)
    assert torch.equal(encode(towers, images, None), whole)
    every = torch.arange(towers.keep_patches.choice.patches).expand(2, -1)
    assert (encode(towers, images, every) - whole).abs().max() < 1e-12
    assert (encode(towers, images, some_patches(towers)) - whole).abs().max() > 1e-6
    assert torch.equal(encode(towers, images, None), whole)  # the last ones are forgotten


@pytest.mark.parametrize(("share", "kept"), [(0.5, 8), (0.75, 4), (0.1, 14), (0.99, 1)])
def test_the_share_of_patches_is_rounded_to_at_least_one_kept(share, kept, tmp_path):
    towers, seen = build(tmp_path, share=share), []
    assert towers.keep_patches.choice == PatchChoice(16, kept)
    towers.clip.visual.transformer.register_forward_hook(lambda m, given, out: seen.append(given[0].shape[1]))
    encode(towers, images_of(towers), some_patches(towers))
    assert seen == [1 + kept]  # the class token stays


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_class_and_register_tokens_stay_in_front(prefix):
    keep = KeepPatches(PatchChoice(16, 2), prefix, returns_patches=True)
    tokens = torch.randn(2, prefix + 16, 4)
    patches = torch.tensor([[3, 7], [0, 15]])
    with keep.keeping(patches):
        found, given = keep(tokens)
    assert torch.equal(given, patches)
    for row, numbers in enumerate([[3, 7], [0, 15]]):
        expected = [*range(prefix), *(prefix + number for number in numbers)]
        assert torch.equal(found[row], tokens[row, expected])


def test_gradients_are_the_same_with_gradient_checkpointing(tmp_path):
    gradients = []
    for checkpointing in (False, True):
        towers = build(tmp_path, gradient_checkpointing=checkpointing)
        tokens = torch.ones(2, 8, dtype=torch.int64)
        features = towers(images_of(towers), tokens, patches=some_patches(towers))[0]
        features[:, 0].sum().backward()
        gradients.append([p.grad for p in towers.clip.visual.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_weights_and_the_models_config_are_as_without(tmp_path):
    ours, plain = build(tmp_path), build(tmp_path, share=0.0)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert ours.model_cfg == plain.model_cfg
    assert plain.keep_patches is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RN50", "convnext_base", "swin_base_patch4_window7_224", "MobileCLIP-S1"])
def test_towers_without_patches_are_refused(name):
    clip = open_clip.create_model(name, device="meta", load_weights=False, pretrained_text=False)
    with pytest.raises(OptionError) as caught:
        drop_patches(clip, 0.5, name)
    assert (caught.value.option, caught.value.value) == ("model.patch_dropout", 0.5)
    assert name in caught.value.rule


def test_a_model_without_patches_is_refused(tmp_path):
    resnet = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 64, "image_size": 64}
    with pytest.raises(OptionError) as caught:
        build(tmp_path, resnet)
    assert caught.value.option == "model.patch_dropout"
    assert "ModifiedResNet" in caught.value.rule


def test_patch_dropout_in_the_models_own_config_is_kept_alone_and_refused_with_ours(tmp_path):
    vision = VIT | {"patch_dropout": 0.25}
    assert isinstance(
        build(tmp_path, vision, share=0.0).clip.visual.patch_dropout, open_clip.transformer.PatchDropout
    )
    with pytest.raises(OptionError) as caught:
        build(tmp_path, vision)
    assert caught.value.option == "model.patch_dropout"
    assert "0.25" in caught.value.rule


def test_a_share_that_drops_nothing_is_refused(tmp_path):
    with pytest.raises(OptionError) as caught:
        build(tmp_path, share=0.03)  # of 16
    assert (caught.value.option, caught.value.value) == ("model.patch_dropout", 0.03)
    assert build(tmp_path, share=0.04).keep_patches.choice.kept == 15


def test_images_with_another_number_of_patches_are_refused():
    keep = KeepPatches(PatchChoice(16, 8), prefix=1, returns_patches=False)
    with keep.keeping(torch.zeros(2, 8, dtype=torch.int64)), pytest.raises(InputError) as caught:
        keep(torch.zeros(2, 1 + 9, 4))
    assert caught.value.argument == "images"


def test_a_gpu_is_never_waited_for():
    """Fake CUDA tensors raise on a read, and where host and device are mixed."""
    with FakeTensorMode(), torch.device("cuda"):
        visual = open_clip.model._build_vision_tower(16, VIT)
        keep = drop_patches(SimpleNamespace(visual=visual), 0.5, "vit")
        with keep.keeping(torch.zeros(2, 8, dtype=torch.int64)):
            assert visual(torch.zeros(2, 3, 16, 16)).shape == (2, 16)
