"""Which files a collection consists of, and the pairs that each of them holds.

A collection is one path or several: tar shards (`key.jpg|jpeg|png|webp` with `key.txt`), tables (CSV, TSV,
Parquet), or folders of images with captions beside them. What a path is, is told from the path itself.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from fastclip.data.cache import is_remote, local_copy, remote_glob

Kind = Literal["tar", "table", "folder"]
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
TABLE_EXTENSIONS = ("csv", "tsv", "parquet")
# The names that open_clip, img2dataset, Hugging Face and common data sets use, in the order of trying
IMAGE_COLUMNS = (
    "filepath",
    "file_path",
    "image_path",
    "img_path",
    "file_name",
    "filename",
    "image",
    "img",
    "path",
    "jpg",
    "png",
    "webp",
)
CAPTION_COLUMNS = ("title", "caption", "text", "txt", "description", "sentence", "prompt", "captions")
NO_FILE, EMPTY_FILE = "image file not found", "image of 0 bytes"
_LONGEST_FIELD = 1 << 24  # characters of a CSV field
_MOST_LINES = 100  # of a caption
FOLDER_TABLES = ("metadata.jsonl", "captions.csv", "metadata.csv", "captions.tsv")


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


def find_files(paths: str | list[str]) -> list[File]:
    """The files of a collection, in the byte order of their names within each path."""
    files = []
    for path in [paths] if isinstance(paths, str) else paths:
        for expanded in expand_braces(str(path)):
            files += _find(expanded)
    if not files:
        raise SourceError("No path was given. Name tar shards, a table (CSV, TSV, Parquet) or a folder.")
    return files


def expand_braces(pattern: str) -> list[str]:
    """`{000..012}` counts, `{a,b}` chooses; several may stand in one pattern."""
    match = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if not match:
        return [pattern]
    first, last, choices = match.groups()
    if choices is None:
        width = len(first) if first.startswith("0") else 0
        parts = [str(i).zfill(width) for i in range(int(first), int(last) + 1)]
    else:
        parts = choices.split(",")
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [one for part in parts for one in expand_braces(before + part + after)]


def _find(path: str) -> list[File]:
    if not os.path.exists(path) and any(sign in path for sign in ("*[" if is_remote(path) else "*?[")):
        found = remote_glob(path) if is_remote(path) else glob.glob(path, recursive=True)
        if not found:
            raise SourceError(f"{path} matches no file.")
        return [file for name in sorted(found, key=os.fsencode) for file in _find_one(name)]
    return _find_one(path)


def _find_one(path: str) -> list[File]:
    extension = path.split("?", 1)[0].rsplit(".", 1)[-1].lower()
    if extension in ("gz", "tgz", "zst", "bz2", "xz"):
        raise SourceError(
            f"{path} is compressed, so its samples cannot be read one by one. Unpack it to .tar."
        )
    if not is_remote(path) and not os.path.exists(path):
        raise SourceError(f"{path} does not exist.")
    if extension == "tar":
        return [File(path, "tar")]
    if extension in TABLE_EXTENSIONS:
        return [File(path, "table")]
    if is_remote(path) or not os.path.isdir(path):
        kinds = ", ".join(("tar", *TABLE_EXTENSIONS))
        raise SourceError(
            f"{path} is neither a folder nor one of {kinds}. Remote folders need a pattern: …/*.tar"
        )
    return _find_in_folder(path)


def _find_in_folder(path: str) -> list[File]:
    names = sorted(os.listdir(path), key=os.fsencode)
    shards = [File(os.path.join(path, name), "tar") for name in names if name.endswith(".tar")]
    if shards:
        return shards  # img2dataset writes tables of its own beside its shards: they are not a second copy
    if any(name in FOLDER_TABLES for name in names):
        return [File(path, "folder")]
    tables = [n for n in names if n.rsplit(".", 1)[-1].lower() in TABLE_EXTENSIONS]
    if tables and not _holds_files_of_img2dataset(path, names):
        return [File(os.path.join(path, name), "table") for name in tables]
    return [File(path, "folder")]


def _holds_files_of_img2dataset(path: str, names: list[str]) -> bool:
    """Images in folders 00000/, and beside each its records: 00000.parquet and 00000_stats.json."""
    stems = [name.removesuffix("_stats.json") for name in names if name.endswith("_stats.json")]
    return any(os.path.isdir(os.path.join(path, stem)) and f"{stem}.parquet" in names for stem in stems)


def read_pairs(file: File, columns: tuple[str | None, str | None] = (None, None)) -> Iterator[Pair | Problem]:
    """All pairs of a file in their order, and what is wrong with the others; images are not opened."""
    if file.kind == "tar":
        return _read_tar(file)
    if file.kind == "folder":
        return _read_folder(file.path, columns)
    if file.path.split("?", 1)[0].lower().endswith(".parquet"):
        return _read_parquet(file, columns)
    return _read_csv(file, columns)


class Member(NamedTuple):
    """A file in a tar: the first dot of its base name ends the key, as in webdataset."""

    key: str
    extension: str
    offset: int
    size: int
    plain: bool
    """Not a link or a sparse file."""


def tar_members(stream: BinaryIO) -> tuple[list[Member], str]:
    """The files of a tar in one pass over its headers, and what is wrong with it; nothing if it is whole."""
    members: list[Member] = []
    end = 0
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # or it would keep them all
                if not member.isdir():
                    plain = member.isreg() and not member.issparse()
                    place = member.offset_data, member.size
                    members.append(Member(*_split_key(member.name), *place, plain))
            end = tar.offset
    except tarfile.TarError:
        pass  # told by what stands at the end
    # A tar closes with a block of zeros; tarfile itself stops in silence at a header that it cannot read.
    stream.seek(end)
    whole = end and stream.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    return members, "" if whole else "truncated or damaged tar"


def _read_tar(file: File) -> Iterator[Pair | Problem]:
    """A pair's members need not be neighbours; the image's place is the pair's."""
    images: dict[str, tuple[int, int]] = {}
    captions: dict[str, tuple[int, int]] = {}
    problems = []
    with open(local_copy(file.path, file.version), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        members, damage = tar_members(stream)
    for key, extension, offset, length, plain in members:
        kept = images if extension in IMAGE_EXTENSIONS else captions if extension == "txt" else None
        if kept is None:
            continue
        if not plain:
            problems.append(Problem(file.path, key, "a link or a sparse member, not a plain file"))
        elif key in kept:
            problems.append(Problem(file.path, key, f"duplicate key, second .{extension} left out"))
        else:
            kept[key] = (offset, length)
    if damage:
        problems.append(_damaged(file.path, damage, size, members, len(images)))
    for key, image in images.items():
        caption = captions.pop(key, None)
        reason = _unusable(image, caption, size)
        yield Problem(file.path, key, reason) if reason or caption is None else Pair(image, caption)
    problems += [Problem(file.path, key, "caption without an image") for key in captions]
    yield from problems


def _damaged(path: str, damage: str, size: int, members: list[Member], images: int) -> Problem:
    """How many pairs are lost is a guess from the size of those that are there."""
    end = members[-1].offset + members[-1].size if members else 0
    lost = max(1, round((size - end) / (end / images))) if images and end else 1
    return Problem(path, "", f"{damage} after {images:,} images", lost)


def _unusable(image: tuple[int, int], caption: tuple[int, int] | None, file_size: int) -> str:
    if sum(image) > file_size:
        return "image cut off by the end of the tar"
    if image[1] == 0:
        return EMPTY_FILE
    if caption is None:
        return "no caption"
    if caption[1] == 0:
        return "empty caption"
    if sum(caption) > file_size:
        return "caption cut off by the end of the tar"
    return ""


def _split_key(name: str) -> tuple[str, str]:
    """webdataset's rule: the key ends at the first dot of the base name."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _read_csv(file: File, columns: tuple[str | None, str | None]) -> Iterator[Pair | Problem]:
    csv.field_size_limit(_LONGEST_FIELD)
    with open(
        local_copy(file.path, file.version), newline="", encoding="utf-8-sig", errors="replace"
    ) as stream:
        header = stream.readline()
        delimiter = "\t" if header.count("\t") >= header.count(",") and "\t" in header else ","
        stream.seek(0)
        rows = csv.DictReader(stream, delimiter=delimiter)
        image_column, caption_column = find_columns(file.path, list(rows.fieldnames or []), columns)
        try:
            for row in rows:
                if None in row:
                    reason = "more fields than columns: is a caption's comma not quoted?"
                    yield Problem(file.path, f"line {rows.line_num}", reason)
                else:
                    yield _file_pair(file.path, row.get(image_column), row.get(caption_column))
        except csv.Error as error:
            raise SourceError(f"{file.path}, line {rows.line_num}: {error}") from error


def find_columns(path: str, names: list[str], given: tuple[str | None, str | None]) -> tuple[str, str]:
    """The image's and the caption's column: those given, else the first of the common names."""
    found = []
    lower = {name.lower(): name for name in reversed(names)}
    for what, wanted, common in (
        ("image", given[0], IMAGE_COLUMNS),
        ("caption", given[1], CAPTION_COLUMNS),
    ):
        column = (
            wanted
            if wanted in names
            else None
            if wanted
            else next((lower[c] for c in common if c in lower), None)
        )
        if column is None:
            raise SourceError(
                f"{path} has no column {wanted or f'for the {what}'}; its columns are {', '.join(names)}. "
                f"Name it with --{what}_column."
            )
        found.append(column)
    return found[0], found[1]


def _file_pair(table: str, name: object, caption: object) -> Pair | Problem:
    """A pair whose image is a file of its own, named in a table; names are relative to the table's folder."""
    if not name or not isinstance(name, str):
        return Problem(table, str(name), "no file name")
    if not is_remote(name):
        try:
            if os.stat(os.path.join(folder_of(table), name)).st_size == 0:
                return Problem(table, name, EMPTY_FILE)
        except OSError:
            return Problem(table, name, NO_FILE)
    return _pair(table, name, name, caption)


def _pair(file: str, key: str, image: str | int, caption: object) -> Pair | Problem:
    """A pair whose caption stands in a table; of several captions in a list the first that is not empty."""
    if isinstance(caption, (list, tuple)):
        caption = next((c for c in caption if isinstance(c, str) and c.strip()), None)
    if caption is None:
        return Problem(file, key, "no caption")
    if not isinstance(caption, str):
        return Problem(file, key, f"caption is a {type(caption).__name__}, not text")
    if not caption.strip():
        return Problem(file, key, "empty caption")
    if caption.count("\n") > _MOST_LINES:
        return Problem(file, key, f"caption of more than {_MOST_LINES} lines: is a quote not closed?")
    return Pair(image, caption)


def folder_of(path: str) -> str:
    """A folder itself, or the folder of a table."""
    return path if os.path.isdir(path) else os.path.dirname(path)


def _read_parquet(file: File, columns: tuple[str | None, str | None]) -> Iterator[Pair | Problem]:
    """Images are bytes in the table (Hugging Face's struct of bytes and path, or binary), or file names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(local_copy(file.path, file.version))
    except pa.ArrowException as error:
        raise SourceError(f"{file.path} is not a readable Parquet file: {error}") from error
    image_column, caption_column = find_columns(file.path, table.schema_arrow.names, columns)
    kind = table.schema_arrow.field(image_column).type
    plain_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    holds_bytes = plain_bytes or pa.types.is_struct(kind)
    wanted = [caption_column] if holds_bytes else [image_column, caption_column]
    row = 0
    for group in range(table.num_row_groups):
        empty = _empty_rows(table, group, image_column) if plain_bytes else set()
        values = table.read_row_group(group, columns=wanted).to_pydict()
        for i, caption in enumerate(values[caption_column]):
            if i in empty:
                yield Problem(file.path, f"row {row}", "the row holds no image")
            elif holds_bytes:
                yield _pair(file.path, f"row {row}", row, caption)
            else:
                yield _file_pair(file.path, values[image_column][i], caption)
            row += 1


def _empty_rows(table: Any, group: int, column: str) -> set[int]:
    """Rows of a group with null for an image, as img2dataset leaves of what it could not download."""
    about = table.metadata.row_group(group)
    chunks = [about.column(number) for number in range(about.num_columns)]
    known = next(chunk.statistics for chunk in chunks if chunk.path_in_schema == column)
    if known is not None and known.has_null_count and known.null_count == 0:
        return set()  # told without reading the images
    nulls = table.read_row_group(group, columns=[column]).column(0).is_null()
    return {i for i, null in enumerate(nulls.to_pylist()) if null}


def _read_folder(path: str, columns: tuple[str | None, str | None]) -> Iterator[Pair | Problem]:
    for name in FOLDER_TABLES:
        table = os.path.join(path, name)
        if os.path.exists(table):
            yield from (
                _read_jsonl(table, columns)
                if name.endswith("jsonl")
                else _read_csv(File(table, "table"), columns)
            )
            return
    images = [name for name in list_folder(path) if name.rsplit(".", 1)[-1].lower() in IMAGE_EXTENSIONS]
    if not images:
        raise SourceError(
            f"{path} holds no tar shards, no tables and no images ({', '.join(IMAGE_EXTENSIONS)})."
        )
    for name in images:
        sidecar = Path(path, name).with_suffix(".txt")
        yield _file_pair(path, name, sidecar.read_text("utf-8-sig", "replace") if sidecar.exists() else None)


def _read_jsonl(path: str, columns: tuple[str | None, str | None]) -> Iterator[Pair | Problem]:
    """Hugging Face's metadata.jsonl: an object a line, file_name and a caption."""
    found = None
    with open(path, encoding="utf-8-sig", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if not isinstance(row, dict):
                if line.strip():
                    yield Problem(path, f"line {number}", "not a JSON object")
                continue
            try:
                found = found or find_columns(path, list(row), columns)
            except SourceError:
                yield Problem(path, f"line {number}", "no image or no caption in this line")
                continue
            yield _file_pair(path, row.get(found[0]), row.get(found[1]))


def list_folder(path: str) -> list[str]:
    """Every file below a folder, relative to it, in the byte order of the names."""
    names = [
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, files in os.walk(path, followlinks=True)
        for name in files
    ]
    return sorted(names, key=os.fsencode)
