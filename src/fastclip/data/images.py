"""Decode any image file to upright RGB, or raise the reason why it cannot be used."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from fastclip.data.image_limits import excess, excess_tags, too_large

# Tried in this order. Those of `config.options.MORE_FORMATS` can be added: their cost is not limited beyond
# pixels. Others are disabled: some run external programs (EPS), some are not for photos.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 64_000_000
_STRIP = 4_000_000  # pixels converted at a time
_MAX_RAW_EXIF = 1 << 17  # characters


class UnusableSample(Exception):
    """An image that cannot be decoded, or a pair without a caption; the message is the reason."""


def upright_rgb(data: bytes, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = ()) -> Image.Image:
    """Decode the first frame as RGB, upright by EXIF, transparency on white. Every decoder starts here.

    UnusableSample if the file is not an image, is incomplete, has more than max_pixels, or would cost far
    more to decode than its pixels do (image_limits.py).

    Args:
        formats: accepted besides FORMATS: avif, jpeg2000, ppm.
    """
    with reading(data):
        return turn_upright(open_image(data, max_pixels, formats))


def open_image(data: bytes, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = ()) -> ImageFile.ImageFile:
    """Read the header (format, size, mode) without decoding any pixels. UnusableSample as above."""
    with reading(data, formats):
        if reason := excess(data, max_pixels):
            raise UnusableSample(reason)
        image = Image.open(io.BytesIO(data), formats=[*FORMATS, *map(str.upper, formats)])
        width, height = image.size
        if width < 1 or height < 1:
            raise UnusableSample(f"{width} x {height} px")
        if reason := too_large(width, height, max_pixels):
            raise UnusableSample(reason)
        return image


def thumbnail(data: bytes, side: int, formats: Sequence[str] = ()) -> bytes:
    """Encode the image as WebP, no side longer than `side`. UnusableSample as above."""
    with reading(data):
        image = open_image(data, formats=formats)
        image.draft("RGB", (2 * side, 2 * side))  # a large JPEG is decoded at a fraction of its size
        upright = turn_upright(image)
        upright.thumbnail((side, side))
        out = io.BytesIO()
        upright.save(out, "WEBP", quality=85, method=2)
        return out.getvalue()


def turn_upright(image: Image.Image, orientation: int | None = None) -> Image.Image:
    """Decode an opened image and turn it by `orientation`, or by its own EXIF orientation."""
    image.load()
    orientation = exif_orientation(image) if orientation is None else orientation
    rgb = _rgb(image)
    return rgb.transpose(_TURNS[orientation]) if orientation > 1 else rgb


_T = Image.Transpose
_TURNS = {
    **{2: _T.FLIP_LEFT_RIGHT, 3: _T.ROTATE_180, 4: _T.FLIP_TOP_BOTTOM},
    **{5: _T.TRANSPOSE, 6: _T.ROTATE_270, 7: _T.TRANSVERSE, 8: _T.ROTATE_90},
}


def exif_orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 if it is missing or damaged."""
    exif, raw = (image.info.get(name, "") for name in ("exif", "Raw profile type exif"))
    if len(raw) > _MAX_RAW_EXIF or (isinstance(exif, bytes) and excess_tags(exif.removeprefix(b"Exif\0\0"))):
        return 1
    try:
        orientation = image.getexif().get(0x0112)
    except Exception:
        return 1
    return orientation if orientation in _TURNS else 1


def _rgb(image: Image.Image) -> Image.Image:
    """Convert a part of the image at a time: a large one is not in memory four times."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image  # convert would copy it
    if image.mode in ("I", "F"):
        raise UnusableSample(
            f"32-bit {image.format} without a known range; save it with 8 or 16 bits per channel"
        )
    width, height, rows = *image.size, max(1, _STRIP // image.width)
    if rows >= height:
        return _convert(image)
    rgb = Image.new("RGB", image.size)
    for top in range(0, height, rows):
        box = (0, top, width, min(top + rows, height))
        rgb.paste(_convert(image.crop(box)), box)
    return rgb


def _convert(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # convert would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


@contextmanager
def reading(data: bytes, formats: Sequence[str] = ()) -> Iterator[None]:
    """Run Pillow without warnings, without grey for missing data, and without its own pixel limit.

    Any failure becomes UnusableSample: on damaged bytes Pillow's readers raise almost any exception.
    """
    before = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
    ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = False, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (UnusableSample, MemoryError):
        raise
    except Exception as error:
        raise UnusableSample(_reason(data, error, formats)) from error
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = before


def _reason(data: bytes, error: Exception, formats: Sequence[str]) -> str:
    if not data:
        return "0 bytes"
    unknown = isinstance(error, UnidentifiedImageError)
    kind = next((name for name, starts in _STARTS.items() if data.startswith(starts)), None)
    more = next((name for name, start in _MORE_STARTS.items() if start.match(data)), None)
    if more and unknown and more not in formats:
        article, option = "an" if more == "avif" else "a", f"formats {more}"
        advice = f"allow it with --data.{option} (other commands: --{option})"
        return f"{article} {more.upper()} image; {advice}"
    kind = kind or (more and more.upper())
    if kind and ("truncated" in str(error).lower() or isinstance(error, EOFError)):
        return f"truncated {kind}"
    if kind:
        return f"damaged {kind}" + ("" if unknown else f" ({error})")
    if data.lstrip()[:1] in (b"<", b"{"):
        return "a web page or other text, not an image"
    return "not an image of a known format"


_STARTS: dict[str, bytes | tuple[bytes, ...]] = {
    **{"JPEG": b"\xff\xd8", "PNG": b"\x89PNG", "GIF": b"GIF8", "WebP": b"RIFF", "BMP": b"BM"},
    "TIFF": (b"II*\0", b"MM\0*"),
}
_MORE_STARTS = {
    "avif": re.compile(rb"....ftyp(avif|avis)", re.DOTALL),
    "jpeg2000": re.compile(rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n"),
    "ppm": re.compile(rb"P[0-6fy]\s"),
}
