"""Images that try to take hours or the whole memory, built by code, each with a part of the expected reason.

`python -m tests.data.hostile_images` decodes all of them under limits on time and memory, one line each.
"""

from __future__ import annotations

import io
import json
import resource
import struct
import sys
import zlib
from collections.abc import Callable

from PIL import Image

CPU_SECONDS, MEMORY = 20, 2 << 30  # for each image; those that decode take less than 3 s and 1 GiB
DECODES = ""  # instead of a reason


def encoded(image: Image.Image, format: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def grey(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height), 128 if mode in ("L", "P") else None)


# JPEG


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(body)) + body


def with_segments(segments: bytes, image: bytes | None = None) -> bytes:
    """Insert bytes after the start of a JPEG."""
    image = image or encoded(grey(), "JPEG")
    return image[:2] + segments + image[2:]


def scans(count: int, width: int, height: int, progressive: bool = True) -> bytes:
    """A JPEG whose last scan is repeated."""
    image = encoded(grey(width, height), "JPEG", progressive=True)
    if not progressive:  # the first component alone, in a sequential file
        image = encoded(grey(width, height), "JPEG", subsampling=0)
        at = image.index(b"\xff\xda")
        image = image[:at] + segment(0xDA, b"\x01\x01\x00\x00\x3f\x00") + image[at + 14 :]
    last = image.rindex(b"\xff\xda")
    return image[:last] + image[last:-2] * count + image[-2:]


def with_film(image: bytes) -> bytes:
    """What phones append to a photo: bytes that look like the starts of many scans."""
    return image + b"\xff\xda\0\0" * 5_000


# TIFF and EXIF


def tiff(tags: list[tuple[int, int, int, int]], tail: bytes = b"", start: bytes = b"II*\0") -> bytes:
    """A TIFF of one directory of (tag, type, count, value) and bytes after it, at 14 + 12 · tags."""
    rows = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return start + struct.pack("<IH", 8, len(tags)) + rows + bytes(4) + tail


def after(tags: int) -> int:
    return 14 + 12 * tags


def sized(width: int, height: int, *more: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """Tags of an uncompressed grey image."""
    fixed = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    replaced = {tag[0] for tag in more}
    return sorted([tag for tag in fixed if tag[0] not in replaced] + list(more))


def overlapping(tags: int = 900, size: int = 1 << 20) -> bytes:
    """Tags that all have the same megabyte as their value."""
    return tiff([(1000 + i, 7, size, after(tags)) for i in range(tags)], bytes(size))


def many_strips(strips: int, rows: int, width: int = 1000, height: int = 1001) -> bytes:
    tags = sized(width, height, (273, 4, strips, after(8)), (278, 4, 1, rows), (279, 4, 1, width * rows))
    return tiff(tags, struct.pack("<I", 8) * strips + bytes(width * height))


def one_strip(*more: tuple[int, int, int, int]) -> bytes:
    tags = sized(40, 30, (273, 4, 1, after(7 + len(more))), (279, 4, 1, 1200), *more)
    return tiff(tags, bytes(1200))


def big_tiff(rows: int) -> bytes:
    return b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, rows) + struct.pack("<HHQQ", 1, 7, 2**62, 0) * 2_000


def own_exif() -> bytes:
    """EXIF whose directory is the image's own."""
    return one_strip((34665, 4, 1, 8), (34853, 4, 1, 8))


def tiff_of_jpeg() -> bytes:
    """One strip, a JPEG of 5,000 scans."""
    strip = scans(5_000, 1000, 1000)
    more = [(259, 3, 1, 7), (273, 4, 1, after(9)), (278, 4, 1, 1000), (279, 4, 1, len(strip))]
    bits = after(9) + len(strip)
    tags = sized(1000, 1000, *more, (258, 3, 3, bits), (262, 3, 1, 6), (277, 3, 1, 3))
    return tiff([*tags, (284, 3, 1, 1)], strip + struct.pack("<HHH", 8, 8, 8))


# PNG


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int = 40,
    height: int = 30,
    bits: int = 8,
    colour: int = 0,
    *,
    more: bytes = b"",
    interlace: int = 0,
):
    """A PNG of zeros, with chunks before its data."""
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlace)
    depth = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour] * bits
    lines = bytes((1 + -(-width * depth // 8)) * height) if width * height <= 64_000_000 else b""
    data = chunk(b"IDAT", zlib.compress(lines, 1))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + data + chunk(b"IEND")


def packed(kind: bytes, size: int) -> bytes:
    name = {b"iCCP": b"p\0\0", b"zTXt": b"t\0\0", b"iTXt": b"t\0\1\0\0\0"}[kind]
    return chunk(kind, name + zlib.compress(bytes(size), 9))


def palette_png() -> bytes:
    """8,000 × 8,000 pixels in 8 kB, transparent."""
    colours = chunk(b"PLTE", bytes(6)) + chunk(b"tRNS", b"\x80")
    return png(8_000, 8_000, 1, 3, more=colours)


def raw_exif() -> bytes:
    hexadecimal = overlapping(900, 1 << 18).hex().encode()
    text = b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n  1\n" + hexadecimal)
    return png(more=chunk(b"zTXt", text))


def animated(format: str, frames: int) -> bytes:
    images = [Image.new("L", (8, 8), i % 256) for i in range(frames)]
    return encoded(images[0], format, save_all=True, append_images=images[1:], duration=20)


# GIF, BMP and WebP


def gif(before: bytes = b"", width: int = 40, height: int = 30, frame: tuple[int, int] = (40, 30)) -> bytes:
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return head + before + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x4c\x01\0;"


def blocks(size: int) -> bytes:
    return (b"\xff" + bytes(255)) * (size // 256) + b"\0"


def bmp(width: int, height: int, compression: int, data: bytes, bits: int = 8, colours: int = 1) -> bytes:
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, colours, 0)
    return b"BM" + struct.pack("<IHHI", 58 + len(data), 0, 0, 58) + sizes + bytes(4) + data


def riff(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def riff_chunk(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def webp_canvas(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    picture = encoded(grey(), "WEBP")[12:]
    animation = riff_chunk(b"ANMF", bytes(6) + b"\x27\0\0\x1d\0\0" + bytes(4) + picture)
    loops = riff_chunk(b"ANIM", bytes(6))
    return riff(riff_chunk(b"VP8X", b"\x02\0\0\0" + size), loops, animation)


def webp_with_exif(exif: bytes) -> bytes:
    return encoded(grey(), "WEBP", exif=b"Exif\0\0" + exif)


def jpeg2000(width: int) -> bytes:
    """A few hundred bytes, since every pixel is equal."""
    data = bytearray(encoded(grey(64, 64, "L"), "JPEG2000", no_jp2=True))
    struct.pack_into(">II", data, 8, width, width)
    return bytes(data)


_TOO_LARGE, _SEGMENTS, _TAGS = "exceeds max_pixels", "segments", "tags that overlap"

# Name → how to make it, and a part of the reason why it is refused; DECODES: it is usable within the limits.
HOSTILE_IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "jpeg of 10,000 scans": (lambda: scans(10_000, 4_000, 4_000), "64 scans"),
    "jpeg of 200 scans": (lambda: scans(200, 64, 64), "100 scans"),
    "jpeg of 40 scans of 48 megapixels": (lambda: scans(40, 8_000, 6_000), "21 scans"),
    "jpeg that repeats a sequential scan": (lambda: scans(3_000, 512, 512, progressive=False), "100 scans"),
    "progressive jpeg of 24 megapixels": (lambda: scans(1, 6_000, 4_000), DECODES),
    "jpeg with a film after it": (lambda: with_film(scans(1, 64, 64)), DECODES),
    "jpeg of 500,000 comments": (lambda: with_segments(segment(0xFE, b"") * 500_000), _SEGMENTS),
    "jpeg of 5,000 tables between scans": (
        lambda: with_film(scans(1, 64, 64)[:-2] + segment(0xFE, b"") * 5_000),
        _SEGMENTS,
    ),
    "jpeg with 4 MB of 0xFF": (lambda: with_segments(b"\xff" * (4 << 20)), "between its segments"),
    "jpeg with 4 MB of zeros": (lambda: with_segments(bytes(4 << 20)), "between its segments"),
    "jpeg whose exif tags overlap": (
        lambda: with_segments(b"".join(_exif_segments(overlapping()))),
        _TAGS,
    ),
    "jpeg of Photoshop resources": (
        lambda: with_segments(segment(0xED, b"Photoshop 3.0\0" + b"8BIM\0\1\0\0\0\0\0\0" * 5_000) * 50),
        "Photoshop",
    ),
    "jpeg of 65,000 × 65,000": (lambda: _resized_jpeg(65_000), _TOO_LARGE),
    "jpeg cut in its first scan": (lambda: scans(10_000, 4_000, 4_000)[:700], "JPEG"),
    "png of 300,000 empty parts": (lambda: png(more=chunk(b"IDAT") * 300_000), "chunks"),
    "png of 300,000 texts": (lambda: png(more=chunk(b"tEXt", b"a\0b") * 300_000), "chunks"),
    "png of 1,000 profiles of a megabyte": (lambda: png(more=packed(b"iCCP", 1 << 20) * 1_000), "profiles"),
    "png with a text of 100 MB": (lambda: png(more=packed(b"zTXt", 100 << 20)), "PNG"),
    "png with an international text of 100 MB": (lambda: png(more=packed(b"iTXt", 100 << 20)), "PNG"),
    "png with a profile of 100 MB": (lambda: png(more=packed(b"iCCP", 100 << 20)), "PNG"),
    "png whose exif tags overlap": (lambda: png(more=chunk(b"eXIf", overlapping())), _TAGS),
    "png with raw exif whose tags overlap": (raw_exif, DECODES),
    "png of 2³¹ × 2³¹": (lambda: png(2**31 - 1, 2**31 - 1), _TOO_LARGE),
    "transparent png of 64 megapixels in 8 kB": (palette_png, DECODES),
    "interlaced png cut in its first pass": (lambda: png(4_000, 4_000, 1, interlace=1), "truncated PNG"),
    "16-bit png of 16 megapixels": (lambda: png(4_000, 4_000, 16), DECODES),
    "animated png of 500 frames": (lambda: animated("PNG", 500), DECODES),
    "gif with a comment of 8 MB": (lambda: gif(b"!\xfe" + blocks(8 << 20)), "before its first frame"),
    "gif of 400,000 comments": (lambda: gif(b"!\xfe\x01a\0" * 400_000), "before its first frame"),
    "gif with 4 MB of zeros": (lambda: gif(bytes(4 << 20)), "before its first frame"),
    "gif of 65,535 × 65,535": (lambda: gif(width=65_535, height=65_535), _TOO_LARGE),
    "gif whose frame is larger than it": (lambda: gif(frame=(65_535, 65_535)), _TOO_LARGE),
    "gif of 500 frames": (lambda: animated("GIF", 500), DECODES),
    "bmp that skips 255 rows of 8 million": (lambda: bmp(8_000_000, 8, 1, b"\0\2\0\xff" * 9), "BMP"),
    "bmp of one row of 64 million": (lambda: bmp(64_000_000, 1, 1, b"\0\0" * 9), "BMP"),
    "bmp of 20 million runs": (lambda: bmp(4_000, 3_000, 1, b"\1\0" * 10_000_000), "BMP"),
    "bmp of 4 billion colours": (lambda: bmp(40, 30, 0, bytes(1200), colours=2**32 - 1), "damaged BMP"),
    "bmp of 2³¹ × 2³¹": (lambda: bmp(2**31 - 1, 2**31 - 1, 0, b"", 24), _TOO_LARGE),
    "webp animation of 16,383 × 16,383": (lambda: webp_canvas(16_383, 16_383), _TOO_LARGE),
    "webp animation of 2²⁴ × 2²⁴": (lambda: webp_canvas(2**24, 2**24), _TOO_LARGE),
    "webp animation of 500 frames": (lambda: animated("WEBP", 500), DECODES),
    "webp whose exif tags overlap": (lambda: webp_with_exif(overlapping()), DECODES),
    "tiff whose tags overlap": (overlapping, _TAGS),
    "tiff of 60,000 tags": (lambda: tiff([(i, 3, 1, 1) for i in range(60_000)]), "1,000 TIFF or EXIF tags"),
    "tiff of 2⁶⁰ tags": (lambda: big_tiff(2**60), "TIFF or EXIF tags"),
    "tiff with tiles of 32,768 × 32,768": (
        lambda: one_strip((259, 3, 1, 5), (322, 4, 1, 1 << 15), (323, 4, 1, 1 << 15)),
        "tiles of 32,768 x 32,768",
    ),
    "tiff of 90,000 strips over each other": (lambda: many_strips(90_000, 1_000), "overlap"),
    "tiff of 500,000 strips": (lambda: many_strips(500_000, 1), "100,000 strips"),
    "tiff whose exif is itself": (own_exif, DECODES),
    "tiff of 2³¹ × 2³¹": (lambda: tiff(sized(2**31, 2**31, (273, 4, 1, 8))), _TOO_LARGE),
    "tiff with a jpeg of 5,000 scans": (tiff_of_jpeg, "progressive"),
    "avif": (lambda: encoded(grey(), "AVIF"), "an AVIF image; allow it with --data.formats avif"),
    "jpeg 2000 of 7,000 × 7,000": (lambda: jpeg2000(7_000), "a JPEG2000 image; allow it with"),
    "ppm in text": (lambda: b"P3 8000 8000 255\n" + b"1 " * 100_000, "a PPM image; allow it with"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n{ } loop", "not an image"),
    "svg of a billion": (lambda: b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a "aa">]><svg/>', "web page"),
}


def _exif_segments(exif: bytes) -> list[bytes]:
    """EXIF in as many segments as it needs; Pillow joins them."""
    return [segment(0xE1, b"Exif\0\0" + exif[at : at + 65_000]) for at in range(0, len(exif), 65_000)]


def _resized_jpeg(side: int) -> bytes:
    data = bytearray(encoded(grey(), "JPEG"))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, side, side)
    return bytes(data)


def main(names: list[str]) -> None:
    """Print name, reason and CPU seconds of each as JSON; an image over the limits ends the process."""
    from fastclip.data.images import UnusableSample, thumbnail, upright_rgb

    made = {name: HOSTILE_IMAGES[name][0]() for name in names or HOSTILE_IMAGES}
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY + sum(map(len, made.values())),) * 2)
    for name, data in made.items():
        before = _cpu_seconds()
        soft = int(before) + CPU_SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        reason = DECODES
        try:
            upright_rgb(data)
            thumbnail(data, 64)
        except UnusableSample as error:
            reason = str(error)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps([name, reason, round(_cpu_seconds() - before, 2), peak]), flush=True)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])
