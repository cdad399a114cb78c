"""Find the files of a collection, and read the pairs in each.

A collection is one path or several: tar shards (`key.jpg|jpeg|png|webp` with `key.txt`), tables (CSV, TSV,
Parquet), or folders of images with captions beside them. The path itself determines its kind.
"""

from __future__ import annotations

import glob
import os
import re
import tarfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fastclip.data.pairs import (
    COMMON_COLUMNS,
    EMPTY_FILE,
    Columns,
    File,
    Pair,
    Problem,
    SourceError,
    caption_lines,
    not_decodable,
)
from fastclip.data.remote import is_remote, local_copy, remote_glob
from fastclip.data.tables import file_pair, read_csv, read_jsonl, read_parquet
from fastclip.data.text_files import with_mark
from fastclip.text import did_you_mean

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
TABLES = {"csv": read_csv, "tsv": read_csv, "parquet": read_parquet}
"""The reader of each kind of table, by file extension: to add a kind, add a row."""
MOST_FILES = 1_000_000  # of a pattern with braces
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
FOLDER_TABLES = ("metadata.jsonl", "captions.csv", "metadata.csv", "captions.tsv")


def find_files(paths: str | list[str]) -> list[File]:
    """List the files of a collection, in byte order of their names within each path."""
    files = []
    for path in [paths] if isinstance(paths, str) else paths:
        for expanded in expand_braces(str(path)):
            files += _find(expanded)
    if not files:
        problem = "has no path. Pass tar shards, a table (CSV, TSV, Parquet) or a folder."
        raise SourceError(str(paths), problem)
    return files


def expand_braces(pattern: str, most: int = MOST_FILES) -> list[str]:
    """Expand `{000..012}` to numbers and `{a,b}` to alternatives; a pattern may have several."""
    braces = [_alternatives(brace) for brace in _BRACES.finditer(pattern)]
    if (files := prod(braces)) > most or len(braces) > 100:
        shown = f"{files:,}" if files < 10**18 else "too many"
        raise SourceError(pattern[:200], f"stands for {shown} files; {MOST_FILES:,} are possible.")
    match = _BRACES.search(pattern)
    if not match:
        return [pattern]
    first, last, choices = match.groups()
    if choices is None:
        width = len(first) if first.startswith("0") else 0
        parts = [str(i).zfill(width) for i in range(int(first), int(last) + 1)]
    else:
        parts = choices.split(",")
    before, after = pattern[: match.start()], pattern[match.end() :]
    most //= max(1, len(parts))  # with braces in braces, the product above is of the innermost
    return [one for part in parts for one in expand_braces(before + part + after, most)]


def _alternatives(brace: re.Match[str]) -> int:
    """The number of texts that a pair of braces stands for, found without making them."""
    first, last, choices = brace.groups()
    if choices is not None:
        return choices.count(",") + 1
    return max(1, int(last) - int(first) + 1) if len(first + last) < 40 else 10**18


def _find(path: str) -> list[File]:
    if not os.path.exists(path) and any(sign in path for sign in ("*[" if is_remote(path) else "*?[")):
        found = remote_glob(path) if is_remote(path) else glob.glob(path, recursive=True)
        if not found:
            raise SourceError(path, "matches no files. Check the path and the pattern.")
        return [file for name in sorted(found, key=os.fsencode) for file in _find_one(name)]
    return _find_one(path)


def _find_one(path: str) -> list[File]:
    extension = _extension(path)
    if extension in ("gz", "tgz", "zst", "bz2", "xz"):
        raise SourceError(path, "is compressed: single samples cannot be read from it. Unpack it to .tar.")
    if not is_remote(path) and not os.path.exists(path):
        raise SourceError(path, f"does not exist.{_similar(path)}")
    if extension in ("tar", *TABLES):
        return [File(path, "tar" if extension == "tar" else "table")]
    if is_remote(path) or not os.path.isdir(path):
        kinds = ", ".join(("tar", *TABLES))
        raise SourceError(
            path, f"is neither a folder nor one of: {kinds}. A remote folder requires a pattern: …/*.tar"
        )
    return _find_in_folder(path)


def _similar(path: str) -> str:
    folder, name = os.path.split(path.rstrip("/"))
    return did_you_mean(name, os.listdir(folder or "."), cutoff=0.6) if os.path.isdir(folder or ".") else ""


def _extension(path: str) -> str:
    name = path.split("?", 1)[0] if is_remote(path) else path  # without the query of a URL
    return name.rsplit(".", 1)[-1].lower()


def _find_in_folder(path: str) -> list[File]:
    names = sorted(os.listdir(path), key=os.fsencode)
    shards = [File(os.path.join(path, name), "tar") for name in names if name.endswith(".tar")]
    if shards:
        return shards  # img2dataset writes its own tables beside its shards: they are not a second copy
    if any(name in FOLDER_TABLES for name in names):
        return [File(path, "folder")]
    tables = [n for n in names if _extension(n) in TABLES]
    if tables and not _is_img2dataset_files(path, names):
        return [File(os.path.join(path, name), "table") for name in tables]
    return [File(path, "folder")]


def _is_img2dataset_files(path: str, names: list[str]) -> bool:
    """Whether images are in folders 00000/, each with its records 00000.parquet and 00000_stats.json."""
    stems = [name.removesuffix("_stats.json") for name in names if name.endswith("_stats.json")]
    return any(os.path.isdir(os.path.join(path, stem)) and f"{stem}.parquet" in names for stem in stems)


def read_pairs(file: File, columns: Columns = COMMON_COLUMNS) -> Iterator[Pair | Problem]:
    """Yield the pairs of a file in order, and the problems of the others; images are not opened."""
    if file.kind == "tar":
        return _read_tar(file)
    if file.kind == "folder":
        return _read_folder(file.path, columns)
    return TABLES[_extension(file.path)](file, columns)


class Member(NamedTuple):
    """A file in a tar; as in webdataset, the first dot of its base name ends the key."""

    key: str
    extension: str
    offset: int
    size: int
    plain: bool
    """Not a link or a sparse file."""


def tar_members(stream: BinaryIO) -> tuple[list[Member], str]:
    """Read the headers of a tar in one pass: its files, and how it is damaged ("" if it is complete)."""
    members: list[Member] = []
    end = 0
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # otherwise it stores them all
                if member.isdir():
                    continue
                folder, slash, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                key, plain = folder + slash + stem, member.isreg() and not member.issparse()
                members.append(Member(key, extension.lower(), member.offset_data, member.size, plain))
            end = tar.offset
    except tarfile.TarError:
        pass  # detected below, at the end
    # A tar ends with a block of zeros; tarfile stops silently at a header that it cannot read.
    stream.seek(end)
    complete = end and stream.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    return members, "" if complete else "truncated or damaged tar"


def _read_tar(file: File) -> Iterator[Pair | Problem]:
    """A pair's members need not be adjacent; pairs are in the order of their images."""
    images: dict[str, tuple[int, int]] = {}
    captions: dict[str, tuple[int, int]] = {}
    problems = []
    with open(local_copy(file.path, file.version), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        members, damage = tar_members(stream)
    for key, extension, offset, length, plain in members:
        place = images if extension in IMAGE_EXTENSIONS else captions if extension == "txt" else None
        if place is None:
            continue
        if not plain:
            problems.append(Problem(file.path, key, "a link or a sparse member, not a plain file"))
        elif key in place:
            problems.append(Problem(file.path, key, f"duplicate key, second .{extension} skipped"))
        else:
            place[key] = (offset, length)
    if damage:
        problems.append(_damaged(file.path, damage, size, members, len(images)))
    for key, image in images.items():
        caption = captions.pop(key, None)
        reason = _unusable(image, caption, size)
        yield Problem(file.path, key, reason) if reason or caption is None else Pair(image, caption)
    problems += [Problem(file.path, key, "caption without an image") for key in captions]
    yield from problems


def _damaged(path: str, damage: str, size: int, members: list[Member], images: int) -> Problem:
    """The number of lost pairs is estimated from the average size of the readable ones."""
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


def _read_folder(path: str, columns: Columns) -> Iterator[Pair | Problem]:
    for name in FOLDER_TABLES:
        table = os.path.join(path, name)
        if os.path.exists(table):
            read = read_jsonl if name.endswith("jsonl") else read_csv
            yield from read(File(table, "table"), columns)
            return
    images = [name for name in list_folder(path) if name.rsplit(".", 1)[-1].lower() in IMAGE_EXTENSIONS]
    if not images:
        raise SourceError(path, f"has no tar shards, tables or images ({', '.join(IMAGE_EXTENSIONS)}).")
    for name in images:
        sidecar = Path(path, name).with_suffix(".txt")
        try:
            caption = sidecar.read_text(with_mark(columns.encoding)) if sidecar.exists() else None
        except UnicodeError:
            yield Problem(path, name, not_decodable(columns.encoding))
            continue
        pair = file_pair(path, name, caption)
        if isinstance(pair, Pair) and caption is not None:
            pair = pair._replace(extra_captions=pair.extra_captions + len(caption_lines(caption)) - 1)
        yield pair


def list_folder(path: str) -> list[str]:
    """List all files below a folder, relative to it, in byte order of their names."""
    names = [
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, files in os.walk(path, followlinks=True)
        for name in files
    ]
    return sorted(names, key=os.fsencode)
