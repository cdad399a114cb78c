"""The fingerprint of a collection: a digest of what training reads, by which a resumed run knows its data.

Rule 2: the number of pairs of each file, every caption, and every image if the images have up to 4 GiB, else
a sample of 4,096 that depends on the number of pairs alone. No name, path or time: a copy on another machine
has the same fingerprint. Images that a table names by URL count by their URL.

Rule 1, of earlier versions, read no image: manifests hold it too, to compare it with old checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from fastclip.checked_files import CheckedFile, CheckedWriter
from fastclip.data.rows import IN_PARQUET, Place
from fastclip.files import build_lock, cores

if TYPE_CHECKING:
    from fastclip.data.manifest import Manifest

Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Digest = TypeVar("Digest", bytes, str)
RULE = "2:"
READ_WHOLE = 4 << 30  # bytes of images, all of which are read
_SAMPLE = 4096  # images of a larger collection
_ROW_GROUPS = 64  # of Parquet in the sample: a row group is read whole
_PART = 1024  # images per digest
IMAGES = "images.bin"  # in a manifest's folder: the digest of each part


class Change(NamedTuple):
    """A part of a collection that differs from what was indexed."""

    file: str
    where: str


class Verification(NamedTuple):
    """What reading every caption and image found."""

    changed: list[Change]
    images_were_known: bool
    """False if only a sample had been read before; all are recorded now."""


class CaptionDigest:
    """A digest of captions, in order."""

    def __init__(self) -> None:
        self._digest = xxh3_128()

    def add(self, caption: bytes) -> None:
        self._digest.update(len(caption).to_bytes(8, "little") + caption)

    def hex(self) -> str:
        return self._digest.hexdigest()


def take_fingerprint(manifest: Manifest, progress: Progress | None = None) -> str:
    """The fingerprint of rule 2; reads the images, or a sample of them. `progress` takes (done, total)."""
    if manifest.images_sampled:
        return _fingerprint(manifest, _digest_sample(manifest))
    parts = _digest_parts(manifest, progress)
    _write(manifest.folder / IMAGES, parts)
    return _fingerprint(manifest, parts)


def verify(manifest: Manifest, progress: Progress | None = None) -> Verification:
    """Read every caption and image, and compare them with what was recorded.

    Of a collection whose images were only sampled, the first call records them all for later ones.
    """
    numbers = range(len(manifest.files))
    captions = _in_threads(lambda number: _digest_captions(manifest.reader(), number), numbers, None)
    changed = [
        Change(file, "its captions")
        for file, found, recorded in zip(manifest.files, captions, manifest.captions, strict=True)
        if found != recorded
    ]
    parts, path = _digest_parts(manifest, progress), manifest.folder / IMAGES
    known = path.exists()
    if known:
        size = len(parts[0])
        recorded = CheckedFile(path, size * len(parts)).data.reshape(-1, size)
        for ids, found, part in zip(_parts(manifest), parts, recorded, strict=True):
            if found != part.tobytes():
                file = manifest.files[manifest.place(ids.start).file]
                changed.append(Change(file, f"images of pairs {ids.start:,} to {ids.stop - 1:,}"))
    elif _fingerprint(manifest, _digest_sample(manifest)) != manifest.fingerprint:
        changed.append(Change(manifest.files[0], "a sample of its images, or of a later file's"))
    elif not changed:
        with build_lock(manifest.folder):
            _write(path, parts)
    return Verification(changed, known)


def sample_of(n: int) -> list[int]:
    """The images of a large collection that are read: one at random from each of 4,096 equal ranges."""
    ends = [n * i // _SAMPLE for i in range(_SAMPLE + 1)]
    ranges = [range(start, end) for start, end in pairwise(ends) if end > start]
    return [ids[xxh3_64_intdigest(f"{n} {i}".encode()) % len(ids)] for i, ids in enumerate(ranges)]


def _fingerprint(manifest: Manifest, images: list[bytes]) -> str:
    files = list(zip(manifest.kinds, manifest.file_rows.tolist(), manifest.captions, strict=True))
    return RULE + xxh3_128(json.dumps(files).encode() + b"".join(images)).hexdigest()


def _digest_sample(manifest: Manifest) -> list[bytes]:
    ids = sample_of(len(manifest))
    kinds = manifest.find(np.array(ids))["kind"].tolist()
    every = max(1, len(ids) // _ROW_GROUPS)
    chosen = [one for i, one in enumerate(ids) if kinds[i] != IN_PARQUET or i % every == 0]
    return _in_threads(lambda id_: _digest_images(manifest.reader(), [id_]), chosen, None)


def _digest_parts(manifest: Manifest, progress: Progress | None) -> list[bytes]:
    parts = list(_parts(manifest))
    return _in_threads(lambda ids: _digest_images(manifest.reader(), ids), parts, progress)


def _parts(manifest: Manifest) -> Iterator[range]:
    """Ranges of up to 1,024 pairs of one file."""
    for number in range(len(manifest.files)):
        yield from _parts_of(manifest, number)


def _parts_of(manifest: Manifest, number: int) -> Iterator[range]:
    end = int(manifest.file_ends[number])
    for start in range(end - int(manifest.file_rows[number]), end, _PART):
        yield range(start, min(start + _PART, end))


def _in_threads(
    work: Callable[[Item], Digest], items: Sequence[Item], progress: Progress | None
) -> list[Digest]:
    """Apply `work` to the items; in threads, since most of the time is spent reading."""
    digests: list[Digest] = []
    with ThreadPoolExecutor(2 * cores()) as pool:
        for digest in pool.map(work, items):
            digests.append(digest)
            if progress:
                progress(len(digests), len(items))
    return digests


def _digest_captions(reader: Manifest, number: int) -> str:
    captions = CaptionDigest()
    for ids in _parts_of(reader, number):
        for place in _places(reader, ids):
            captions.add(reader.caption_bytes(place))
    return captions.hex()


def _digest_images(reader: Manifest, ids: Iterable[int]) -> bytes:
    digest = xxh3_128()
    for place in _places(reader, ids):
        image = reader.image_content(place)
        digest.update(len(image).to_bytes(8, "little"))
        digest.update(image)
    return digest.digest()


def _places(reader: Manifest, ids: Iterable[int]) -> Iterator[Place]:
    return (Place(*row.item()) for row in reader.find(np.fromiter(ids, dtype=np.int64)))


def _write(path: Path, parts: list[bytes]) -> None:
    with CheckedWriter(path) as file:
        file.write(b"".join(parts))
