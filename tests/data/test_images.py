"""Every kind of image file is decoded or rejected with a reason, by both decoders, without warnings."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from fastclip.data import images
from fastclip.data.decode import Augment, decoder
from fastclip.data.images import UnusableSample, open_image, thumbnail, turn_upright, upright_rgb
from tests.data.test_decode import OPTIONS, file, open_clips, picture


def solid(mode: str, colour, size=(40, 30)) -> Image.Image:
    return Image.new(mode, size, colour)


def transparent_palette() -> bytes:
    image = Image.new("P", (40, 30), 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.paste(1, (20, 0, 40, 30))
    return file(image, "PNG", transparency=bytes([255, 0]))  # red, and fully transparent green


def animated(format: str, **options) -> bytes:
    frames = [solid("RGB", c) for c in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    return file(frames[0], format, save_all=True, append_images=frames[1:], duration=50, **options)


def deep_png() -> bytes:
    return file(Image.fromarray(np.full((30, 40), 0x8040, np.uint16)), "PNG")


KINDS = {
    "alpha": (file(solid("RGBA", (255, 0, 0, 128)), "PNG"), (255, 127, 127)),
    "unseen": (file(solid("RGBA", (9, 9, 9, 0)), "WEBP", lossless=True), (255, 255, 255)),
    "grey alpha": (file(solid("LA", (0, 128)), "PNG"), (127, 127, 127)),
    "grey": (file(solid("L", 77), "PNG"), (77, 77, 77)),
    "one bit": (file(solid("1", 1), "PNG"), (255, 255, 255)),
    "palette": (file(solid("RGB", (10, 20, 30)).convert("P", palette=1), "PNG"), (10, 20, 30)),
    "transparent palette": (transparent_palette(), (255, 0, 0)),
    "transparent colour": (file(solid("RGB", (1, 2, 3)), "PNG", transparency=(1, 2, 3)), (255, 255, 255)),
    "16-bit": (deep_png(), (128, 128, 128)),
    "cmyk": (file(solid("CMYK", (0, 255, 255, 0)), "JPEG", quality=100), (255, 0, 0)),
    "cmyk tiff": (file(solid("CMYK", (0, 255, 255, 0)), "TIFF"), (255, 0, 0)),
    "animated gif": (animated("GIF"), (255, 0, 0)),
    "animated webp": (animated("WEBP", lossless=True), (255, 0, 0)),
    "animated png": (animated("PNG"), (255, 0, 0)),
    "bmp": (file(solid("RGB", (1, 2, 3)), "BMP"), (1, 2, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_is_decoded(kind):
    data, colour = KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = upright_rgb(data)
        assert (image.mode, image.size) == ("RGB", (40, 30))
        assert max(abs(a - b) for a, b in zip(image.getpixel((5, 5)), colour, strict=True)) <= 2
        for options in OPTIONS.values():
            exact = decoder("exact", Augment(**options)).train(data, 3)
            assert torch.equal(exact, open_clips(image, 3, **options))
        assert decoder("fast", Augment()).train(data, 3).shape == (224, 224, 3)


def test_transparent_palette_is_white_where_transparent():
    assert upright_rgb(transparent_palette()).getpixel((30, 5)) == (255, 255, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_turned_by_their_exif_orientation(orientation, format):
    upright = picture(48, 32)
    turn_back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the inverse of each turn, PIL's numbers
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(turn_back[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(format, {})
    turned = upright_rgb(file(stored, format, exif=exif, **options))
    assert turned.size == upright.size
    assert np.abs(np.asarray(turned, int) - np.asarray(upright, int)).mean() < 3


def test_image_with_damaged_exif_is_decoded():
    data = file(picture(40, 30), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff garbage")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert upright_rgb(data).size == (40, 30)
        decoder("fast", Augment()).train(data, 0)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a hundred bytes whose header declares an enormous image."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("name", ["avif", "jpeg2000", "ppm"])
def test_further_formats_are_decoded_if_they_are_asked_for(name):
    data = file(picture(40, 30), name.upper())
    with pytest.raises(UnusableSample) as caught:
        upright_rgb(data)
    assert f"--data.formats {name}" in str(caught.value)
    assert upright_rgb(data, formats=(name,)).size == (40, 30)
    assert open_image(data, formats=("ppm", "avif", "jpeg2000")).format == name.upper()
    for kind in ("exact", "fast"):
        decoder(kind, Augment(formats=(name,))).train(data, 0)
    with pytest.raises(UnusableSample) as caught:
        upright_rgb(data[: len(data) // 2], formats=(name,))
    assert name.upper() in str(caught.value)
    assert "--data.formats" not in str(caught.value)


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "LA", "CMYK", "1", "I;16"])
def test_a_large_image_is_converted_in_parts_to_the_same_pixels(mode, monkeypatch):
    image = picture(90, 70).convert("L" if mode == "I;16" else mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(picture(90, 70).convert("L"))
    if mode == "P":
        image.info["transparency"] = 3
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) << 8)
    whole = np.asarray(turn_upright(image.copy()))
    monkeypatch.setattr(images, "_STRIP", 90 * 8)
    assert np.array_equal(whole, np.asarray(turn_upright(image)))


PHOTO = file(picture(300, 200), "JPEG")
# Bytes, and what the reason names: the format, sizes, limits
BAD = {
    "empty": (b"", "0 bytes"),
    "half a jpeg": (PHOTO[: len(PHOTO) // 2], "truncated JPEG"),
    "jpeg without its end": (PHOTO[:-300], "truncated JPEG"),
    "progressive": (file(picture(300, 200), "JPEG", progressive=True)[:-3000], "truncated JPEG"),
    "jpeg's first bytes": (PHOTO[:20], "JPEG"),
    "half a png": (file(picture(300, 200), "PNG")[:9000], "truncated PNG"),
    "half a gif": (file(picture(300, 200), "GIF")[:9000], "GIF"),
    "half a webp": (file(picture(300, 200), "WEBP")[:900], "WebP"),
    "half a tiff": (file(picture(300, 200), "TIFF")[:9000], "TIFF"),
    "a page": (b"<!DOCTYPE html><html>404</html>", "web page"),
    "text": (b"once upon a time", "not an image"),
    "noise": (np.random.default_rng(0).bytes(2000), "not an image"),
    "float tiff": (file(Image.new("F", (9, 9)), "TIFF"), "32-bit TIFF"),
    "too large": (bomb(12_000, 9_000), "12,000 x 9,000 px exceeds max_pixels=64,000,000"),
    "far too large": (bomb(2_000_000, 900_000), "2,000,000 x 900,000 px"),
    "nothing inside": (bomb(100, 100), "PNG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
}


@pytest.mark.parametrize("kind", BAD)
def test_unusable_file_is_rejected_with_a_reason(kind, monkeypatch):
    data, reason = BAD[kind]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as other libraries set it
    limits = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for act in (
            upright_rgb,
            *(lambda d, n=n: decoder(n, Augment()).train(d, 0) for n in ("exact", "fast")),
        ):
            with pytest.raises(UnusableSample) as caught:
                act(data)
            assert reason in str(caught.value)
    assert limits == (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)


@settings(max_examples=100, deadline=None)
@pytest.mark.slow
@given(st.sampled_from([PHOTO, *(data for data, _ in KINDS.values())]), st.data())
def test_damaged_bytes_give_an_image_or_a_reason(data, draw):
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 8))):
        damaged[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    damaged = bytes(damaged[: draw.draw(st.integers(len(data) // 2, len(data)))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("exact", "fast"):
            try:
                decoder(name, Augment(image_size=16, max_pixels=1_000_000)).train(damaged, 0)
            except UnusableSample as error:
                assert str(error)  # noqa: PT017


def test_header_gives_the_size_without_decoding():
    assert open_image(PHOTO[:700]).size == (300, 200)


def test_pixel_limit_can_be_changed():
    data = file(picture(30, 20), "PNG")
    assert upright_rgb(data, max_pixels=600).size == (30, 20)
    with pytest.raises(UnusableSample) as caught:
        upright_rgb(data, max_pixels=599)
    assert "30 x 20 px exceeds max_pixels=599" in str(caught.value)


def test_thumbnails_are_small_and_keep_their_aspect_ratio():
    large, small = (Image.open(io.BytesIO(thumbnail(_jpeg(size), 256))) for size in ((1200, 600), (40, 30)))
    assert large.format == small.format == "WEBP"
    assert large.size == (256, 128)
    assert small.size == (40, 30)  # never enlarged
    with pytest.raises(UnusableSample):
        thumbnail(b"text", 256)


def _jpeg(size):
    data = io.BytesIO()
    Image.new("RGB", size, "red").save(data, "JPEG")
    return data.getvalue()
