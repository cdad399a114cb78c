"""Other sizes than those of the weights: position embeddings become what open_clip and timm make of them."""

import json

import open_clip
import pytest
import timm
import torch

from fastclip.errors import OptionError, PathError
from fastclip.model import build_model
from fastclip.towers.design import Parts
from fastclip.training.export import export

TEXT = {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
VIT = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 64, "image_size": 64}


def config_file(folder, vision=VIT, **other):
    """A tiny config; open_clip's names are global to the process, so each test has its own."""
    path = folder / f"sizes-{folder.name}.json"
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": TEXT} | other))
    return str(path)


def build(name, pretrained=None, seed=0, **parts):
    return build_model(name, device="cpu", pretrained=pretrained, seed=seed, parts=Parts(**parts)).eval()


def same(ours, theirs):
    theirs = theirs.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize(
    "sizes", [{"image_size": 40}, {"context_length": 13}, {"image_size": 8, "context_length": 5}]
)
@pytest.mark.parametrize("custom_text", [False, True])
def test_weights_are_resized_as_open_clip_resizes_them(tmp_path, sizes, custom_text):
    name = config_file(tmp_path, custom_text=custom_text)
    folder = export(build(name, seed=1), tmp_path / "export", tau=None)
    resized = build(name, folder, **sizes)
    theirs = open_clip.create_model(
        f"local-dir:{folder}",
        force_image_size=sizes.get("image_size"),
        force_context_length=sizes.get("context_length"),
    )
    assert same(resized.clip, theirs)
    assert resized.image_size == sizes.get("image_size", 16)
    assert resized.tokenizer()(["a cat"]).shape == (1, sizes.get("context_length", 8))


def test_a_resized_model_is_exported_at_its_size(tmp_path):
    first = export(build(config_file(tmp_path), seed=1), tmp_path / "first", tau=None)
    resized = build(str(first), first, image_size=32, context_length=12)
    folder = export(resized, tmp_path / "second", tau=None)
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    images, tokens = (
        torch.rand(2, 3, 32, 32),
        open_clip.get_tokenizer(f"local-dir:{folder}")(["a cat", "dog"]),
    )
    theirs.eval()
    with torch.no_grad():
        assert torch.equal(resized.clip.encode_image(images), theirs.encode_image(images))
        assert torch.equal(resized.clip.encode_text(tokens), theirs.encode_text(tokens))
    assert tokens.shape == (2, 12)
    assert transform.transforms[0].size == 32


def test_other_sizes_must_be_asked_for(tmp_path):
    name = config_file(tmp_path)
    folder = export(build(name, image_size=24), tmp_path / "export", tau=None)
    with pytest.raises(PathError) as caught:
        build(name, folder)
    assert "visual.positional_embedding" in caught.value.problem
    assert build(name, folder, image_size=16).image_size == 16  # the model's own size, asked for


def test_a_vision_transformer_of_timm_is_resized_as_timm_does(tmp_path):
    small = build("vit-scenes", image="timm:test_vit", image_weights="none", image_size=64, seed=1)
    folder = export(small, tmp_path / "export", tau=None)
    resized = build(str(folder), folder, image_size=96)
    trunk = timm.create_model("test_vit", num_classes=0, img_size=64)
    trunk.load_state_dict(small.clip.visual.trunk.state_dict())
    trunk.set_input_size(96)
    assert same(resized.clip.visual.trunk, trunk)
    own = build(str(folder), folder, image_size=160)  # timm's own size
    assert own.model_cfg["vision_cfg"]["timm_model_name"] == "test_vit"


def test_a_run_is_its_exported_model(tmp_path):
    name, run = config_file(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(PathError) as caught:
        build(name, run)
    assert (caught.value.path, "fastclip export" in caught.value.problem) == (str(run), True)
    model = build(name, seed=1)
    export(model, run / "model", tau=None)
    assert same(build(name, run).clip, model.clip)
    assert build(name, run, image_size=32).image_size == 32


@pytest.mark.parametrize(
    ("vision", "size", "works"), [(VIT, 20, "16 or 24"), (VIT, 5, "8"), (RESNET, 80, "64 or 96")]
)
def test_a_size_that_is_not_a_multiple_of_the_patch_is_refused_with_what_works(tmp_path, vision, size, works):
    with pytest.raises(OptionError) as caught:
        build(config_file(tmp_path, vision), image_size=size)
    assert (caught.value.option, caught.value.value) == ("model.image_size", size)
    assert caught.value.example == works


def test_a_models_own_size_need_not_be_a_multiple(tmp_path):
    name = config_file(tmp_path, VIT | {"image_size": 20})
    assert build(name, image_size=20).image_size == build(name).image_size == 20


def test_positions_of_a_resnet_are_not_resized_but_named(tmp_path):
    name = config_file(tmp_path, RESNET)
    folder = export(build(name), tmp_path / "export", tau=None)
    with pytest.raises(PathError) as caught:
        build(name, folder, image_size=96)
    assert "visual.attnpool.positional_embedding" in caught.value.problem
