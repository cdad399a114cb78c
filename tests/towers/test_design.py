"""Models of other towers: exports load in plain open_clip and in fastclip, without the towers' sources."""

import json
import shutil

import open_clip
import pytest
import torch

import fastclip
from fastclip.errors import OptionError, PathError
from fastclip.model import build_model
from fastclip.towers.design import Parts
from fastclip.training.export import export
from tests.towers.encoders import write_encoder

CAPTIONS = ["a red heart", "two very long cat of a dog"]
MEAN = {"pooling_mode_mean_tokens": True}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def build(name="vit-scenes", pretrained=None, seed=1, **parts):
    return build_model(name, device="cpu", pretrained=pretrained, seed=seed, parts=Parts(**parts)).eval()


@torch.no_grad()
def features(clip, images, tokens):
    clip.eval()
    return clip.encode_image(images, normalize=True), clip.encode_text(tokens, normalize=True)


@pytest.mark.parametrize("size", [None, 96])
def test_plain_open_clip_loads_an_export_from_its_folder_and_fastclip_from_anywhere(
    tmp_path, monkeypatch, size
):
    source = write_encoder(tmp_path / "encoder", MEAN)
    model = build(image="timm:test_vit", image_weights="none", text=f"hf:{source}", image_size=size)
    folder = export(model, tmp_path / "export", tau=0.1)
    shutil.rmtree(source)  # the export needs nothing else

    images = torch.rand(2, 3, size or 160, size or 160)
    monkeypatch.chdir(folder)
    theirs, _, transform = open_clip.create_model_and_transforms("local-dir:.")
    tokens = open_clip.get_tokenizer("local-dir:.")(CAPTIONS)
    monkeypatch.chdir(tmp_path)
    loaded = fastclip.load(folder).towers
    assert torch.equal(loaded.tokenizer()(CAPTIONS), tokens)
    assert transform.transforms[0].size == model.image_size
    ours = features(model.clip, images, tokens)
    for other in (theirs, loaded.clip):
        for a, b in zip(ours, features(other, images, tokens), strict=True):
            assert torch.equal(a, b)
    assert loaded.model_cfg == model.model_cfg
    assert loaded.preprocess_cfg == model.preprocess_cfg

    again = export(loaded, tmp_path / "again", tau=None)
    assert sorted(path.relative_to(again) for path in again.rglob("*")) == sorted(
        path.relative_to(folder) for path in folder.rglob("*")
    )


def test_an_export_names_no_folder_of_the_machine(tmp_path):
    source = write_encoder(tmp_path / "encoder", MEAN)
    model = build(image="timm:test_vit", image_weights="none", text=f"hf:{source}", image_size=96)
    folder = export(model, tmp_path / "export", tau=0.1)
    for file in folder.rglob("*.json"):
        assert str(tmp_path) not in file.read_text(), file


def test_a_name_on_the_hub_stays_one_and_fastclip_loads_the_export_without_it(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--someone--encoder" / "snapshots" / ("0" * 40)
    write_encoder(snapshot, MEAN)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    with monkeypatch.context() as cached:
        cached.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        model = build(text="hf:someone/encoder")
        folder = export(model, tmp_path / "export", tau=0.1)
        theirs = open_clip.create_model(f"local-dir:{folder}").eval()
    text = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]["text_cfg"]
    assert (text["hf_model_name"], text["hf_tokenizer_name"]) == ("someone/encoder", "someone/encoder")
    assert text["hf_pooler_type"] == "mean_pooler"
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(CAPTIONS)
    loaded = fastclip.load(folder).towers
    assert torch.equal(loaded.tokenizer()(CAPTIONS), tokens)
    for clip in (theirs, loaded.clip):
        assert torch.equal(clip.encode_text(tokens), model.clip.encode_text(tokens))


def test_a_json_config_that_names_a_folder_is_exported_with_it(tmp_path):
    source = write_encoder(tmp_path / "encoder", MEAN)
    vision = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
    text = {"hf_model_name": str(source), "hf_tokenizer_name": str(source), "context_length": 12}
    path = tmp_path / f"design-{tmp_path.name}.json"
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    model = build(str(path))
    folder = export(model, tmp_path / "export", tau=None)
    shutil.rmtree(source)
    loaded = fastclip.load(folder)
    tokens = loaded.towers.tokenizer()(CAPTIONS)
    assert torch.equal(loaded.towers.clip.encode_text(tokens), model.clip.encode_text(tokens))


@pytest.mark.parametrize("kept", ["image", "text"])
def test_pretrained_weights_are_for_the_tower_that_stays(tmp_path, kept):
    whole = build(seed=5)
    folder = export(whole, tmp_path / "whole", tau=None)
    source = write_encoder(tmp_path / "encoder", MEAN)
    other = {"image": {"text": f"hf:{source}"}, "text": {"image": "timm:test_vit", "image_weights": "none"}}
    model, new = build(pretrained=folder, **other[kept]), build(**other[kept])
    theirs = whole.clip.state_dict()
    for name, tensor in model.clip.state_dict().items():
        stays = name.startswith("visual.") == (kept == "image") and not name.startswith("logit_")
        assert torch.equal(tensor, (theirs if stays else new.clip.state_dict())[name]), name


def test_other_features_need_new_projections_of_the_tower_that_stays(tmp_path):
    folder = export(build(seed=5), tmp_path / "whole", tau=None)
    source = write_encoder(tmp_path / "encoder", MEAN)
    with pytest.raises(PathError) as caught:
        build(pretrained=folder, text=f"hf:{source}", embed_dim=8)
    assert "visual.proj" in caught.value.problem


@pytest.mark.parametrize(
    "parts", [{"image": "timm:test_vit"}, {"text": "hf:someone/encoder"}, {"embed_dim": 8}]
)
def test_coca_keeps_its_towers(parts):
    with pytest.raises(OptionError) as caught:
        build("coca_ViT-B-32", **parts)
    assert caught.value.option == f"model.{next(iter(parts))}"


@pytest.mark.parametrize("lost", ["text_tower", "image_tower"])
def test_an_export_that_lost_a_part_is_refused(tmp_path, lost):
    source = write_encoder(tmp_path / "encoder", MEAN)
    model = build(image="timm:test_vit", image_weights="none", text=f"hf:{source}", image_size=96)
    folder = export(model, tmp_path / "export", tau=None)
    shutil.rmtree(folder / lost)
    with pytest.raises(PathError) as caught:
        fastclip.load(folder)
    assert caught.value.path.startswith(str(folder / lost))


def test_the_features_do_not_depend_on_options_that_are_not_given():
    assert build().model_cfg == build_model("vit-scenes", device="cpu").model_cfg
    plain, other = build_model("vit-scenes", device="cpu", seed=3), build(seed=3, image_size=32)
    assert plain.image_size == 32
    state = other.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())


def test_an_encoder_of_another_type_in_an_export_is_refused_before_it_is_built(tmp_path):
    model = build(text=f"hf:{write_encoder(tmp_path / 'encoder', MEAN)}")
    folder = export(model, tmp_path / "export", tau=None)
    code = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    config = folder / "text_tower" / "config.json"
    config.write_text(json.dumps({"model_type": "mine", "auto_map": code}))
    (folder / "text_tower" / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(PathError) as refused:
        fastclip.load(folder)
    assert refused.value.path == str(config)
    config.write_text(json.dumps({"model_type": "mine"}))
    with pytest.raises(OptionError) as caught:
        fastclip.load(folder)
    assert "'mine'" in caught.value.rule
    assert not (tmp_path / "ran").exists()
