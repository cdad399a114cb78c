"""The records that readers of a collection return: files, pairs, and problems with pairs."""

from __future__ import annotations

from os import PathLike
from typing import Literal, NamedTuple

from fastclip.errors import PathError

Kind = Literal["tar", "table", "folder"]
NO_FILE, EMPTY_FILE = "image file not found", "image of 0 bytes"


class SourceError(PathError):
    """A path without pairs, or without any that can be read.

    A loader worker's error is rebuilt from its message alone, so `problem` may be empty.
    """

    def __init__(self, path: str | PathLike[str], problem: str = ""):
        super().__init__(path, problem)
        self.args = (str(self).strip(),)


class File(NamedTuple):
    """One part of a collection: a shard, a table, or a folder."""

    path: str
    kind: Kind
    version: str = ""
    """The version of a remote file, which names its copy in the cache."""


class Pair(NamedTuple):
    """Where a pair is."""

    image: tuple[int, int] | str | int
    """Offset and size within a tar, the name of an image file, or a row of a Parquet file."""
    caption: tuple[int, int] | str
    """Offset and size within the tar, or the caption itself."""


class Problem(NamedTuple):
    """Pairs that cannot be used, found while indexing."""

    file: str
    key: str
    reason: str
    pairs: int = 1
    """How many; an estimate where a shard is damaged."""
