"""The records that readers of a collection return: files, pairs, and problems with pairs."""

from __future__ import annotations

import stat
from os import PathLike
from typing import Literal, NamedTuple

from fastclip.errors import PathError

Kind = Literal["tar", "table", "folder"]
NO_FILE, EMPTY_FILE = "image file not found", "image of 0 bytes"
NOT_A_FILE = {  # by the type of a path
    stat.S_IFDIR: "a folder, not a file",
    stat.S_IFIFO: "a FIFO, not a file",
    stat.S_IFSOCK: "a socket, not a file",
    stat.S_IFCHR: "a device, not a file",
    stat.S_IFBLK: "a device, not a file",
}
LONGEST_CAPTION = 1 << 24  # bytes, or characters of a field of a table
LONG_CAPTION = "caption of more than 16 MiB"
UTF_8 = "utf-8"


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


class Columns(NamedTuple):
    """How text is read: a table's columns (None for a common name), and the encoding of all text."""

    image: str | None = None
    caption: str | None = None
    encoding: str = UTF_8


COMMON_COLUMNS = Columns()


class Pair(NamedTuple):
    """Where a pair is."""

    image: tuple[int, int] | str | int
    """Offset and size within a tar, the name of an image file, or a row of a Parquet file."""
    caption: tuple[int, int] | str
    """Offset and size within the tar, or the caption itself."""
    extra_captions: int = 0
    """How many captions the image has beyond the first; 0 for a caption in a tar, which is not read here."""


class Problem(NamedTuple):
    """Pairs that cannot be used, found while indexing."""

    file: str
    key: str
    reason: str
    pairs: int = 1
    """How many; an estimate where a shard is damaged."""
    place: str = ""
    """Where in the file: "byte 10,240", "line 7", "row 3"; "" if the key says it."""

    def __str__(self) -> str:
        """File, place, key and reason in one line, without characters that would act on a terminal."""
        where = ", ".join(part for part in (self.file, self.place, printable(self.key, 200)) if part)
        several = f" (about {self.pairs:,} pairs)" if self.pairs > 1 else ""
        return printable(f"{where}: {self.reason}{several}")


class ExtraCaptions(NamedTuple):
    """Images with several captions, of which training uses one text each."""

    pairs: int = 0
    captions: int = 0
    """Captions beyond the first of each."""

    def __str__(self) -> str:
        return (
            f"{self.pairs:,} images have several captions ({self.captions:,} beyond the first). Training "
            "uses one text per image: the first of a list; lines of a .txt, or a list in a CSV cell, as is"
        )


def printable(text: str, longest: int = 1 << 13) -> str:
    """One line of this text; other characters than printable ones are written as in Python."""
    short = text if len(text) <= longest else f"{text[:longest]}…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def caption_lines(text: str) -> list[str]:
    """Split the captions of an image that may have several, one per line."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def may_be_found_later(reason: str) -> bool:
    """Whether a table's image was skipped for what may change without the table."""
    return reason in (NO_FILE, EMPTY_FILE, *NOT_A_FILE.values())


def not_decodable(encoding: str) -> str:
    """The reason why a pair with such a caption cannot be used."""
    return f"caption is not {encoding.upper()}"
