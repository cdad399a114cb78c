"""Models: found by name or path, built from a seed or a file, partly frozen; and files that contain code."""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from math import log

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastclip.data.remote import RemoteError
from fastclip.errors import OptionError, PathError
from fastclip.model import OWN_MODELS, build_model, find_model
from tests.ranks import run_ranks

OWN = sorted(path.stem for path in OWN_MODELS.glob("*.json"))
TEXT = {"context_length": 8, "vocab_size": 512, "width": 32, "heads": 2, "layers": 1}
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 64, "image_size": 64}
VIT = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}


def config_file(tmp_path, vision=VIT, **other):
    """A tiny config; open_clip's names are global to the process, so each test has its own."""
    path = tmp_path / f"{tmp_path.name}.json"
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": TEXT} | other))
    return str(path)


@pytest.fixture
def vit(tmp_path):
    return config_file(tmp_path)


@pytest.fixture
def resnet(tmp_path):
    return config_file(tmp_path, RESNET)


def batch(model, b=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(b, 3, model.image_size, model.image_size, generator=generator)
    end = (
        model.model_cfg["text_cfg"].get("vocab_size", 200) - 1
    )  # CLIP reads the features at the highest token
    tokens = torch.randint(1, end, (b, model.context_length), generator=generator)
    tokens[:, -1] = end
    return images, tokens


def backward(model, seed=0):
    """Backpropagate a loss that uses all parameters, scale and bias too."""
    image, text = model(*batch(model, seed=seed))
    logits = image @ text.T * model.clip.logit_scale.exp()
    if model.clip.logit_bias is not None:
        logits = logits + model.clip.logit_bias
    nn.functional.cross_entropy(logits, torch.arange(len(image))).backward()


def without_gradient(model):
    return [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# Finding a model


def test_there_is_a_tiny_model_for_each_collection():
    assert OWN == ["vit-emoji", "vit-icons", "vit-scenes"]


@pytest.mark.parametrize("name", [*OWN, "ViT-B-32", "RN50"])
def test_known_names_are_found(name):
    assert find_model(name) == name
    assert open_clip.get_model_config(name)


@pytest.mark.parametrize(("name", "nearest"), [("vit-b-32", "ViT-B-32"), ("vit-emojis", "vit-emoji")])
def test_an_unknown_name_gets_the_nearest_one_and_the_command_to_list_them(name, nearest):
    with pytest.raises(OptionError) as caught:
        find_model(name)
    assert (caught.value.option, caught.value.value) == ("model.name", name)
    assert nearest in caught.value.advice
    assert "list_models" in caught.value.advice


def test_a_config_file_is_registered_by_its_stem_and_can_be_found_again(vit, tmp_path):
    assert find_model(vit) == find_model(vit) == tmp_path.name
    assert open_clip.get_model_config(tmp_path.name)["embed_dim"] == 16


def test_a_file_must_not_take_the_name_of_another_model(tmp_path):
    path = tmp_path / "vit-emoji.json"
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": VIT, "text_cfg": TEXT}))
    with pytest.raises(PathError) as caught:
        find_model(str(path))
    assert (caught.value.path, "vit-emoji" in caught.value.problem) == (str(path), True)
    assert open_clip.get_model_config("vit-emoji")["embed_dim"] == 96


def test_a_file_must_not_get_another_tokenizer_by_its_name(vit, tmp_path):
    path = tmp_path / "my-SigLIP.json"
    os.rename(vit, path)
    with pytest.raises(PathError) as caught:
        find_model(str(path))
    assert (caught.value.path, "tokenizer" in caught.value.problem) == (str(path), True)


@pytest.mark.parametrize("as_path", ["{}", "{}/open_clip_config.json", "local-dir:{}"])
def test_an_exported_folder_is_a_model_with_its_own_preprocessing(tmp_path, as_path):
    config = {
        "model_cfg": {"embed_dim": 16, "vision_cfg": VIT, "text_cfg": TEXT},
        "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "resize_mode": "squash"},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    name = find_model(as_path.format(tmp_path))
    assert name == f"local-dir:{tmp_path}" == find_model(name)
    model = build_model(name, device="cpu")
    assert (model.mean, model.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert model.preprocess_cfg["resize_mode"] == "squash"
    assert model.image_size == model.preprocess_cfg["size"] == 16
    assert model.tokenizer()(["a dog"]).shape == (1, 8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "JSON"),
        ("[]", "text_cfg"),
        ('{"embed_dim": 16}', "text_cfg"),
        ('{"model_cfg": 3}', "text_cfg"),
        (
            json.dumps({"model_cfg": {"embed_dim": 1, "vision_cfg": {}, "text_cfg": {}}}),
            "open_clip_config.json",
        ),
    ],
)
def test_an_invalid_config_is_refused(tmp_path, content, reason):
    path = tmp_path / "invalid.json"
    path.write_text(content)
    with pytest.raises(PathError) as caught:
        find_model(str(path))
    assert (caught.value.path, reason in caught.value.problem) == (str(path), True)


def test_a_missing_config_is_refused(tmp_path):
    for name, missing in (("gone.json", "gone.json"), ("", "open_clip_config.json")):
        with pytest.raises(PathError) as caught:
            find_model(str(tmp_path / name))
        assert caught.value.path == str(tmp_path / missing)


# Building it


@pytest.mark.parametrize("name", OWN)
def test_a_tiny_model_gives_unit_features_and_a_gradient_to_every_parameter(name):
    model = build_model(name, device="cpu")
    width = model.model_cfg["embed_dim"]
    image, text = model(*batch(model))
    assert image.shape == text.shape == (2, width)
    torch.testing.assert_close(torch.cat([image, text]).norm(dim=1), torch.ones(4))
    backward(model)
    assert without_gradient(model) == []
    assert model.tokenizer()(["a red circle"]).shape == (1, model.context_length)
    assert model.image_size == 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B-32", "RN50"])
def test_a_large_model_gives_every_parameter_a_gradient(name):
    model = build_model(name, device="cpu")
    backward(model)
    assert without_gradient(model) == []
    assert (model.image_size, model.context_length) == (224, 77)
    assert model.mean == open_clip.OPENAI_DATASET_MEAN


def test_weights_depend_only_on_the_seed_and_the_random_state_is_unchanged(vit):
    torch.manual_seed(1)
    first, state = build_model(vit, device="cpu", seed=5), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert same_weights(first, build_model(vit, device="cpu", seed=5))
    assert not same_weights(first, build_model(vit, device="cpu", seed=6))


def test_float64_weights_are_the_float32_ones(vit):
    single, double = build_model(vit, device="cpu"), build_model(vit, device="cpu", dtype=torch.float64)
    image, text = double(*batch(double))
    assert image.dtype == text.dtype == torch.float64
    torch.testing.assert_close(image.float(), single(*batch(single))[0])
    torch.testing.assert_close(image.norm(dim=1), torch.ones(2, dtype=torch.float64))


def test_image_features_are_passed_on_before_the_text_tower_runs(vit):
    model, seen = build_model(vit, device="cpu"), []
    model.clip.token_embedding.register_forward_hook(lambda *_: seen.append("text"))
    image, _ = model(*batch(model), on_image_features=seen.append)
    assert seen[0] is image
    assert seen[1:] == ["text"]


def test_channels_last_changes_the_layout_and_not_the_features(resnet):
    plain, last = (build_model(resnet, device="cpu", channels_last=on) for on in (False, True))
    assert last.clip.visual.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert not plain.clip.visual.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    layouts = []
    last.clip.visual.register_forward_pre_hook(lambda _, inputs: layouts.append(inputs[0].stride(1)))
    for a, b in zip(plain(*batch(plain)), last(*batch(last)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert layouts == [1]


def test_the_eval_transform_is_open_clips(vit, tmp_path):
    from PIL import Image

    model = build_model(vit, device="cpu")
    _, _, theirs = open_clip.create_model_and_transforms(tmp_path.name)
    image = Image.effect_mandelbrot((50, 30), (-2, -1.5, 1, 1.5), 50)
    assert torch.equal(model.eval_transform()(image), theirs(image))


def test_images_must_be_square(tmp_path):
    with pytest.raises(OptionError) as caught:
        build_model(config_file(tmp_path, VIT | {"image_size": [16, 32]}), device="cpu")
    assert (caught.value.option, caught.value.value) == ("model.name", tmp_path.name)
    assert "16×32" in caught.value.rule


def test_a_config_that_open_clip_cannot_build_is_refused(tmp_path):
    with pytest.raises(OptionError) as caught:
        build_model(config_file(tmp_path, VIT | {"depth": 3}), device="cpu")
    assert (caught.value.option, caught.value.value) == ("model.name", tmp_path.name)
    assert "TypeError" in caught.value.rule
    assert "'depth'" in caught.value.rule


@pytest.mark.parametrize(
    ("section", "option", "value", "choices"),
    [
        ("model", "freeze", "both", ["none", "image", "text"]),
        ("model", "batch_norm", "off", ["local", "sync", "frozen"]),
        ("loss", "tau", 0, []),
    ],
)
def test_an_invalid_option_is_refused(vit, section, option, value, choices):
    with pytest.raises(OptionError) as caught:
        build_model(vit, device="cpu", **{option: value})
    assert (caught.value.option, caught.value.value) == (f"{section}.{option}", value)
    assert all(choice in caught.value.rule for choice in choices)


# Scale and bias


def test_tau_sets_the_scale_and_only_logit_bias_adds_siglips_bias(vit):
    plain = build_model(vit, device="cpu", tau=0.02)
    assert plain.clip.logit_scale.item() == pytest.approx(log(50))
    assert plain.clip.logit_bias is None
    siglip = build_model(vit, device="cpu", logit_bias=True)
    assert siglip.clip.logit_scale.item() == pytest.approx(log(10))
    assert siglip.clip.logit_bias.item() == -10
    backward(siglip)
    assert without_gradient(siglip) == []
    assert build_model(vit, device="cpu", logit_bias=True, tau=0.5).clip.logit_scale.item() == (
        pytest.approx(log(2))
    )


def test_a_config_with_a_bias_loses_it_without_logit_bias(tmp_path):
    name = config_file(tmp_path, init_logit_bias=-10)
    assert build_model(name, device="cpu").clip.logit_bias is None
    assert "init_logit_bias" not in build_model(name, device="cpu").model_cfg
    assert build_model(name, device="cpu", logit_bias=True).model_cfg["init_logit_bias"] == -10


def test_freeze_logit_scale_freezes_scale_and_bias_only(vit):
    model = build_model(vit, device="cpu", logit_bias=True)
    model.freeze_logit_scale()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert sorted(frozen) == ["clip.logit_bias", "clip.logit_scale"]


# Freezing parts


@pytest.mark.parametrize("custom_text", [False, True])
@pytest.mark.parametrize("side", ["image", "text"])
def test_only_the_frozen_tower_has_no_gradient(tmp_path, side, custom_text):
    model = build_model(config_file(tmp_path, custom_text=custom_text), device="cpu", freeze=side)
    backward(model)
    for name, parameter in model.named_parameters():
        image = name.startswith("clip.visual.")
        frozen = image == (side == "image") and not name.startswith("clip.logit_")
        assert (parameter.grad is None) == frozen, name


@pytest.mark.parametrize(("side", "frozen"), [("none", False), ("text", False), ("image", True)])
def test_a_frozen_image_tower_has_no_dropout_in_training(tmp_path, side, frozen):
    model = build_model(config_file(tmp_path, VIT | {"patch_dropout": 0.5}), device="cpu", freeze=side)
    a, b = model(*batch(model))[0], model(*batch(model))[0]
    assert torch.equal(a, b) == frozen
    model.eval()
    assert torch.equal(model(*batch(model))[0], model(*batch(model))[0])
    model.train()
    assert model.clip.visual.training == (not frozen)
    assert model.clip.transformer.training == (side != "text")


def test_a_frozen_resnet_keeps_its_statistics(resnet):
    for side, unchanged in (("image", True), ("text", False)):
        model = build_model(resnet, device="cpu", freeze=side)
        before = {name: buffer.clone() for name, buffer in model.clip.visual.named_buffers()}
        backward(model)
        after = dict(model.clip.visual.named_buffers())
        assert all(torch.equal(before[name], after[name]) for name in before) == unchanged
        assert model.has_batch_norm_statistics == (not unchanged)


def test_frozen_batch_norm_keeps_its_statistics_and_trains_its_weights(resnet):
    model = build_model(resnet, device="cpu", batch_norm="frozen").train()
    before = {name: buffer.clone() for name, buffer in model.clip.visual.named_buffers()}
    backward(model)
    assert all(torch.equal(before[name], b) for name, b in model.clip.visual.named_buffers())
    assert without_gradient(model) == []
    assert not model.has_batch_norm_statistics
    alone = model(*(x[:1] for x in batch(model)))[0]
    torch.testing.assert_close(alone, model(*batch(model))[0][:1])


def test_batch_norm_statistics_are_those_of_the_batch_by_default(resnet, tmp_path):
    assert build_model(resnet, device="cpu").has_batch_norm_statistics
    assert not build_model("vit-scenes", device="cpu").has_batch_norm_statistics


def test_sync_batch_norm_requires_a_gpu(resnet):
    with pytest.raises(OptionError) as caught:
        build_model(resnet, device="cpu", batch_norm="sync")
    assert (caught.value.option, caught.value.value) == ("model.batch_norm", "sync")
    assert "GPU" in caught.value.rule
    model = build_model(resnet, device="meta", batch_norm="sync")  # stands in for a GPU
    assert isinstance(model.clip.visual.bn1, nn.SyncBatchNorm)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert model.has_batch_norm_statistics


@pytest.mark.parametrize("batch_norm", ["sync", "frozen"])
def test_batch_norm_is_refused_if_none_is_trained(vit, tmp_path, batch_norm):
    resnet = tmp_path / f"{tmp_path.name}-resnet.json"
    resnet.write_text(json.dumps({"embed_dim": 16, "vision_cfg": RESNET, "text_cfg": TEXT}))
    for name, freeze in ((vit, "none"), (str(resnet), "image")):
        with pytest.raises(OptionError) as caught:
            build_model(name, device="meta", batch_norm=batch_norm, freeze=freeze)  # stands in for a GPU
        assert (caught.value.option, caught.value.value) == ("model.batch_norm", batch_norm)


def test_gradient_checkpointing_gives_the_same_gradients(vit):
    plain, saving = (
        build_model(vit, device="cpu", dtype=torch.float64, gradient_checkpointing=on) for on in (False, True)
    )
    runs = []
    saving.clip.visual.transformer.resblocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    for model in (plain, saving):
        backward(model)
    assert len(runs) == 2  # once forward, once again in the backward pass
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_gradient_checkpointing_is_refused_if_a_trained_tower_lacks_it(resnet):
    with pytest.raises(OptionError) as caught:
        build_model(resnet, device="cpu", gradient_checkpointing=True)
    assert caught.value.option == "model.gradient_checkpointing"
    assert "image tower" in caught.value.rule
    model = build_model(resnet, device="cpu", gradient_checkpointing=True, freeze="image")
    assert model.clip.transformer.grad_checkpointing


# Weights from files


def write_safetensors(state, path):
    save_file(state, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def write_state_dict(state, path):
    torch.save({"epoch": 3, "state_dict": state}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def write_from_ddp(state, path):
    torch.save({"state_dict": {f"module.{key}": x for key, x in state.items()}}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def write_bare(state, path):
    torch.save(state, path.with_suffix(".bin"), _use_new_zipfile_serialization=False)
    return path.with_suffix(".bin")


@pytest.mark.parametrize("write", [write_safetensors, write_state_dict, write_from_ddp, write_bare])
def test_weights_come_from_a_file(vit, tmp_path, write):
    saved = build_model(vit, device="cpu", seed=1)
    file = write(saved.clip.state_dict(), tmp_path / "weights")
    for pretrained in (file, str(file)):
        assert same_weights(saved, build_model(vit, device="cpu", pretrained=pretrained))


def test_weights_come_from_a_folder_with_its_mean_and_deviation(vit, tmp_path):
    saved = build_model(vit, device="cpu", seed=1)
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(saved.clip.state_dict(), folder / "open_clip_model.safetensors")
    torch.save({"visual.proj": torch.ones(1)}, folder / "pytorch_model.bin")  # has lower priority
    config = {"model_cfg": saved.model_cfg, "preprocess_cfg": {"size": 99, "mean": [0.5] * 3}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    model = build_model(vit, device="cpu", pretrained=folder)
    assert same_weights(saved, model)
    assert (model.mean, model.image_size) == ((0.5, 0.5, 0.5), 16)
    with pytest.raises(PathError) as caught:
        build_model(vit, device="cpu", pretrained=tmp_path)
    assert caught.value.path == str(tmp_path)
    assert "open_clip_model.safetensors" in caught.value.problem


def test_weights_come_from_a_tag_with_its_mean_and_deviation(vit, tmp_path, monkeypatch):
    saved = build_model(vit, device="cpu", seed=1)
    file = write_safetensors(saved.clip.state_dict(), tmp_path / "weights")
    tag = {"hf_hub": "someone/model/", "mean": (0.5, 0.5, 0.5), "resize_mode": "squash"}
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda _, t: tag if t == "their_tag" else {})
    monkeypatch.setattr(open_clip, "download_pretrained", lambda cfg: str(file))
    model = build_model(vit, device="cpu", pretrained="their_tag")
    assert same_weights(saved, model)
    assert model.mean == (0.5, 0.5, 0.5)
    assert model.preprocess_cfg["resize_mode"] == "squash"

    def offline(cfg):
        raise ConnectionError("no route")

    monkeypatch.setattr(open_clip, "download_pretrained", offline)
    with pytest.raises(RemoteError, match=r"their_tag.*no route"):
        build_model(vit, device="cpu", pretrained="their_tag")


def test_weights_of_another_activation_are_refused():
    with pytest.raises(OptionError) as caught:
        build_model("ViT-B-32", device="cpu", pretrained="openai")
    assert (caught.value.option, caught.value.value) == ("model.pretrained", "openai")
    assert "quick_gelu=True" in caught.value.rule
    assert "ViT-B-32-quickgelu" in caught.value.advice


def test_a_missing_file_is_refused_with_a_list_of_tags(vit):
    with pytest.raises(OptionError) as caught:
        build_model(vit, device="cpu", pretrained="gone.pt")
    assert (caught.value.option, caught.value.value) == ("model.pretrained", "gone.pt")
    with pytest.raises(OptionError) as caught:
        build_model("ViT-B-32", device="cpu", pretrained="laion2b")
    assert (caught.value.option, caught.value.value) == ("model.pretrained", "laion2b")
    assert "openai, " in caught.value.advice
    assert "laion2b_s34b_b79k" in caught.value.advice


def test_weights_may_lack_the_bias_or_have_an_unused_one(vit, tmp_path):
    plain = build_model(vit, device="cpu", seed=1, tau=0.5).clip
    siglip = build_model(vit, device="cpu", seed=1, logit_bias=True).clip
    with torch.no_grad():
        siglip.logit_bias.fill_(-3)
    scale_of_one = {"logit_scale": plain.logit_scale.detach().reshape(1)}
    without = write_safetensors(plain.state_dict() | scale_of_one, tmp_path / "without")
    having = write_safetensors(siglip.state_dict(), tmp_path / "having")
    loaded = build_model(vit, device="cpu", pretrained=without, logit_bias=True).clip
    assert loaded.logit_bias.item() == -10
    assert loaded.logit_scale.item() == pytest.approx(log(2))
    assert build_model(vit, device="cpu", pretrained=having, logit_bias=True).clip.logit_bias.item() == -3
    assert build_model(vit, device="cpu", pretrained=having).clip.logit_bias is None


def test_weights_of_another_model_are_listed(vit, tmp_path):
    state = build_model(vit, device="cpu").clip.state_dict()
    state["visual.proj"] = torch.ones(2, 2)
    state["extra"] = state.pop("ln_final.bias")
    file = write_safetensors(state, tmp_path / "weights")
    with pytest.raises(PathError) as caught:
        build_model(vit, device="cpu", pretrained=file)
    assert caught.value.path == str(file)
    for part in (
        "1 missing (ln_final.bias)",
        "1 unexpected (extra)",
        "(visual.proj (2, 2) instead of (32, 16))",
    ):
        assert part in caught.value.problem
    with pytest.raises(PathError) as caught:
        build_model("vit-scenes", device="cpu", pretrained=file)
    assert caught.value.problem.count(" instead of ") == 3  # the rest is only counted
    assert ", …)" in caught.value.problem


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
@pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04" + bytes(64)])
def test_a_damaged_file_is_refused(vit, tmp_path, suffix, content):
    file = tmp_path / f"damaged{suffix}"
    file.write_bytes(content)
    with pytest.raises(PathError) as caught:
        build_model(vit, device="cpu", pretrained=file)
    assert caught.value.path == str(file)


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": 3}, {"epoch": 3}])
def test_a_file_without_named_tensors_is_refused(vit, tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(PathError) as caught:
        build_model(vit, device="cpu", pretrained=tmp_path / "other.pt")
    assert caught.value.path == str(tmp_path / "other.pt")
    assert "state_dict" in caught.value.problem


class Malicious:
    """Its pickle creates a folder when it is loaded without weights_only."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def as_pickle(evil, state, path):
    path.write_bytes(pickle.dumps(evil, protocol=2))


def as_new_pickle(evil, state, path):
    path.write_bytes(pickle.dumps({"state_dict": state, "evil": evil}))


def as_torch_zip(evil, state, path):
    torch.save({"state_dict": state | {"evil": evil}}, path)


def as_torch_legacy(evil, state, path):
    torch.save({"state_dict": state, "evil": evil}, path, _use_new_zipfile_serialization=False)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["weights.pt", "weights.bin", "weights.safetensors", "folder"])
@pytest.mark.parametrize("write", [as_pickle, as_new_pickle, as_torch_zip, as_torch_legacy])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_malicious_pickle_is_refused_and_does_nothing(vit, tmp_path, monkeypatch, write, where):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # some users set it globally
    marker, pretrained = tmp_path / "marker", tmp_path / where
    file = pretrained / "open_clip_pytorch_model.bin" if where == "folder" else pretrained
    file.parent.mkdir(exist_ok=True)
    write(Malicious(marker), build_model(vit, device="cpu").clip.state_dict(), file)
    with pytest.raises(PathError) as caught:
        build_model(vit, device="cpu", pretrained=pretrained)
    assert not marker.exists()
    assert caught.value.path == str(file)
    assert "weights_only" not in str(caught.value)  # torch's advice to load it anyway
    if write is as_torch_zip and where != "weights.safetensors":
        assert "posix.mkdir" in caught.value.problem
        torch.load(file, weights_only=False)
        assert marker.exists()  # the pickle does run code if it is trusted


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_archive_is_refused_and_never_loaded(vit, tmp_path, monkeypatch):
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    def load(*_, **__):
        raise AssertionError("torch.jit.load was called")

    torch.jit.script(Doubled()).save(tmp_path / "script.pt")
    monkeypatch.setattr(torch.jit, "load", load)
    with pytest.raises(PathError) as caught:
        build_model(vit, device="cpu", pretrained=tmp_path / "script.pt")
    assert caught.value.path == str(tmp_path / "script.pt")
    assert "TorchScript" in caught.value.problem


def test_building_does_not_warn_of_random_weights(vit, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_model(vit, device="cpu")
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


# Inside DDP


def train_two_steps(rank, world_size, freeze):
    torch.manual_seed(rank)  # a different random state on each rank
    model = build_model("vit-scenes", device="cpu", freeze=freeze)
    model.freeze_logit_scale()
    start = copy.deepcopy(model.state_dict())
    ddp, passed_on = DistributedDataParallel(model), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):  # a parameter without gradient fails DDP's second step
        optimizer.zero_grad()
        image, text = ddp(*batch(model, seed=10 * rank + step), on_image_features=passed_on.append)
        (image * text).sum().backward()
        optimizer.step()
    return start, model.state_dict(), len(passed_on)


def train_both(rank, world_size):
    return {freeze: train_two_steps(rank, world_size, freeze) for freeze in ("none", "image")}


@pytest.mark.slow
def test_ranks_start_and_stay_the_same_under_ddp():
    first, second = run_ranks(train_both, 2)
    for freeze in first:
        (start_0, end_0, passed_on), (start_1, end_1, _) = first[freeze], second[freeze]
        assert passed_on == 2
        for key in start_0:
            assert torch.equal(start_0[key], start_1[key])
            assert torch.equal(end_0[key], end_1[key])
            trained = not key.startswith("clip.logit") and (freeze == "none" or "visual" not in key)
            assert torch.equal(start_0[key], end_0[key]) != trained, key
