"""Files with digests: damage is noticed before a byte of it is used, without reading all of a large file.

FILE.xxh3 holds a digest of each 64 KiB of FILE and one of its length. It needs no digest of its own: damage
there looks like damage of the file.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TypeVar
from weakref import finalize

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from fastclip.errors import PathError
from fastclip.files import atomic_folder, build_lock, sync

log = logging.getLogger(__name__)
CHUNK = 1 << 16  # bytes per digest: few enough to check what one random read needs
SMALL = 1 << 26  # bytes of a file that is checked whole when its cache is opened, in about 10 ms
Cache = TypeVar("Cache")


class DamagedFile(PathError):
    """A file of a cache whose bytes are not those that were written.

    A loader worker's error is rebuilt from its message alone, so `problem` may be empty.
    """

    def __init__(self, path: str | PathLike[str], problem: str = ""):
        super().__init__(path, problem)
        self.args = (str(self).strip(),)


class CheckedWriter:
    """Writes a file and its digests, of the bytes as they are in memory."""

    def __init__(self, path: Path):
        self.path, self.size = path, 0
        self._file = path.open("wb")
        self._digests: list[int] = []
        self._digest, self._filled = xxh3_64(), 0

    def write(self, data: bytes) -> int:
        """Append bytes; returns how many."""
        rest = memoryview(data)
        while length := min(len(rest), CHUNK - self._filled):
            self._digest.update(rest[:length])
            self._filled += length
            rest = rest[length:]
            if self._filled == CHUNK:
                self._end_chunk()
        self.size += len(data)
        return self._file.write(data)

    def close(self) -> None:
        """Write the digests."""
        if self._filled:
            self._end_chunk()
        self._file.close()
        digests = np.array([*self._digests, _length_digest(self.size)], dtype="<u8")
        digests_of(self.path).write_bytes(digests.tobytes())

    def __enter__(self) -> CheckedWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()

    def _end_chunk(self) -> None:
        self._digests.append(self._digest.intdigest())
        self._digest.reset()
        self._filled = 0


class CheckedFile:
    """A memory-mapped file; each 64 KiB are checked when this process first reads them.

    Opening it reads nothing but the lengths. Every method raises DamagedFile.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.path = path
        try:
            self.size = path.stat().st_size
            self.data = np.memmap(path, mode="r") if self.size else np.zeros(0, np.uint8)
            self._digests = np.memmap(digests_of(path), dtype="<u8", mode="r")
            self._descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise DamagedFile(path, f"is damaged: {error.filename} is missing.") from None
        except ValueError:  # numpy: digests that are empty, or no whole number of them
            raise DamagedFile(path, "is damaged: its digests are cut off.") from None
        finalize(self, os.close, self._descriptor)
        chunks = -(-self.size // CHUNK)
        length_known = len(self._digests) == chunks + 1 and self._digests[-1] == _length_digest(self.size)
        if not length_known or (size is not None and size != self.size):
            raise DamagedFile(path, f"is damaged: it has {self.size:,} bytes, which is not its length.")
        self._checked = bytearray(chunks)
        self._flags = np.frombuffer(self._checked, dtype=np.uint8)  # the same memory, for many at a time

    def read(self, start: int, size: int) -> np.ndarray:
        """These bytes, checked, without a copy."""
        chunks = range(start // CHUNK, -(-(start + size) // CHUNK))
        if 0 in self._checked[chunks.start : chunks.stop]:
            for chunk in chunks:
                self._check(chunk)
        return self.data[start : start + size]

    def check_places(self, places: np.ndarray, size: int) -> None:
        """Check the records with these numbers, of `size` bytes each; a power of two up to 64 KiB."""
        chunks = places // (CHUNK // size)
        if not self._flags.take(chunks).all():
            for chunk in np.unique(chunks[self._flags[chunks] == 0]).tolist():
                self._check(chunk)

    def check_whole(self, most: float = float("inf")) -> None:
        """Check everything, unless the file has more than `most` bytes."""
        if self.size <= most:
            self.read(0, self.size)

    def is_in_place(self) -> bool:
        """Whether this file, and not a later one, is still found under its path."""
        return self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._descriptor))

    def _check(self, chunk: int) -> None:
        if self._checked[chunk]:
            return
        start = chunk * CHUNK
        try:
            data = os.pread(self._descriptor, CHUNK, start)  # when mapped, a bad sector kills the process
        except OSError as error:
            raise DamagedFile(
                self.path, f"cannot be read from byte {start:,} on: {error.strerror}."
            ) from None
        if xxh3_64_intdigest(data) != self._digests[chunk]:
            raise DamagedFile(self.path, f"is damaged in the {CHUNK >> 10} KiB from byte {start:,} on.")
        self._checked[chunk] = 1


def digests_of(path: Path) -> Path:
    """The file with the digests of a file."""
    return path.with_name(path.name + ".xxh3")


def write_checked(path: Path, text: str) -> None:
    """Write a text file with its digests."""
    with CheckedWriter(path) as file:
        file.write(text.encode())


def checked(path: Path) -> Path:
    """The path of a file, all of which has been checked."""
    CheckedFile(path).check_whole()
    return path


def publish(part: Path, path: Path) -> None:
    """Rename a file that was written with its digests; it appears last, and complete."""
    for written, place in ((digests_of(part), digests_of(path)), (part, path)):
        sync(written)
        written.replace(place)


def open_or_build(
    folder: Path,
    open: Callable[[], Cache],
    is_current: Callable[[Cache], bool],
    build: Callable[[Path], None],
    waiting: Callable[[], None] | None = None,
) -> Cache:
    """Open a cache; build it first if there is none, or if it is outdated or damaged.

    Several processes may call this at the same time: one builds, the others wait, and call `waiting` every
    second.
    """
    with build_lock(folder, waiting):
        cache = open_current(folder, open, is_current)
        if cache is None:
            build_anew(folder, build)
            cache = open()
        return cache


def open_current(
    folder: Path, open: Callable[[], Cache], is_current: Callable[[Cache], bool]
) -> Cache | None:
    """Open a cache whose lock is held; None if there is none, or if it is outdated or damaged."""
    if not folder.exists():
        return None
    try:
        cache = open()
        return cache if is_current(cache) else None
    except DamagedFile as error:
        log.warning("%s The cache is built again.", error)
        _move_aside(folder)
        return None


def build_anew(folder: Path, build: Callable[[Path], None]) -> None:
    """Build a cache whose lock is held: `build` writes into a folder that replaces it."""
    with atomic_folder(folder) as part:
        build(part)
    shutil.rmtree(_aside(folder), ignore_errors=True)


def set_aside(folder: Path, opened: CheckedFile) -> None:
    """Rename a damaged cache, of which a file was opened, so that the next run builds it again.

    Other processes keep what they have mapped. A cache that was built again since then stays.
    """
    with build_lock(folder):
        if opened.is_in_place():
            _move_aside(folder)


def _move_aside(folder: Path) -> None:
    shutil.rmtree(_aside(folder), ignore_errors=True)
    folder.rename(_aside(folder))


def _aside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".damaged")


def _length_digest(size: int) -> int:
    return xxh3_64_intdigest(size.to_bytes(8, "little"))
