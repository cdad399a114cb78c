"""A collection's decoded images, cached as uint8 in memory that all processes share.

The cache is a memory-mapped file: one copy for all ranks and their loader workers, reused by the next run.
For small collections on CPUs, where decoding would take longer than training.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
import PIL

from fastclip.checked_files import (
    SMALL,
    CheckedFile,
    CheckedWriter,
    DamagedFile,
    checked,
    open_or_build,
    set_aside,
    write_checked,
)
from fastclip.data.images import UnusableSample, upright_rgb
from fastclip.data.manifest import Manifest
from fastclip.data.readers import UNUSABLE
from fastclip.data.rows import IN_FILE, Place
from fastclip.files import cache_folder, parallel_map

log = logging.getLogger(__name__)
PLACE = np.dtype([("offset", "<u8"), ("height", "<u4"), ("width", "<u4")])  # height 0: could not be decoded
VERSION = 3  # increased when the same file gives other pixels, or is stored otherwise
_CHUNK = 256
_ROWS = 1 << 16  # of the manifest, looked up at a time
Limits = tuple[int, Sequence[str]]  # max_pixels and formats of `upright_rgb`
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

    def __init__(self, folder: Path, manifest: Manifest, max_pixels: int, formats: Sequence[str] = ()):
        self.folder, self._manifest, self._limits = folder, manifest, (max_pixels, formats)
        self._places = CheckedFile(folder / "places.bin", size=len(manifest) * PLACE.itemsize)
        self._pixels = CheckedFile(folder / "pixels.bin")
        self._reasons: dict[str, str] = json.loads(checked(folder / "bad.json").read_text())
        self._damaged = False

    @classmethod
    def open(
        cls,
        manifest: Manifest,
        max_pixels: int,
        formats: Sequence[str] = (),
        *,
        jobs: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        chunk: int = _CHUNK,
        memory: Callable[[], float] = free_memory,
    ) -> DecodedCache:
        """Decode the collection if it is not in the cache; CacheTooLarge if it would not fit into memory.

        Args:
            max_pixels: as in `upright_rgb`, as are `formats`.
            progress: called as progress(done, total) while images are decoded, and as progress(0, 0) every
                second while another process does it.
            chunk: images that a process decodes at a time.
            memory: returns the bytes that may be used.
        """
        folder = cache_folder("decoded") / _key(manifest, limits := (max_pixels, formats))

        def open() -> DecodedCache:
            cache = cls(folder, manifest, *limits)
            cache._places.check_whole(SMALL)
            cache._pixels.check_whole(SMALL)
            return cache

        def build(part: Path) -> None:
            _check_fits(manifest, limits, min(memory(), shutil.disk_usage(folder.parent).free))
            _build(part, manifest, limits, jobs or os.cpu_count() or 1, progress, chunk)

        waiting = partial(progress, 0, 0) if progress else None
        return open_or_build(folder, open, is_current=lambda cache: True, build=build, waiting=waiting)

    def __reduce__(self):
        """Pickle the paths alone: the receiving process maps the files itself."""
        return DecodedCache, (self.folder, self._manifest, *self._limits)

    def image(self, sample: int) -> np.ndarray:
        """Height × width × 3; decoded again if its part of the cache is damaged."""
        try:
            return self._cached(sample)
        except DamagedFile as error:
            self._set_aside(error)
        image = upright_rgb(self._manifest.image_at(self._manifest.place(sample)), *self._limits)
        return np.asarray(image)

    def _cached(self, sample: int) -> np.ndarray:
        place = self._places.read(sample * PLACE.itemsize, PLACE.itemsize)
        offset, height, width = place.view(PLACE)[0].item()
        if not height:
            raise UnusableSample(self._reasons[str(sample)])
        return self._pixels.read(offset, height * width * 3).reshape(height, width, 3)

    def _set_aside(self, error: DamagedFile) -> None:
        if not self._damaged:
            self._damaged = True
            log.warning(
                "%s These images are decoded in every epoch; the next run builds the cache again.", error
            )
            set_aside(self.folder, self._places)


def _key(manifest: Manifest, limits: Limits) -> str:
    """A digest of everything the pixels depend on: all files with their times, the limits and Pillow."""
    inputs = [VERSION, manifest.fingerprint, manifest.stamps, *limits, PIL.__version__]
    digest = blake2b(json.dumps(inputs).encode(), digest_size=16)
    for start in range(0, len(manifest), _ROWS):
        rows = manifest.find(np.arange(start, min(start + _ROWS, len(manifest))))
        for row in rows[rows["kind"] == IN_FILE]:
            path = manifest.path_of(Place(*row.item()))
            if os.path.exists(path):
                digest.update(str(os.stat(path).st_mtime_ns).encode())
    return digest.hexdigest()


def _check_fits(manifest: Manifest, limits: Limits, free: float) -> None:
    some = np.linspace(0, len(manifest) - 1, min(64, len(manifest))).astype(int).tolist()
    sizes = [len(pixels) for _, _, pixels, _ in _decode_chunk(manifest, limits, some)]
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
    limits: Limits,
    jobs: int,
    progress: Callable[[int, int], None] | None,
    chunk: int,
) -> None:
    n, offset, reasons = len(manifest), 0, {}
    places = np.zeros(n, dtype=PLACE)
    chunks = (range(i, min(i + chunk, n)) for i in range(0, n, chunk))
    decoded = parallel_map(partial(_decode_chunk, manifest, limits), chunks, jobs)
    with CheckedWriter(part / "pixels.bin") as file:
        for sample, shape, pixels, reason in chain.from_iterable(decoded):
            places[sample] = (offset, *shape)
            offset += file.write(pixels)
            if reason:
                reasons[sample] = reason
            if progress and (sample + 1) % chunk == 0:
                progress(sample + 1, n)
    with CheckedWriter(part / "places.bin") as file:
        file.write(places.tobytes())
    write_checked(part / "bad.json", json.dumps(reasons))


def _decode_chunk(manifest: Manifest, limits: Limits, samples: Iterable[int]) -> list[Decoded]:
    decoded: list[Decoded] = []
    for sample in samples:
        try:
            image = upright_rgb(manifest.image_at(manifest.place(sample)), *limits)
            decoded.append((sample, (image.height, image.width), image.tobytes(), ""))
        except UNUSABLE as error:
            decoded.append((sample, (0, 0), b"", str(error)))
    return decoded
