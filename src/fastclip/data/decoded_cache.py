"""A collection's decoded images, kept as uint8 in memory that all processes share.

They live in a memory-mapped file of the cache: one copy for all workers and ranks, there again for the next
run. For small collections on CPUs, where decoding would take longer than training.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
import PIL

from fastclip.data.images import UnusableSample, upright_rgb
from fastclip.data.manifest import IN_FILE, Manifest, Place
from fastclip.data.readers import UNUSABLE
from fastclip.files import atomic_folder, build_lock, cache_folder, in_order

PLACE = np.dtype([("offset", "<u8"), ("height", "<u4"), ("width", "<u4")])  # height 0: could not be decoded
VERSION = 1  # of how images become pixels
_CHUNK = 256
Decoded = tuple[int, tuple[int, int], bytes, str]  # id, height and width, pixels, what is wrong


class DecodedCache:
    """Decoded images by id."""

    def __init__(self, folder: Path, n: int):
        self.folder = folder
        self.places = np.memmap(folder / "places.bin", dtype=PLACE, mode="r", shape=(n,))
        self.pixels = np.memmap(folder / "pixels.bin", dtype=np.uint8, mode="r")
        self.reasons: dict[str, str] = json.loads((folder / "bad.json").read_text())

    @classmethod
    def open(
        cls,
        manifest: Manifest,
        max_pixels: int,
        *,
        jobs: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> DecodedCache:
        """Decode the collection, unless that was done before; refuses one that would not fit into memory."""
        folder = cache_folder("decoded") / _key(manifest, max_pixels)
        with build_lock(folder):
            if not folder.exists():
                _check_fits(manifest, max_pixels, folder.parent)
                with atomic_folder(folder) as part:
                    _build(part, manifest, max_pixels, jobs or os.cpu_count() or 1, progress)
            return cls(folder, len(manifest))

    def __reduce__(self):
        """A process that gets it maps the file anew: no pixels are sent."""
        return DecodedCache, (self.folder, len(self.places))

    def image(self, sample: int) -> np.ndarray:
        """Height × width × 3."""
        offset, height, width = self.places[sample].item()
        if not height:
            raise UnusableSample(self.reasons[str(sample)])
        return self.pixels[offset : offset + height * width * 3].reshape(height, width, 3)


def _key(manifest: Manifest, max_pixels: int) -> str:
    """What the pixels depend on: the files and their times, images in files of their own too, and Pillow."""
    about = [VERSION, manifest.fingerprint, manifest.stamps, max_pixels, PIL.__version__]
    digest = blake2b(json.dumps(about).encode(), digest_size=16)
    for row in manifest.rows[manifest.rows["kind"] == IN_FILE]:
        path = manifest.path_of(Place(*row.item()))
        if os.path.exists(path):
            digest.update(str(os.stat(path).st_mtime_ns).encode())
    return digest.hexdigest()


def _check_fits(manifest: Manifest, max_pixels: int, folder: Path) -> None:
    some = np.linspace(0, len(manifest) - 1, min(64, len(manifest))).astype(int).tolist()
    sizes = [len(pixels) for _, _, pixels, _ in _decode_chunk(manifest, max_pixels, some)]
    needed = sum(sizes) / len(sizes) * len(manifest)
    free = min(_free_memory(), shutil.disk_usage(folder).free)
    if needed > 0.7 * free:
        raise MemoryError(
            f"The {len(manifest):,} decoded images need about {needed / 2**30:.1f} GiB, "
            f"and {free / 2**30:.1f} GiB are free. Train without keeping them decoded."
        )


def _free_memory() -> float:
    """Bytes that could be used without swapping; unknown counts as plenty."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else float("inf")


def _build(
    part: Path, manifest: Manifest, max_pixels: int, jobs: int, progress: Callable[[int, int], None] | None
) -> None:
    n, offset, reasons = len(manifest), 0, {}
    places = np.zeros(n, dtype=PLACE)
    chunks = (range(i, min(i + _CHUNK, n)) for i in range(0, n, _CHUNK))
    decoded = in_order(partial(_decode_chunk, manifest, max_pixels), chunks, jobs)
    with (part / "pixels.bin").open("wb") as file:
        for sample, shape, pixels, reason in chain.from_iterable(decoded):
            places[sample] = (offset, *shape)
            offset += file.write(pixels)
            if reason:
                reasons[sample] = reason
            if progress and (sample + 1) % _CHUNK == 0:
                progress(sample + 1, n)
        file.write(b"\0")  # an empty file could not be mapped
    places.tofile(part / "places.bin")
    (part / "bad.json").write_text(json.dumps(reasons))


def _decode_chunk(manifest: Manifest, max_pixels: int, samples: Iterable[int]) -> list[Decoded]:
    decoded: list[Decoded] = []
    for sample in samples:
        try:
            image = upright_rgb(manifest.image_at(manifest.place(sample)), max_pixels)
            decoded.append((sample, (image.height, image.width), image.tobytes(), ""))
        except UNUSABLE as error:
            decoded.append((sample, (0, 0), b"", str(error)))
    return decoded
