"""Read bytes from tar shards and Parquet files, which stay open for the process."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from fastclip.checked_files import CheckedFile, DamagedFile
from fastclip.data.images import UnusableSample
from fastclip.data.pairs import Columns
from fastclip.data.remote import checked_copy, fetch_again, local_copy
from fastclip.data.tables import NO_IMAGE, find_columns


class ChangedFile(OSError):
    """A file that changed after it was indexed."""

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path


# Errors of one sample; any other error (network, full disk) is not the sample's and stops the run.
UNUSABLE = (UnusableSample, ChangedFile, FileNotFoundError, PermissionError)


class OpenFiles:
    """The files last read; `pread` keeps no position that forked loader workers could disturb."""

    def __init__(self, versions: dict[str, str], limit: int = 64):
        self.versions, self.limit = versions, limit
        self.files: OrderedDict[str, int | CheckedFile] = (
            OrderedDict()
        )  # descriptors, and copies of remote files

    def read(self, path: str, size: int, offset: int) -> bytes:
        file = self._open(path)
        if isinstance(file, int):
            data = os.pread(file, size, offset)
        else:
            try:
                data = file.read(offset, size).tobytes()
            except DamagedFile as error:
                del self.files[path]
                fetch_again(path, self.versions[path], file, error)
                data = self._open(path).read(offset, size).tobytes()
        if missing := size - len(data):
            message = f"the file ends {missing:,} bytes too early; it changed after it was indexed"
            raise ChangedFile(message, path)
        return data

    def _open(self, path: str) -> Any:
        if path in self.files:
            self.files.move_to_end(path)
            return self.files[path]
        copy = checked_copy(path, self.versions[path])
        self.files[path] = os.open(path, os.O_RDONLY) if copy is None else copy
        if len(self.files) > self.limit:
            _close(self.files.popitem(last=False)[1])
        return self.files[path]

    def __del__(self) -> None:
        for file in self.files.values():
            _close(file)


def _close(file: int | CheckedFile) -> None:
    if isinstance(file, int):
        os.close(file)


class ParquetImages:
    """Images in Parquet files, by row. Whole row groups are read, and the last few are cached."""

    def __init__(self, columns: Columns, versions: dict[str, str], limit: int = 4):
        self.columns, self.versions, self.limit = columns, versions, limit
        self.tables: dict[str, tuple] = {}
        self.copies: dict[str, CheckedFile] = {}  # of remote files
        self.groups: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def read(self, path: str, row: int) -> bytes:
        try:
            value = self._value(path, row)
        except DamagedFile as error:
            self.tables.pop(path, None)
            fetch_again(path, self.versions[path], self.copies.pop(path), error)
            value = self._value(path, row)
        if isinstance(value, dict):  # Hugging Face's image: its bytes, or the name of a file
            name, value = value.get("path"), value.get("bytes")
            if not value and name:
                value = Path(os.path.dirname(path), name).read_bytes()
        if not value:
            raise UnusableSample(NO_IMAGE)
        return value

    def _value(self, path: str, row: int) -> Any:
        table, ends, column = self._table(path)
        group = int(np.searchsorted(ends, row, side="right"))
        if (path, group) not in self.groups:
            if path in self.copies:
                _check_group(self.copies[path], table.metadata.row_group(group))
            self.groups[path, group] = table.read_row_group(group, columns=[column]).column(0)
            if len(self.groups) > self.limit:
                self.groups.popitem(last=False)
        return self.groups[path, group][row - (int(ends[group - 1]) if group else 0)].as_py()

    def _table(self, path: str) -> tuple:
        if path not in self.tables:
            import pyarrow.parquet as pq

            if (copy := checked_copy(path, self.versions[path])) is not None:
                self.copies[path] = copy
                _check_footer(copy)
            table = pq.ParquetFile(local_copy(path, self.versions[path]))
            counts = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
            column, _ = find_columns(path, table.schema_arrow.names, self.columns)
            self.tables[path] = (table, np.cumsum(counts), column)
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
