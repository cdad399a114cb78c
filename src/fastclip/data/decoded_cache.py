"""A collection's decoded images, cached as uint8 in memory that all processes share.

The cache is a memory-mapped file: one copy for all ranks and their loader workers, reused by the next run.
For small collections on CPUs, where decoding would take longer than training.
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
from fastclip.files import atomic_folder, build_lock, cache_folder, parallel_map

PLACE = np.dtype([("offset", "<u8"), ("height", "<u4"), ("width", "<u4")])  # height 0: could not be decoded
VERSION = 1  # increased when the same file gives other pixels
_CHUNK = 256
Decoded = tuple[int, tuple[int, int], bytes, str]  # id, height and width, pixels, problem


class CacheTooLarge(MemoryError):
    """The decoded images would not fit: `needed` and `free` are bytes."""

    def __init__(self, message: str, needed: float = 0, free: float = 0):
        super().__init__(message)
        self.needed, self.free = needed, free


def free_memory() -> float:
    """Bytes of memory available without swapping; infinite if unknown."""
    try:
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        available = None
    return int(available[1]) * 1024 if available else float("inf")


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
        chunk: int = _CHUNK,
        memory: Callable[[], float] = free_memory,
    ) -> DecodedCache:
        """Decode the collection if it is not in the cache; CacheTooLarge if it would not fit into memory.

        Args:
            progress: called as progress(done, total) while images are decoded.
            chunk: images that a process decodes at a time.
            memory: returns the bytes that may be used.
        """
        folder = cache_folder("decoded") / _key(manifest, max_pixels)
        with build_lock(folder):
            if not folder.exists():
                _check_fits(manifest, max_pixels, min(memory(), shutil.disk_usage(folder.parent).free))
                with atomic_folder(folder) as part:
                    _build(part, manifest, max_pixels, jobs or os.cpu_count() or 1, progress, chunk)
            return cls(folder, len(manifest))

    def __reduce__(self):
        """Pickle the path alone: the receiving process maps the file itself."""
        return DecodedCache, (self.folder, len(self.places))

    def image(self, sample: int) -> np.ndarray:
        """Height × width × 3."""
        offset, height, width = self.places[sample].item()
        if not height:
            raise UnusableSample(self.reasons[str(sample)])
        return self.pixels[offset : offset + height * width * 3].reshape(height, width, 3)


def _key(manifest: Manifest, max_pixels: int) -> str:
    """A digest of everything the pixels depend on: all files with their times, max_pixels and Pillow."""
    inputs = [VERSION, manifest.fingerprint, manifest.stamps, max_pixels, PIL.__version__]
    digest = blake2b(json.dumps(inputs).encode(), digest_size=16)
    for row in manifest.rows[manifest.rows["kind"] == IN_FILE]:
        path = manifest.path_of(Place(*row.item()))
        if os.path.exists(path):
            digest.update(str(os.stat(path).st_mtime_ns).encode())
    return digest.hexdigest()


def _check_fits(manifest: Manifest, max_pixels: int, free: float) -> None:
    some = np.linspace(0, len(manifest) - 1, min(64, len(manifest))).astype(int).tolist()
    sizes = [len(pixels) for _, _, pixels, _ in _decode_chunk(manifest, max_pixels, some)]
    needed = sum(sizes) / len(sizes) * len(manifest)
    if needed > 0.7 * free:
        message = (
            f"The {len(manifest):,} decoded images need about {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free. Decode them in every epoch: --data.keep_decoded false."
        )
        raise CacheTooLarge(message, needed, free)


def _build(
    part: Path,
    manifest: Manifest,
    max_pixels: int,
    jobs: int,
    progress: Callable[[int, int], None] | None,
    chunk: int,
) -> None:
    n, offset, reasons = len(manifest), 0, {}
    places = np.zeros(n, dtype=PLACE)
    chunks = (range(i, min(i + chunk, n)) for i in range(0, n, chunk))
    decoded = parallel_map(partial(_decode_chunk, manifest, max_pixels), chunks, jobs)
    with (part / "pixels.bin").open("wb") as file:
        for sample, shape, pixels, reason in chain.from_iterable(decoded):
            places[sample] = (offset, *shape)
            offset += file.write(pixels)
            if reason:
                reasons[sample] = reason
            if progress and (sample + 1) % chunk == 0:
                progress(sample + 1, n)
        file.write(b"\0")  # an empty file cannot be mapped
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
