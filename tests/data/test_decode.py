"""The decoders against open_clip's own transform."""

from __future__ import annotations

import io
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import AugmentationCfg, image_transform
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from fastclip.data.decode import Augment, decoder
from fastclip.data.images import UnusableSample, upright_rgb
from fastclip.errors import InputError, OptionError

JITTER = (0.32, 0.32, 0.32, 0.08)
OPTIONS = {
    "default": {},
    "wide crops": {"scale": (0.1, 1.0), "image_size": 64},
    "jitter and grey": {"color_jitter": JITTER, "color_jitter_prob": 0.8, "gray_scale_prob": 0.3},
    "own mean": {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.25, 0.125), "image_size": 32},
    "timm": {"use_timm": True},
    "timm, all": {
        "use_timm": True,
        "scale": (0.4, 1.0),
        "ratio": (0.5, 2.0),
        "color_jitter": 0.4,
        "re_prob": 0.6,
        "re_count": 3,
    },
}


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth colours with some grain, as in a photo."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize((width, height), 3)
    pixels = np.asarray(coarse) + rng.normal(size=(height, width, 3)) * 4
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def file(image: Image.Image, format: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def open_clips(image: Image.Image, seed: int, **options) -> torch.Tensor:
    """open_clip's training transform, seeded and called as its users do."""
    options = dict(options)
    named = {"image_size": 224} | {k: options.pop(k) for k in ("image_size", "mean", "std") if k in options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transform = image_transform(is_train=True, aug_cfg=AugmentationCfg(**options), **named)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    return transform(image)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.slow
def test_exact_is_open_clips_transform_bit_for_bit(options):
    exact = decoder("exact", Augment(**options))
    sizes = [(640, 480), (300, 500), (64, 64), (1, 1), (900, 3), (2, 700)]
    for i, (width, height) in enumerate(sizes):
        data = file(picture(width, height, seed=i), "JPEG" if i % 2 else "PNG")
        for seed in (i, 2**32 + i, 2**63 - 1 - i):
            assert torch.equal(exact.train(data, seed), open_clips(upright_rgb(data), seed, **options))


EXACT_SMALL = decoder("exact", Augment(image_size=16, scale=(0.5, 1.0)))


@settings(max_examples=100, deadline=None)
@pytest.mark.slow
@given(st.integers(1, 90), st.integers(1, 90), st.integers(0, 2**63 - 1))
def test_exact_is_open_clips_transform_for_any_size_and_seed(width, height, seed):
    image = picture(width, height)
    wanted = open_clips(image, seed, image_size=16, scale=(0.5, 1.0))
    assert torch.equal(EXACT_SMALL.train_array(np.asarray(image), seed), wanted)


@pytest.mark.parametrize("name", ["exact", "fast"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.slow
def test_train_array_equals_train(name, options):
    ready = decoder(name, Augment(**options))
    for data in (file(picture(260, 240), "PNG"), file(picture(90, 50), "JPEG")):
        pixels = np.asarray(upright_rgb(data))  # read-only, as shared memory is
        for seed in range(3):
            assert torch.equal(ready.train_array(pixels, seed), ready.train(data, seed))


@pytest.mark.parametrize("name", ["exact", "fast"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_random_states_of_the_process_are_unchanged(name, options):
    ready, data = decoder(name, Augment(**options)), file(picture(80, 60), "JPEG")
    truncated = data[:-200]

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002

    torch.manual_seed(5)
    before = states()
    first = ready.train(data, seed=3)
    with pytest.raises(UnusableSample):
        ready.train(truncated, seed=3)
    assert states() == before
    torch.manual_seed(6)
    random.seed(6)
    assert torch.equal(ready.train(data, seed=3), first)
    assert not torch.equal(ready.train(data, seed=4), first)


def test_open_clips_transform_draws_nothing_from_numpy():
    for options in OPTIONS.values():
        open_clips(picture(50, 40), 1, **options)
        state = str(np.random.get_state())  # noqa: NPY002
        np.random.seed(1)  # noqa: NPY002
        assert str(np.random.get_state()) == state  # noqa: NPY002


def pixels_of(name: str, augment: Augment, data: bytes, seed: int) -> torch.Tensor:
    """A decoder's result as values 0..255, (3, size, size)."""
    ready = decoder(name, augment)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (augment.mean, augment.std))
    return (ready.finish(ready.train(data, seed)[None], "cpu")[0] * std + mean) * 255


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height", "mean"),
    [(260, 300, 0.05), (400, 330, 0.05), (640, 480, 1.5), (1300, 1000, 1.5), (2600, 2000, 1.5)],
)
@pytest.mark.parametrize("orientation", [1, 6])
def test_fast_is_close_to_exact(width, height, mean, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file(picture(width, height), "JPEG", quality=90, exif=exif)
    off = pixels_of("fast", Augment(), data, 1) - pixels_of("exact", Augment(), data, 1)
    assert off.abs().mean() < mean
    assert off.mean().abs() < 0.1  # neither lighter nor darker


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_fast_draws_the_same_crop_jitter_and_erasure(options):
    augment, data = Augment(**options), file(picture(300, 200), "PNG")
    for seed in range(4):
        exact, fast = (pixels_of(name, augment, data, seed) for name in ("exact", "fast"))
        assert (exact.clamp(0, 255) - fast).abs().mean() < 0.8  # erased noise is clamped to 0 and 255


def test_fast_is_uint8_until_finish_and_finish_leaves_exact_unchanged():
    data = file(picture(250, 250), "JPEG")
    fast, exact = decoder("fast", Augment()), decoder("exact", Augment())
    assert fast.train(data, 0).dtype == torch.uint8
    batch = exact.train(data, 0)[None]
    assert exact.finish(batch, "cpu") is batch
    finished = fast.finish(fast.train(data, 0)[None], torch.device("cpu"))
    assert finished.shape == batch.shape
    assert finished.dtype == torch.float32
    assert finished.is_contiguous()


def test_normalising_on_a_gpu_waits_for_nothing():
    """Fake CUDA tensors raise if the host reads them."""
    fast = decoder("fast", Augment(image_size=16))
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(4, 16, 16, 3, dtype=torch.uint8, device="cuda")
        finished = fast.finish(images, "cuda")
    assert (finished.device.type, finished.dtype, finished.shape) == ("cuda", torch.float32, (4, 3, 16, 16))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_fast_reads_each_kind_of_jpeg(mode, progressive):
    data = file(picture(300, 260, mode), "JPEG", quality=90, progressive=progressive)
    off = pixels_of("fast", Augment(), data, 1) - pixels_of("exact", Augment(), data, 1)
    assert off.abs().max() < 3


@pytest.mark.parametrize("name", ["exact", "fast"])
def test_decoders_can_be_pickled(name):
    ready, data = decoder(name, Augment()), file(picture(90, 80), "JPEG")
    ready.finish(ready.train(data, 0)[None], "cpu")
    assert torch.equal(pickle.loads(pickle.dumps(ready)).train(data, 7), ready.train(data, 7))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"scale": (0.0, 1.0)}, "scale"),
        ({"max_pixels": 0}, "max_pixels"),
        ({"ratio": (0.5, 2.0)}, "ratio"),
        ({"re_prob": 0.5}, "re_prob"),
        ({"use_timm": True, "gray_scale_prob": 0.5}, "gray_scale_prob"),
        ({"use_timm": True, "re_count": 2}, "re_count"),
        ({"use_timm": True, "ratio": (2.0, 0.5)}, "ratio"),
        ({"use_timm": True, "color_jitter": -1.0}, "color_jitter"),
        ({"color_jitter": JITTER}, "color_jitter"),
        ({"color_jitter_prob": 0.5}, "color_jitter_prob"),
        ({"color_jitter": (0.1, 0.1, 0.1), "color_jitter_prob": 0.5}, "color_jitter"),
        ({"gray_scale_prob": 1.5}, "gray_scale_prob"),
    ],
)
def test_invalid_options_are_rejected(options, field):
    with pytest.raises(OptionError) as caught:
        Augment(**options)
    assert (caught.value.option, caught.value.value) == (f"data.augment.{field}", options[field])


@pytest.mark.parametrize("options", [{"image_size": 0}, {"std": (0.0, 1.0, 1.0)}, {"mean": (0.1, 0.2)}])
def test_invalid_inputs_of_the_model_are_rejected(options):
    with pytest.raises(InputError) as caught:
        Augment(**options)
    assert caught.value.argument in options


def test_unknown_decoder_is_rejected_with_the_choices():
    with pytest.raises(OptionError) as caught:
        decoder("quick", Augment())
    assert (caught.value.option, caught.value.value) == ("data.decoder", "quick")
    assert "exact, fast" in caught.value.rule
