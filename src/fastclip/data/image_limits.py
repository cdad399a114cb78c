"""What decoding an image would cost, read from its structure before Pillow sees it.

A size in pixels does not bound the cost: a JPEG may have ten thousand scans, a TIFF's tags may all point at
the same megabytes, a BMP's runs are decoded in Python. Each format has one function here; it returns why a
file costs too much, or None. It is lenient otherwise: damaged files are for Pillow to name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from struct import error as StructError
from struct import iter_unpack, unpack_from
from typing import NamedTuple

import numpy as np

MAX_SCANS = 100  # of a JPEG; encoders write 1 to 18
MAX_PASSES = 16  # over max_pixels: a JPEG of 16 times fewer pixels may have 16 times as many scans
MAX_SEGMENTS = 1_000  # of a JPEG, before its last scan
MAX_CHUNKS = 100_000  # of a PNG; an animation has two per frame
MAX_PACKED = 100  # compressed texts and profiles of a PNG
MAX_HEADER = 1 << 20  # bytes before a GIF's first frame, and of padding in a JPEG
MAX_TAGS = 1_000  # of a TIFF or of EXIF
MAX_STRIPS = 100_000  # strips or tiles of a TIFF
MAX_RUNS = 16_000_000  # pixels and bytes of a run-length encoded BMP, which Pillow decodes in Python


def excess(data: bytes, max_pixels: int) -> str | None:
    """Why decoding this file would cost too much; None if it would not, or if its format is another."""
    check = next((check for start, check in _CHECKS if data.startswith(start)), None)
    try:
        return check(data, max_pixels) if check else None
    except (StructError, IndexError, OverflowError):  # it ends early
        return None


def _jpeg(data: bytes, max_pixels: int) -> str | None:
    """Segments, padding, EXIF and scans. Pillow reads everything up to the first scan in Python."""
    position, segments, padding, pixels, exif = 2, 0, 0, 0, b""
    components, one_scan = 0, False
    while found := _MARKER.search(data, position):
        padding, segments, marker = padding + found.start() - position, segments + 1, found[0][1]
        position = found.end()
        if segments > MAX_SEGMENTS:
            return f"a JPEG of more than {MAX_SEGMENTS:,} segments"
        if padding > MAX_HEADER:
            return f"a JPEG with more than {MAX_HEADER:,} bytes between its segments"
        if marker in _ALONE:
            continue
        (length,) = unpack_from(">H", data, position)
        if marker == _SOS:
            one_scan = one_scan and data[position + 2] == components
            break
        if marker in _SOF:
            height, width, components = unpack_from(">HHB", data, position + 3)
            pixels, one_scan = max(pixels, width * height), marker in _SEQUENTIAL
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", position + 2):
            exif += data[position + 8 : position + length]  # Pillow joins them
        position += length
    if data.count(b"8BIM", 0, position) > 10 * MAX_SEGMENTS:
        return "a JPEG with too many Photoshop resources"
    if one_scan:  # sequential, and all components are in this scan: libjpeg reads no further
        return excess_tags(exif)
    return excess_tags(exif) or _excess_scans(data, position - 2, pixels, max_pixels)


def _excess_scans(data: bytes, first: int, pixels: int, max_pixels: int) -> str | None:
    """Scans from `first` on, the position of the first one's marker."""
    allowed = min(MAX_SCANS, MAX_PASSES * max_pixels // max(1, pixels))
    # An upper bound, enough for nearly every file, in a seventh of the time of bytes.count
    bytes_n = np.frombuffer(data, np.uint8)
    after = np.flatnonzero(bytes_n[1:] == _SOS)
    if np.count_nonzero(bytes_n[after] == 0xFF) <= allowed:
        return None
    scans, segments = 0, 0
    for found in _markers(data, first):
        scans, segments = scans + (found == _SOS), segments + 1
        if scans > allowed:
            return f"a JPEG of more than {allowed} scans for its {pixels:,} pixels"
        if segments > MAX_SEGMENTS:
            return f"a JPEG of more than {MAX_SEGMENTS:,} segments"
    return None


def _markers(data: bytes, position: int) -> Iterator[int]:
    """Markers up to the end of the image; what follows it, such as a second picture, is not decoded."""
    while found := _MARKER.search(data, position):
        marker, position = found[0][1], found.end()
        if marker == 0xD9:
            return
        yield marker
        if marker not in _ALONE:
            position += unpack_from(">H", data, position)[0]


_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # in a scan's data, 0xFF is followed by 0 or RST0 to RST7
_SOS = 0xDA
_SOF = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL = (0xC0, 0xC1, 0xC9)
_ALONE = {0x01, 0xD8, 0xD9}  # without a length


def _png(data: bytes, max_pixels: int) -> str | None:
    """Chunks, which Pillow reads in Python, and those that it decompresses: up to 1 MB each."""
    position, chunks, packed = 8, 0, 0
    while position + 8 <= len(data):
        length, kind = unpack_from(">I4s", data, position)
        position, chunks = position + 12 + length, chunks + 1
        packed += kind in (b"iCCP", b"zTXt", b"iTXt")
        if chunks > MAX_CHUNKS:
            return f"a PNG of more than {MAX_CHUNKS:,} chunks"
        if packed > MAX_PACKED:
            return f"a PNG with more than {MAX_PACKED} compressed texts or profiles"
        if kind == b"eXIf" and (reason := excess_tags(data[position - 4 - length : position - 4])):
            return reason
    return None


def _webp(data: bytes, max_pixels: int) -> str | None:
    """The canvas of an animation or of transparency: libwebp allocates it when the file is opened."""
    if data[12:16] != b"VP8X":
        return None  # at most 16,383 pixels on each side, and nothing is allocated
    width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
    return too_large(width, height, max_pixels)


def _gif(data: bytes, max_pixels: int) -> str | None:
    """Extensions before the first frame: Pillow joins comments in quadratic time."""
    flags = data[10]
    position = start = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while position - start <= MAX_HEADER:
        if data[position : position + 1] == b"!":
            position += 2
            while size := data[position]:
                position += 1 + size
        elif data[position : position + 1] in (b",", b";", b""):
            return None
        position += 1
    return f"a GIF with more than {MAX_HEADER:,} bytes before its first frame"


def _bmp(data: bytes, max_pixels: int) -> str | None:
    """Runs; one of them may skip 255 rows, which Pillow fills one by one."""
    (header,) = unpack_from("<I", data, 14)
    if header < 40:
        return None
    width, height, _, _, compression = unpack_from("<iiHHI", data, 18)
    pixels = abs(width * height)
    if compression in (1, 2) and (pixels + len(data) > MAX_RUNS or abs(width) > 2**16):
        return f"a run-length encoded BMP of {abs(width):,} x {abs(height):,} px"
    return None


class _Tag(NamedTuple):
    """A row of a TIFF directory."""

    name: int
    values: int  # how many
    size: int  # bytes of its values
    first: int  # its first value, or the position of its values


def _tiff(data: bytes, max_pixels: int) -> str | None:
    """Tags, tiles, and how much of the image they cover together; progressive JPEGs inside."""
    if reason := excess_tags(data):
        return reason
    tags = {tag.name: tag for tag in _directory(data, _first_directory(data))}
    strips = max((tags[name].values for name in _STRIPS if name in tags), default=0)
    if strips > MAX_STRIPS:
        return f"a TIFF of more than {MAX_STRIPS:,} strips or tiles"

    def value(name: int, default: int) -> int:
        return tags[name].first if name in tags else default

    width, height = value(_WIDTH, 0), value(_HEIGHT, 0)
    if reason := too_large(width, height, max_pixels):
        return reason
    tile_width = value(_TILE_WIDTH, width)
    tile_height = value(_TILE_HEIGHT, min(height, value(_ROWS, height)))
    if tile_width * tile_height > max(max_pixels, 1 << 20):
        return f"a TIFF with tiles of {tile_width:,} x {tile_height:,} px"
    if strips * min(tile_width, width) * min(tile_height, height) > MAX_PASSES * max_pixels:
        return f"a TIFF of {strips:,} strips or tiles that overlap"
    if value(_COMPRESSION, 1) in (6, 7) and _PROGRESSIVE.search(data):
        return "a TIFF of progressive JPEGs"
    return None


def excess_tags(data: bytes) -> str | None:
    """Too many tags of a TIFF or of EXIF, or values that overlap: Pillow copies each tag's."""
    if not data.startswith(_TIFF_STARTS):
        return None
    seen, left, count, size = set[int](), [_first_directory(data)], 0, 0
    while left:
        if (offset := left.pop()) in seen:
            continue
        seen.add(offset)
        for tag in _directory(data, offset):
            count, size = count + 1, size + tag.size
            if count > MAX_TAGS:
                return f"more than {MAX_TAGS:,} TIFF or EXIF tags"
            if size > 2 * len(data) + MAX_HEADER:
                return "TIFF or EXIF tags that overlap"
            if tag.name in _DIRECTORIES:
                left.append(tag.first)
    return None


def _first_directory(data: bytes) -> int:
    order = "<" if data[:1] == b"I" else ">"
    return unpack_from(order + "Q", data, 8)[0] if _is_big(data) else unpack_from(order + "I", data, 4)[0]


def _directory(data: bytes, offset: int) -> Iterator[_Tag]:
    """The tags at this offset, as far as there are any."""
    order = "<" if data[:1] == b"I" else ">"
    big = _is_big(data)
    head, row = ("Q", "HHQ8s") if big else ("H", "HHI4s")
    if offset < 0 or offset + (8 if big else 2) > len(data):
        return
    (rows,) = unpack_from(order + head, data, offset)
    start, width = (offset + 8, 20) if big else (offset + 2, 12)
    rows = min(rows, (len(data) - start) // width, MAX_TAGS + 1)
    for name, kind, count, value in iter_unpack(order + row, data[start : start + rows * width]):
        unit = _UNITS.get(kind, 0)
        short = unit == 2 and count == 1
        (first,) = unpack_from(order + ("H" if short else "Q" if big else "I"), value)
        size = unit * count if unit * count > 4 else 0  # up to 4 bytes are in the row itself
        yield _Tag(name, count, min(size, max(0, len(data) - first)), first)


def _is_big(data: bytes) -> bool:
    return data[2:4] in (b"\0+", b"+\0")


_UNITS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}  # bytes
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")
_WIDTH, _HEIGHT, _COMPRESSION, _ROWS, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 259, 278, 322, 323
_STRIPS = (273, 279, 324, 325)  # offsets and lengths of strips and tiles
_PROGRESSIVE = re.compile(rb"\xff[\xc2\xc6\xca\xce]\x00[\x0b\x0e\x11\x14]\x08")  # the frame of a JPEG
_DIRECTORIES = (34665, 34853, 40965)  # EXIF, GPS and interoperability, which Pillow reads too


def too_large(width: int, height: int, max_pixels: int) -> str | None:
    """The same, for a size in pixels."""
    if width * height > max_pixels:
        return f"{width:,} x {height:,} px exceeds max_pixels={max_pixels:,}"
    return None


_CHECKS: list[tuple[bytes | tuple[bytes, ...], Callable[[bytes, int], str | None]]] = [
    (b"\xff\xd8", _jpeg),
    (b"\x89PNG", _png),
    (b"RIFF", _webp),
    (b"GIF8", _gif),
    (b"BM", _bmp),
    (_TIFF_STARTS, _tiff),
]
