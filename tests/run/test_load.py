"""`fastclip.load`: the model of a run, an export or a name."""

import re
import subprocess
import sys
from math import log

import open_clip
import pytest
import torch
from PIL import Image

import fastclip
from fastclip.errors import InputError, PathError
from fastclip.model import build_model
from fastclip.run.folder import MissingCheckpoint, read_metadata
from fastclip.run.load import Model
from tests.data.collections import encode, picture
from tests.evaluation import replica


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return replica.tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def model(run):
    return fastclip.load(run)


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(replica.png(i))
    return paths


def test_load_is_listed_without_importing_torch():
    code = "import sys, fastclip; print('load' in fastclip.__all__, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["True", "False"]
    with pytest.raises(AttributeError) as caught:
        fastclip.loadd  # noqa: B018
    assert caught.value.name == "loadd"
    assert set(fastclip.__all__) <= set(re.findall(r"\w+", str(caught.value)))


@pytest.mark.slow
def test_a_run_and_its_export_are_one_model_and_open_clip_agrees(run, model, files):
    exported = fastclip.load(str(run / "model"))
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{run / 'model'}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{run / 'model'}")
    theirs.eval()
    with torch.no_grad():
        images = theirs.encode_image(torch.stack([preprocess(Image.open(f)) for f in files]), normalize=True)
        texts = theirs.encode_text(tokenizer(["a red heart", "a cat"]), normalize=True)
    for loaded in (model, exported):
        torch.testing.assert_close(loaded.encode_image(files), images)
        torch.testing.assert_close(loaded.encode_text(["a red heart", "a cat"]), texts)
        torch.testing.assert_close(loaded.similarity(files, ["a red heart", "a cat"]), images @ texts.T)


def test_probabilities_use_the_trained_temperature(run, model, files):
    exported = fastclip.load(str(run / "model"))
    labels = ["a red heart", "a cat", "a house"]
    tau = read_metadata(run / "checkpoints" / "last")["config"]["algorithms"]["fastclip-v3"]["tau"]
    scale = exported.towers.clip.logit_scale
    assert -scale.item() != pytest.approx(log(0.07), abs=1e-3)  # open_clip's own start
    assert -scale.item() == pytest.approx(log(tau), abs=0.5)
    expected = (model.similarity(files, labels) * scale.exp()).softmax(-1)
    for loaded in (model, exported):
        torch.testing.assert_close(loaded.classify(files, labels), expected)
    assert model.classify(files[0], "alone").tolist() == [[1.0]]


def test_features_have_unit_length_and_can_be_trained_on(model, files):
    features = model.encode_image(files)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
    weight = torch.ones(features.shape[1], requires_grad=True)
    (features @ weight).sum().backward()  # inference tensors could not
    assert not model.towers.training
    assert model.device.type == "cpu"


def test_a_single_image_or_text_needs_no_list(model, files):
    assert model.similarity(files[0], "a cat").shape == (1, 1)
    assert model.similarity(str(files[0]), ["a cat", "a dog"]).shape == (1, 2)
    assert model.encode_image(Image.open(files[0])).shape == (1, 16)


def test_several_batches_give_the_same_features(model):
    images, texts = [picture(i) for i in range(5)], [f"image {i}" for i in range(5)]
    in_batches = Model(model.towers, batch=2)
    torch.testing.assert_close(in_batches.similarity(images, texts), model.similarity(images, texts))


def test_a_pil_image_gives_the_features_of_its_file(model, tmp_path):
    """Upright, and white where it is transparent."""
    turned, clear = tmp_path / "turned.jpg", tmp_path / "clear.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.write_bytes(encode(picture(1), "JPEG", exif=exif))
    shape = picture(2).convert("RGBA")
    shape.putalpha(Image.linear_gradient("L").resize(shape.size))
    clear.write_bytes(encode(shape))
    opened = [Image.open(turned), Image.open(clear)]
    torch.testing.assert_close(model.encode_image(opened), model.encode_image([turned, clear]))


def test_the_best_checkpoint_can_be_chosen(run):
    assert fastclip.load(run, checkpoint="best").towers.image_size == 16


def test_a_name_takes_weights_from_a_file_or_folder(run, tmp_path, model):
    weights = run / "model" / "open_clip_model.safetensors"
    loaded = fastclip.load(run / "model", pretrained=weights)
    torch.testing.assert_close(loaded.encode_text("a cat"), model.encode_text("a cat"))
    assert not loaded.towers.training
    other = build_model("vit-scenes", device="cpu")
    torch.save(other.clip.state_dict(), tmp_path / "weights.pt")
    named = fastclip.load("vit-scenes", pretrained=tmp_path / "weights.pt")
    assert torch.equal(named.towers.clip.visual.conv1.weight, other.clip.visual.conv1.weight)


def test_a_path_that_is_not_a_model_is_named(tmp_path, run, model):
    with pytest.raises(PathError) as caught:
        fastclip.load("ViT-B-32")
    assert caught.value.path == "ViT-B-32"
    with pytest.raises(PathError) as caught:
        fastclip.load(tmp_path)
    assert caught.value.path == str(tmp_path / "open_clip_config.json")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(MissingCheckpoint) as missing:
        fastclip.load(tmp_path / "run")
    assert missing.value.path == str(tmp_path / "run")


def test_inputs_that_cannot_be_encoded_are_named(model, tmp_path):
    (tmp_path / "a.png").write_bytes(b"<html>")
    with pytest.raises(PathError) as caught:
        model.encode_image(tmp_path / "a.png")
    assert caught.value.path == str(tmp_path / "a.png")
    with pytest.raises(FileNotFoundError) as missing:
        model.encode_image(tmp_path / "nowhere.png")
    assert missing.value.filename == str(tmp_path / "nowhere.png")
    for encode_empty, argument in ((model.encode_image, "images"), (model.encode_text, "texts")):
        with pytest.raises(InputError) as empty:
            encode_empty([])
        assert empty.value.argument == argument
