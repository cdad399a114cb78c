"""Where pairs are, as every reader of a collection tells it, and what keeps one from being used."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["tar", "table", "folder"]
NO_FILE, EMPTY_FILE = "image file not found", "image of 0 bytes"


class SourceError(ValueError):
    """A path that holds no pairs, or not in a form that can be read."""


class File(NamedTuple):
    """One part of a collection: a shard, a table, or a folder."""

    path: str
    kind: Kind
    version: str = ""
    """Of a remote file: its copy in the cache is that of this version."""


class Pair(NamedTuple):
    """Where a pair is."""

    image: tuple[int, int] | str | int
    """Offset and size within a tar, the name of a file of its own, or a row of a Parquet file."""
    caption: tuple[int, int] | str
    """Offset and size within the tar, or the caption itself."""


class Problem(NamedTuple):
    """Pairs that cannot be used, found while indexing."""

    file: str
    key: str
    reason: str
    pairs: int = 1
    """How many; an estimate where a shard is damaged."""
