"""Read bytes from tar shards and Parquet files, which stay open for the process."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from fastclip.checked_files import CheckedFile, DamagedFile
from fastclip.data.images import UnusableSample
from fastclip.data.pairs import Columns, SourceError
from fastclip.data.parquet_tables import DAMAGED_PAGE, DamagedParquet, open_parquet, python_value, read_column
from fastclip.data.plain_files import NotAFile, open_plain, read_image_file
from fastclip.data.remote import checked_copy, fetch_again, local_copy
from fastclip.data.tables import NO_IMAGE, Unreadable, find_columns
from fastclip.files import open_files_limit


class ChangedFile(OSError):
    """A file that changed after it was indexed."""

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path


# Errors of one sample; any other error (network, full disk) is not the sample's and stops the run.
UNUSABLE = (UnusableSample, ChangedFile, FileNotFoundError, PermissionError)


class Span(NamedTuple):
    """Consecutive bytes of a file."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size

    def of(self, data: bytes, offset: int) -> bytes:
        """These bytes, out of those from `offset` on."""
        return data[self.start - offset : self.stop - offset]


_COPY_DESCRIPTORS = 3  # of a CheckedFile: its own, and one of each of its two maps
_NEIGHBOURS = 1 << 13  # bytes between two members of a tar that are cheaper to read than a second read


def most_descriptors() -> int:
    """Descriptors for a collection: half of the process's, so that there may be two collections."""
    return max(16, open_files_limit() // 2 - 128)


class OpenFiles:
    """The files last read; `pread` keeps no position that forked loader workers could disturb.

    `limit` is their number of descriptors; by default enough for each shard of most collections, so that a
    shuffled epoch opens a shard once in each loader worker.
    """

    def __init__(self, versions: dict[str, str], limit: int | None = None):
        self.versions, self.limit = versions, limit
        self.files: OrderedDict[str, int | CheckedFile] = (
            OrderedDict()
        )  # descriptors, and copies of remote files
        self._descriptors = 0

    def read(self, path: str, size: int, offset: int) -> bytes:
        file = self._open(path)
        if isinstance(file, int):
            data = os.pread(file, size, offset)
        else:
            try:
                data = file.read(offset, size).tobytes()
            except DamagedFile as error:
                self._forget(path)
                fetch_again(path, self.versions[path], file, error)
                data = self._open(path).read(offset, size).tobytes()
        if missing := size - len(data):
            message = f"the file ends {missing:,} bytes too early; it changed after it was indexed"
            raise ChangedFile(message, path)
        return data

    def read_neighbours(self, path: str, first: Span, second: Span) -> tuple[bytes, bytes] | None:
        """Two parts of a file in one read; None if they are far apart, or the file ends before them."""
        start, stop = min(first.start, second.start), max(first.stop, second.stop)
        if stop - start > first.size + second.size + _NEIGHBOURS:
            return None
        try:
            data = self.read(path, stop - start, start)
        except ChangedFile:
            return None
        return first.of(data, start), second.of(data, start)

    def _open(self, path: str) -> Any:
        if path in self.files:
            self.files.move_to_end(path)
            return self.files[path]
        if self.limit is None:
            self.limit = most_descriptors()
        copy = checked_copy(path, self.versions[path])
        self.files[path] = _open_shard(path) if copy is None else copy
        self._descriptors += _descriptors(self.files[path])
        while self._descriptors > self.limit and len(self.files) > 1:
            self._forget(next(iter(self.files)))
        return self.files[path]

    def _forget(self, path: str) -> None:
        file = self.files.pop(path)
        self._descriptors -= _descriptors(file)
        _close(file)

    def __del__(self) -> None:
        for file in self.files.values():
            _close(file)


def _open_shard(path: str) -> int:
    """A descriptor of its own; ChangedFile if another thing has taken the place of the file."""
    try:
        with open_plain(path) as stream:
            return os.dup(stream.fileno())
    except NotAFile as error:
        raise ChangedFile(f"it became {error.reason}, after it was indexed", path) from None


def _descriptors(file: int | CheckedFile) -> int:
    return 1 if isinstance(file, int) else _COPY_DESCRIPTORS


def _close(file: int | CheckedFile) -> None:
    if isinstance(file, int):
        os.close(file)


class ParquetImages:
    """Images in Parquet files, by row. Whole row groups are read, and the last few are cached."""

    def __init__(self, columns: Columns, versions: dict[str, str], limit: int = 4):
        self.columns, self.versions, self.limit = columns, versions, limit
        self.tables: OrderedDict[str, tuple] = OrderedDict()
        self.copies: dict[str, CheckedFile] = {}  # of remote files
        self.groups: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def read(self, path: str, row: int) -> bytes:
        try:
            value = self._intact_value(path, row)
        except (DamagedParquet, IndexError, SourceError, NotAFile):  # its footer is another one
            raise ChangedFile("the table changed after it was indexed", path) from None
        if isinstance(value, Unreadable):
            raise UnusableSample(f"image {value.reason}")
        if isinstance(value, dict):  # Hugging Face's image: its bytes, or the name of a file
            name, value = value.get("path"), value.get("bytes")
            if not value and isinstance(name, str) and name:
                value = read_image_file(os.path.join(os.path.dirname(path), name))
        if not value:
            raise UnusableSample(NO_IMAGE)
        if not isinstance(value, bytes):
            raise UnusableSample(f"image is a {type(value).__name__}, not bytes")
        return value

    def _intact_value(self, path: str, row: int) -> Any:
        """A value; of a remote file whose copy is damaged, from a new copy."""
        try:
            return self._value(path, row)
        except DamagedFile as error:
            self.tables.pop(path, None)
            fetch_again(path, self.versions[path], self.copies.pop(path), error)
            return self._value(path, row)

    def _value(self, path: str, row: int) -> Any:
        table, ends, column = self._table(path)
        group = int(np.searchsorted(ends, row, side="right"))
        if (path, group) not in self.groups:
            if path in self.copies:
                _check_group(self.copies[path], table.metadata.row_group(group))
            try:
                self.groups[path, group] = read_column(table, group, column)
            except DamagedParquet as error:  # kept, as each of its rows asks for it
                self.groups[path, group] = f"{DAMAGED_PAGE} (row group {group}, column {column}: {error})"
            if len(self.groups) > self.limit:
                self.groups.popitem(last=False)
        found = self.groups[path, group]
        if isinstance(found, str):
            raise UnusableSample(found)
        return python_value(found[row - (int(ends[group - 1]) if group else 0)])

    def _table(self, path: str) -> tuple:
        if path in self.tables:
            self.tables.move_to_end(path)
        else:
            if (copy := checked_copy(path, self.versions[path])) is not None:
                self.copies[path] = copy
                _check_footer(copy)
            table = open_parquet(local_copy(path, self.versions[path]))
            counts = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
            column, _ = find_columns(path, table.schema_arrow.names, self.columns)
            self.tables[path] = (table, np.cumsum(counts), column)
            while (1 + _COPY_DESCRIPTORS) * len(self.tables) > most_descriptors() and len(self.tables) > 1:
                oldest, (table, *_) = self.tables.popitem(last=False)
                table.close()
                self.copies.pop(oldest, None)
        return self.tables[path]


def _check_footer(copy: CheckedFile) -> None:
    """A Parquet file ends with its metadata, their length in 4 bytes, and "PAR1"."""
    length = int.from_bytes(copy.read(copy.size - 8, 4).tobytes(), "little")
    copy.read(copy.size - 8 - length, length + 8)


def _check_group(copy: CheckedFile, group: Any) -> None:
    columns = [group.column(number) for number in range(group.num_columns)]
    starts = [min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in columns]
    ends = [start + c.total_compressed_size for start, c in zip(starts, columns, strict=True)]
    copy.read(min(starts), max(ends) - min(starts))
