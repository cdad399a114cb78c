"""The index of one file of a collection: the row of each pair, found in one pass over headers and captions.

It is one file in the cache, with digests, and independent of the other files of the collection: file numbers
are 0, and strings count from its start. `merge_indexes` puts the indexes of all files together.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastclip.checked_files import CheckedFile, CheckedWriter, DamagedFile, publish
from fastclip.data.fingerprint import CaptionDigest
from fastclip.data.pairs import Columns, ExtraCaptions, File, Pair, Problem, SourceError, caption_lines
from fastclip.data.plain_files import open_plain
from fastclip.data.readers import ChangedFile, OpenFiles
from fastclip.data.remote import is_remote, local_copy
from fastclip.data.rows import IN_FILE, IN_PARQUET, IN_TAR, ROW, Place
from fastclip.data.sources import read_pairs
from fastclip.data.tables import folder_of
from fastclip.files import temporary_path

_CHUNK = 8192  # pairs held in memory
_END = 1 << 14
_LENGTHS = np.dtype("<u8")


class Record(NamedTuple):
    """Up to 8,192 pairs and problems of a file."""

    content: bytes  # what rule 1 of the fingerprint covers before these rows
    rows: bytes
    strings: bytes
    problems: bytes  # lines of JSON


class Summary(NamedTuple):
    """What was found in a file."""

    pairs: int
    image_bytes: int
    captions: str  # a digest
    problem_counts: dict[str, int]
    extra_captions: tuple[int, int]


def write_index(
    file: File, columns: Columns, path: Path, progress: Callable[[int], None] | None = None
) -> None:
    """Index a file into `path`, which appears complete. `progress` receives how many bytes have been read."""
    part = temporary_path(path)
    try:
        with CheckedWriter(part) as writer:
            indexer = _Indexer(file, columns)
            for record in indexer.records():
                writer.write(np.array([len(piece) for piece in record], _LENGTHS).tobytes())
                for piece in record:
                    writer.write(piece)
                if progress:
                    progress(indexer.position)
            summary = json.dumps(indexer.summary()).encode()
            writer.write(summary + len(summary).to_bytes(8, "little"))
    except Exception:
        part.unlink(missing_ok=True)
        raise
    publish(part, path)


def read_index(path: Path) -> tuple[Summary, Iterator[Record]]:
    """The summary and the records of an index; both raise DamagedFile."""
    file = CheckedFile(path)
    if file.size < 8:
        raise DamagedFile(path, "is damaged: it has no summary.")
    length = int.from_bytes(file.read(file.size - 8, 8).tobytes(), "little")
    end = file.size - 8 - length
    return Summary(*json.loads(file.read(end, length).tobytes())), _read_records(file, end)


def _read_records(file: CheckedFile, end: int) -> Iterator[Record]:
    place, header = 0, len(Record._fields) * _LENGTHS.itemsize
    while place < end:
        lengths = file.read(place, header).view(_LENGTHS).tolist()
        place += header
        pieces = []
        for length in lengths:
            pieces.append(file.read(place, length).tobytes())
            place += length
        yield Record(*pieces)


class _Indexer:
    """Reads a file once, and counts what it finds."""

    def __init__(self, file: File, columns: Columns):
        self.file, self.columns = file, columns
        self.position = 0  # in a tar, of the last image
        self._pairs, self._image_bytes = 0, 0
        self._captions = CaptionDigest()
        self._problem_counts = Counter[str]()
        self._extra_captions = ExtraCaptions()
        self._tar = OpenFiles({file.path: file.version})
        self._sizes = bytearray()  # of images that are files, for rule 1
        self._strings = bytearray()  # those of the current record
        self._strings_before = 0

    def records(self) -> Iterator[Record]:
        content = os.path.basename(self.file.path).encode() + b"\0" + _ends(self.file)
        items, in_parquet = read_pairs(self.file, self.columns), False
        while some := self._read(items):
            problems = [item for item in some if isinstance(item, Problem)]
            rows = [item for item in some if isinstance(item, Place)]
            for problem in problems:
                self._problem_counts[problem.reason.split(" after ")[0]] += problem.pairs
            lines = b"".join(json.dumps(problem._asdict()).encode() + b"\n" for problem in problems)
            in_parquet |= any(row.kind == IN_PARQUET for row in rows)
            self._pairs += len(rows)
            self.position = rows[-1].image if rows and self.file.kind == "tar" else 0
            packed = np.array(rows, dtype=ROW).tobytes()
            yield Record(content + self._sizes, packed, bytes(self._strings), lines)
            self._strings_before += len(self._strings)
            content, self._sizes, self._strings = b"", bytearray(), bytearray()
        if content:  # rule 1 covers the ends of a file without pairs too
            yield Record(content, b"", b"", b"")
        if in_parquet:
            self._image_bytes += os.path.getsize(local_copy(self.file.path, self.file.version))

    def _read(self, items: Iterator[Pair | Problem]) -> list[Place | Problem]:
        """The next pairs as rows, and problems. An error of the disk names the file, as open's errors do."""
        try:
            some = islice(items, _CHUNK)
            return [self._row(item) if isinstance(item, Pair) else item for item in some]
        except ChangedFile as error:
            raise SourceError(self.file.path, f"cannot be indexed: {error}. Run the command again.") from None
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise type(error)(error.errno, error.strerror, self.file.path) from error

    def summary(self) -> Summary:
        captions = self._captions.hex()
        return Summary(self._pairs, self._image_bytes, captions, self._problem_counts, self._extra_captions)

    def _row(self, pair: Pair) -> Place:
        row = self._place(pair)
        if isinstance(pair.caption, str):
            self._captions.add(_utf8(pair.caption))
            self._count_extra(pair.extra_captions)
        else:
            caption = self._tar.read(self.file.path, row.caption_size, row.caption)
            self._captions.add(caption)
            self._count_extra(_extra_lines(caption, self.columns.encoding))
        return row

    def _count_extra(self, captions: int) -> None:
        if captions > 0:
            pairs, total = self._extra_captions
            self._extra_captions = ExtraCaptions(pairs + 1, total + captions)

    def _place(self, pair: Pair) -> Place:
        text = pair.caption
        caption, caption_size = text if isinstance(text, tuple) else self._store(_utf8(text))
        if isinstance(pair.image, tuple):
            self._image_bytes += pair.image[1]
            return Place(0, IN_TAR, *pair.image, caption_size, caption)
        if isinstance(pair.image, str):
            path = os.path.join(folder_of(self.file.path), pair.image)
            size = stat_of(path)[0]
            self._sizes += size.encode()
            self._image_bytes += 0 if is_remote(path) else int(size)
            return Place(0, IN_FILE, *self._store(os.fsencode(pair.image)), caption_size, caption)
        return Place(0, IN_PARQUET, pair.image, 0, caption_size, caption)

    def _store(self, raw: bytes) -> tuple[int, int]:
        start = self._strings_before + len(self._strings)
        self._strings += raw
        return start, len(raw)


def stat_of(path: str) -> list[str]:
    """Size and time of a file."""
    try:
        stat = os.stat(path)
    except OSError:  # a dangling link
        return ["missing"]
    return [str(stat.st_size), str(stat.st_mtime_ns)]


def absolute(path: str) -> str:
    """The absolute path of a local file; the address of a remote one."""
    return path if is_remote(path) else os.path.abspath(path)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _extra_lines(caption: bytes, encoding: str) -> int:
    """The number of captions in a tar's text beyond the first, one per line."""
    return len(caption_lines(caption.decode(encoding, "replace"))) - 1


def _ends(file: File) -> bytes:
    """The first and last bytes of a shard or table: cheap to read, and rarely the same in two versions."""
    if file.kind == "folder":
        return b""
    with open_plain(local_copy(file.path, file.version, whole=True)) as stream:
        start = stream.read(_END)
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END))
        return start + stream.read(_END)
