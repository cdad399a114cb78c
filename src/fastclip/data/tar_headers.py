"""Read the headers of a tar in one pass, whatever is in them: its files, and the parts that cannot be read.

A tar is what others wrote. The standard library's reader stops at the first zero block or damaged header,
follows extended headers recursively, and takes sizes as they are. This one reads on at the next header after
any of them, as GNU tar does: a damaged member costs itself alone. Of intact tars both list the same members.
"""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from tarfile import BLOCKSIZE, TarInfo
from typing import BinaryIO, NamedTuple

import numpy as np

DAMAGED = "truncated or damaged tar"
TRAILING = "bytes beyond the end of the tar"
_CHUNK = 1 << 22  # bytes searched at a time; a multiple of BLOCKSIZE
_LONGEST_EXTENSION = 1 << 20  # bytes of an extended header: names and times, not content
_MOST_EXTENSIONS = 64  # extended headers before one member; writers need three
_ZEROS = bytes(BLOCKSIZE)
_PAX, _LONG = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE), tarfile.GNUTYPE_LONGNAME
_EXTENSIONS = (*_PAX, _LONG, tarfile.GNUTYPE_LONGLINK)


class Member(NamedTuple):
    """A file in a tar; as in webdataset, the first dot of its base name ends the key."""

    key: str
    extension: str
    offset: int
    size: int
    header: int
    """The offset of its header."""
    problem: str = ""
    """Why its bytes are not those of a file: it is a link, say."""

    @property
    def plain(self) -> bool:
        return not self.problem


class Damage(NamedTuple):
    """A part of a tar that cannot be read."""

    start: int
    stop: int
    reason: str
    key: str = ""
    """The member that it is in, if that is known."""


class Contents(NamedTuple):
    """What a tar holds."""

    members: list[Member]
    damages: list[Damage]


def read_tar(stream: BinaryIO) -> Contents:
    """Read all headers of a tar from its start."""
    reader = _Reader(stream)
    reader.read()
    return Contents(reader.members, reader.damages)


@dataclass
class _Extended:
    """What extended headers say of the member that follows; of several, the first counts."""

    headers: int = 0
    name: str | None = None
    size: int | None = None
    sparse: bool = False


class _BadHeader(Exception):
    """A header that cannot be used; the search for the next one begins at `stop`."""

    def __init__(self, reason: str, stop: int, key: str = ""):
        super().__init__(reason)
        self.reason, self.stop, self.key = reason, stop, key


@dataclass
class _Reader:
    """Reads headers one after another."""

    stream: BinaryIO
    members: list[Member] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.stream.seek(0, os.SEEK_END)
        self.extended = _Extended()
        self.empty = True  # until the first header
        self.ended = False  # at zeros, since the last header

    def read(self) -> None:
        place = 0
        while place < self.size:
            block = self._read(place, BLOCKSIZE)
            if block == _ZEROS[: len(block)]:
                self.ended |= len(block) == BLOCKSIZE
                place = _first_block(self.stream, place, self.size, _not_zero)
                continue
            try:
                place = self._read_header(block, place)
                self.ended = self.empty = False
            except _BadHeader as bad:
                self.extended = _Extended()
                found = self._next_header(bad.stop)
                beyond = self.ended and not self.empty and found == self.size
                lost = TRAILING if beyond else bad.reason
                self.damages.append(Damage(place, found, lost, bad.key))
                if found == self.size:
                    return
                place, self.ended = found, False
        if self.empty or not self.ended:  # the end of a tar is a block of zeros
            self.damages.append(Damage(0 if self.empty else self.size, self.size, DAMAGED))

    def _read_header(self, block: bytes, place: int) -> int:
        """Add the member of this header, if it is one; where the next header is."""
        after = place + BLOCKSIZE
        info = _parse(block)
        if info is None:
            raise _BadHeader(DAMAGED, after)
        if info.size < 0:
            raise _BadHeader("member of a negative size in a tar", after, info.name)
        if info.type in _EXTENSIONS:
            self._extend(info, after)
            return after + _padded(info.size)
        extended, self.extended = self.extended, _Extended()
        if info.type == tarfile.GNUTYPE_SPARSE:
            after = self._after_sparse_map(block, after)
        size = info.size if extended.size is None else extended.size
        holds_data = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
        stop = after + _padded(size) if holds_data else after
        name = info.name if extended.name is None else extended.name
        if stop > self.size and (found := self._next_header(after)) < self.size:
            self.damages.append(Damage(place, found, "member larger than its tar", name))
            return found
        if not info.isdir():
            self.members.append(_member(name, info, after, size, place, extended.sparse))
        if stop > self.size:
            raise _BadHeader(DAMAGED, self.size)
        return stop

    def _extend(self, info: TarInfo, start: int) -> None:
        """Note what an extended header says."""
        extended = self.extended
        extended.headers += 1
        if start + info.size > self.size:
            raise _BadHeader(DAMAGED, start)
        if info.size > _LONGEST_EXTENSION:
            raise _BadHeader("extended header of more than 1 MiB in a tar", start + _padded(info.size))
        if extended.headers > _MOST_EXTENSIONS:
            reason = f"more than {_MOST_EXTENSIONS} extended headers in a row in a tar"
            raise _BadHeader(reason, self._after_extensions(start))
        content = self._read(start, info.size)
        if info.type == _LONG and extended.name is None:
            extended.name = _text(content.partition(b"\0")[0])
        if info.type not in _PAX:
            return
        records = _pax_records(content)
        if records is None:
            raise _BadHeader("damaged extended header in a tar", start + _padded(info.size))
        name, size = records.get(b"GNU.sparse.name", records.get(b"path")), records.get(b"size")
        if info.type == tarfile.XGLTYPE:
            if name is not None or size is not None:
                raise _BadHeader("one name or size for all members of a tar", start + _padded(info.size))
            return
        if size is not None and not (size.isdigit() and len(size) < 20):
            raise _BadHeader("damaged extended header in a tar", start + _padded(info.size))
        if name is not None and extended.name is None:
            extended.name = _text(name).rstrip("/")
        if size is not None and extended.size is None:
            extended.size = int(size)
        extended.sparse |= any(keyword.startswith(b"GNU.sparse.") for keyword in records)

    def _after_extensions(self, place: int) -> int:
        """The end of a chain of extended headers, the last of which begins before `place`."""
        place -= BLOCKSIZE
        while (info := _parse(self._read(place, BLOCKSIZE))) and info.type in _EXTENSIONS:
            stop = place + BLOCKSIZE + _padded(info.size)
            if not place < stop <= self.size:
                return place + BLOCKSIZE
            place = stop
        return place

    def _after_sparse_map(self, block: bytes, place: int) -> int:
        """Where the data of an old GNU sparse member begin: its map may have further blocks."""
        more = block[482]
        while more:
            block = self._read(place, BLOCKSIZE)
            if len(block) < BLOCKSIZE:
                raise _BadHeader(DAMAGED, self.size)
            more, place = block[504], place + BLOCKSIZE
        return place

    def _next_header(self, start: int) -> int:
        return _first_block(self.stream, start, self.size, _like_header)

    def _read(self, place: int, size: int) -> bytes:
        self.stream.seek(place)
        return self.stream.read(size)


def _member(name: str, info: TarInfo, offset: int, size: int, header: int, sparse: bool) -> Member:
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    problem = ""
    if info.issym() or info.islnk() or sparse or info.type == tarfile.GNUTYPE_SPARSE:
        problem = "a link or a sparse member, not a plain file"
    elif not info.isreg():
        problem = "a FIFO, a device or of an unknown type, not a plain file"
    return Member(folder + slash + stem, extension.lower(), offset, size, header, problem)


def _parse(block: bytes) -> TarInfo | None:
    """The fields of a header; None if its checksum or a number is wrong."""
    try:
        return TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None


def _pax_records(content: bytes) -> dict[bytes, bytes] | None:
    """The records `LENGTH KEYWORD=VALUE\\n` of an extended header; None if one is damaged."""
    records: dict[bytes, bytes] = {}
    place = 0
    while place < len(content) and content[place]:
        length, space, _ = content[place : place + 20].partition(b" ")
        if not space or not length.isdigit() or not len(length) < int(length) <= len(content) - place:
            return None
        record = content[place + len(length) + 1 : place + int(length)]
        keyword, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n"):
            return None
        records[keyword] = value[:-1]
        place += int(length)
    return records


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    """The bytes of whole blocks that hold `size` bytes."""
    return -(-size // BLOCKSIZE) * BLOCKSIZE


# The search for a block


Search = Callable[[np.ndarray], Iterator[int]]


def _first_block(stream: BinaryIO, start: int, size: int, wanted: Search) -> int:
    """The offset of the first block from `start` on that is `wanted`; the file's size if there is none."""
    for offset, blocks in _blocks(stream, start, size):
        for number in wanted(blocks):
            return offset + number * BLOCKSIZE
    return size


def _not_zero(blocks: np.ndarray) -> Iterator[int]:
    yield from np.flatnonzero(blocks.any(axis=1)).tolist()


def _like_header(blocks: np.ndarray) -> Iterator[int]:
    """Blocks with a right checksum; most others are excluded at once: it is not octal there."""
    checksum = blocks[:, 148:154]
    octal = ((checksum >= ord("0")) & (checksum <= ord("7"))) | (checksum == ord(" ")) | (checksum == 0)
    for number in np.flatnonzero(octal.all(axis=1) & (blocks[:, 0] != 0)).tolist():
        if _parse(blocks[number].tobytes()) is not None:
            yield number


def _blocks(stream: BinaryIO, start: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Pieces of a file as arrays of whole blocks, the last filled with zeros; holes are skipped."""
    place = start
    while (place := _next_data(stream, place, size)) < size:
        stream.seek(place)
        data = stream.read(min(_CHUNK, size - place))
        if not data:
            return
        data += bytes(-len(data) % BLOCKSIZE)
        yield place, np.frombuffer(data, np.uint8).reshape(-1, BLOCKSIZE)
        place += len(data)


def _next_data(stream: BinaryIO, place: int, size: int) -> int:
    """The first block from `place` on that is not in a hole: a terabyte of nothing takes no time."""
    try:
        descriptor = stream.fileno()
        position = os.lseek(descriptor, 0, os.SEEK_CUR)  # where the stream believes to be
        try:
            found = os.lseek(descriptor, place, os.SEEK_DATA)
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)
    except OSError as error:
        return size if error.errno == errno.ENXIO else place  # no more data, or holes are unknown
    return max(place, found // BLOCKSIZE * BLOCKSIZE)
