"""Read bytes from tar shards and Parquet files, which stay open for the process."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from fastclip.data.images import UnusableSample
from fastclip.data.remote import local_copy
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
        self.descriptors: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, size: int, offset: int) -> bytes:
        if path in self.descriptors:
            self.descriptors.move_to_end(path)
        else:
            self.descriptors[path] = os.open(local_copy(path, self.versions[path]), os.O_RDONLY)
            if len(self.descriptors) > self.limit:
                os.close(self.descriptors.popitem(last=False)[1])
        data = os.pread(self.descriptors[path], size, offset)
        if missing := size - len(data):
            message = f"the file ends {missing:,} bytes too early; it changed after it was indexed"
            raise ChangedFile(message, path)
        return data

    def __del__(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


class ParquetImages:
    """Images in Parquet files, by row. Whole row groups are read, and the last few are cached."""

    def __init__(self, columns: tuple[str | None, str | None], versions: dict[str, str], limit: int = 4):
        self.columns, self.versions, self.limit = columns, versions, limit
        self.tables: dict[str, tuple] = {}
        self.groups: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def read(self, path: str, row: int) -> bytes:
        table, ends, column = self._table(path)
        group = int(np.searchsorted(ends, row, side="right"))
        if (path, group) not in self.groups:
            self.groups[path, group] = table.read_row_group(group, columns=[column]).column(0)
            if len(self.groups) > self.limit:
                self.groups.popitem(last=False)
        value = self.groups[path, group][row - (int(ends[group - 1]) if group else 0)].as_py()
        if isinstance(value, dict):  # Hugging Face's image: its bytes, or the name of a file
            name, value = value.get("path"), value.get("bytes")
            if not value and name:
                value = Path(os.path.dirname(path), name).read_bytes()
        if not value:
            raise UnusableSample(NO_IMAGE)
        return value

    def _table(self, path: str) -> tuple:
        if path not in self.tables:
            import pyarrow.parquet as pq

            table = pq.ParquetFile(local_copy(path, self.versions[path]))
            counts = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
            column, _ = find_columns(path, table.schema_arrow.names, self.columns)
            self.tables[path] = (table, np.cumsum(counts), column)
        return self.tables[path]
