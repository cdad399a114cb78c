"""Features of a collection are the same on any number of ranks, and encoding leaves the model unchanged."""

import logging
import random
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch

from fastclip.data.images import upright_rgb
from fastclip.data.manifest import open_manifest
from fastclip.distributed.world import World
from fastclip.errors import OptionError, PathError
from fastclip.evaluation.features import Encoder
from tests.data.collections import pair_members, png, write_tar
from tests.ranks import run_ranks

HOW = {
    "transform": open_clip.image_transform(16, is_train=False),
    "tokenizer": open_clip.SimpleTokenizer(context_length=8),
    "batch_size": 4,
}


def tiny_model():
    torch.manual_seed(0)
    vision = open_clip.CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
    text = open_clip.CLIPTextCfg(context_length=8, width=32, heads=2, layers=1)
    clip = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    return SimpleNamespace(clip=clip, encode_text=lambda tokens: clip.encode_text(tokens, normalize=True))


def collection(folder, captions, damaged=()):
    """Image i with captions[i]; the damaged ones are cut after 100 bytes."""
    members = []
    for i, caption in enumerate(captions):
        image = png(i)[:100] if i in damaged else png(i)
        members += [(f"{i:06d}.png", image), (f"{i:06d}.txt", caption.encode())]
    return open_manifest(str(write_tar(folder / "pairs.tar", members)))


def same(a, b):
    return a.unusable == b.unusable and all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def manifest(tmp_path):
    return open_manifest(str(write_tar(tmp_path / "plain.tar", pair_members(range(10)))))


def test_features_are_those_of_each_pair_in_the_collections_order(model, manifest):
    features = Encoder(model, World.alone(), **HOW).pairs(manifest)
    assert features.image_bd.shape == features.text_md.shape == (10, 16)
    assert features.image_of_text.tolist() == list(range(10))
    assert features.unusable == 0
    model.clip.eval()
    with torch.no_grad():
        for i in range(10):
            image = HOW["transform"](upright_rgb(png(i)))[None]
            text = HOW["tokenizer"]([f"picture {i}"])
            torch.testing.assert_close(
                features.image_bd[i], model.clip.encode_image(image, normalize=True)[0]
            )
            torch.testing.assert_close(features.text_md[i], model.clip.encode_text(text, normalize=True)[0])


def test_lines_of_a_caption_are_texts_of_one_image(model, tmp_path):
    """More lines than fit into a batch, blank lines, and Windows line ends."""
    many = "\n".join(f"line {i}" for i in range(7))
    features = Encoder(model, World.alone(), **HOW).pairs(
        collection(tmp_path, ["a cat\n\n a dog \r\nan ox", "a bird", many])
    )
    assert features.image_of_text.tolist() == [0, 0, 0, 1, *[2] * 7]
    texts = HOW["tokenizer"](["a cat", "a dog", "an ox", "a bird", *many.split("\n")])
    with torch.no_grad():
        expected = model.clip.eval().encode_text(texts, normalize=True)
    torch.testing.assert_close(features.text_md, expected)


def test_damaged_images_and_empty_captions_are_skipped_counted_and_logged(model, tmp_path, caplog):
    captions = [f"picture {i}\nagain {i}" for i in range(12)]
    captions[2] = " \n "
    damaged = (0, 4, 5, 6, 7, 9)  # 4 to 7 are a complete batch
    with caplog.at_level(logging.WARNING):
        features = Encoder(model, World.alone(), **HOW).pairs(collection(tmp_path, captions, damaged))
    assert features.unusable == 7
    assert features.image_of_text.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    good = [1, 3, 8, 10, 11]
    for image_d, number in zip(features.image_bd, good, strict=True):
        image = HOW["transform"](upright_rgb(png(number)))[None]
        with torch.no_grad():
            torch.testing.assert_close(image_d, model.clip.encode_image(image, normalize=True)[0])
    (record,) = [record for record in caplog.records if record.name == "fastclip.evaluation.features"]
    skipped, images, reasons, first, file = record.args
    assert (record.levelname, skipped, images) == ("WARNING", "7", "12")
    assert [reason.split(" × ")[0] for reason in reasons.split(", ")] == ["6", "1"]
    assert (first, file) == (0, str(tmp_path / "pairs.tar"))


def test_a_collection_without_a_usable_pair_is_an_error(model, tmp_path):
    with pytest.raises(PathError) as caught:
        Encoder(model, World.alone(), **HOW).pairs(collection(tmp_path, ["one", "two"], damaged=(0, 1)))
    assert caught.value.path == str(tmp_path / "pairs.tar")
    assert "2 images" in caught.value.problem


def test_features_do_not_depend_on_loader_workers(model, tmp_path):
    pairs = collection(tmp_path, [f"picture {i}\nagain" for i in range(10)], damaged=(3,))
    assert same(
        Encoder(model, World.alone(), **HOW).pairs(pairs),
        Encoder(model, World.alone(), **HOW, workers=2).pairs(pairs),
    )


def test_encoding_restores_modes_and_draws_no_random_numbers(model, manifest):
    clip = model.clip.train()
    clip.visual.eval()  # like a frozen tower
    modes = [module.training for module in clip.modules()]
    seen = []
    hook = clip.visual.register_forward_pre_hook(
        lambda *_: seen.append((clip.training, torch.is_inference_mode_enabled()))
    )
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    features = Encoder(model, World.alone(), **HOW, workers=1).pairs(manifest)
    Encoder(model, World.alone(), **HOW).pairs(manifest)
    hook.remove()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]  # noqa: NPY002
    assert set(seen) == {(False, True)}
    assert [module.training for module in clip.modules()] == modes
    assert not any(tensor.is_inference() for tensor in features[:3])


def test_an_error_restores_the_mode(model, manifest):
    model.clip.train()
    with pytest.raises(ZeroDivisionError):
        Encoder(model, World.alone(), **HOW | {"transform": lambda image: 1 / 0}).pairs(manifest)
    assert model.clip.training


def test_a_float64_model_has_float64_features(manifest):
    model = tiny_model()
    single = Encoder(model, World.alone(), **HOW).pairs(manifest)
    model.clip.double()
    double = Encoder(model, World.alone(), **HOW).pairs(manifest)
    assert double.image_bd.dtype == double.text_md.dtype == torch.float64
    torch.testing.assert_close(double.image_bd.float(), single.image_bd)


def test_autocast_gives_float32_features_and_caches_no_cast_weights(manifest):
    """Under a caller's autocast, weights cast without gradients must not be used for training."""
    model = tiny_model()
    exact = Encoder(model, World.alone(), **HOW).pairs(manifest)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = Encoder(model, World.alone(), **HOW, precision="bfloat16").pairs(manifest)
        assert same(Encoder(model, World.alone(), **HOW).pairs(manifest), exact)
        model.clip.encode_image(torch.ones(1, 3, 16, 16)).float().sum().backward()
    assert rounded.image_bd.dtype == torch.float32
    assert not torch.equal(rounded.image_bd, exact.image_bd)
    torch.testing.assert_close(rounded.image_bd, exact.image_bd, atol=0.05, rtol=0)
    assert model.clip.visual.conv1.weight.grad is not None


def test_progress_counts_pairs(model, manifest):
    calls = []
    Encoder(model, World.alone(), **HOW).pairs(manifest, progress=lambda *call: calls.append(call))
    assert calls == [(4, 10), (8, 10), (10, 10)]


def test_a_batch_size_of_0_is_rejected(model):
    with pytest.raises(OptionError) as caught:
        Encoder(model, World.alone(), **HOW | {"batch_size": 0})
    assert (caught.value.option, caught.value.value) == ("batch_size", 0)


def encode_together_and_alone(rank, world_size, pairs, unusable):
    """For several batch sizes: the features encoded by all ranks together, and by one alone."""
    model, results = tiny_model(), []
    world = World(rank, world_size, rank, torch.device("cpu"), None)
    for batch_size in (2, 4, 16):
        how = HOW | {"batch_size": batch_size}
        together = Encoder(model, world, **how).pairs(pairs)
        results.append((together, Encoder(model, World.alone(), **how).pairs(pairs)))
    with pytest.raises(PathError) as caught:
        Encoder(model, world, **HOW).pairs(unusable)
    assert "5 images" in caught.value.problem
    return results


@pytest.mark.slow
def test_two_ranks_give_the_same_features_as_one(tmp_path):
    """Uneven parts, a rank with only unusable pairs in a batch, and a rank without batches."""
    (tmp_path / "unusable").mkdir()
    captions = [f"picture {i}" + "\nagain" * (i % 3) for i in range(11)]
    pairs = collection(tmp_path, captions, damaged=(0, 1, 2, 3, 9))
    unusable = collection(tmp_path / "unusable", ["x"] * 5, damaged=range(5))
    for results in run_ranks(encode_together_and_alone, 2, pairs, unusable):
        for together, alone in results:
            assert same(together, alone)
            assert len(together.image_bd) == 6
            assert together.unusable == 5
