"""Find the files of a collection, and read the pairs in each.

A collection is one path or several: tar shards (`key.jpg|jpeg|png|webp` with `key.txt`), tables (CSV, TSV,
Parquet), or folders of images with captions beside them. The path itself determines its kind.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from io import TextIOWrapper
from math import prod
from pathlib import Path
from typing import BinaryIO

from fastclip.data.pairs import (
    COMMON_COLUMNS,
    EMPTY_FILE,
    LONG_CAPTION,
    LONGEST_CAPTION,
    Columns,
    File,
    Pair,
    Problem,
    SourceError,
    caption_lines,
    not_decodable,
)
from fastclip.data.parquet_tables import read_parquet
from fastclip.data.plain_files import ERRORS_OF_A_NAME, NotAFile, not_a_file, open_plain
from fastclip.data.remote import is_remote, local_copy, remote_glob
from fastclip.data.rows import LARGEST_SIZE
from fastclip.data.tables import file_pair, read_csv, read_jsonl
from fastclip.data.tar_headers import DAMAGED, Damage, Member, read_tar
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
        _require_plain(path)
        return [File(path, "tar" if extension == "tar" else "table")]
    if is_remote(path) or not os.path.isdir(path):
        kinds = ", ".join(("tar", *TABLES))
        raise SourceError(
            path, f"is neither a folder nor one of: {kinds}. A remote folder requires a pattern: …/*.tar"
        )
    return _find_in_folder(path)


def _require_plain(path: str) -> None:
    """Refuse a FIFO, which would wait for a writer forever, and the like."""
    if is_remote(path):
        return
    try:
        reason = not_a_file(os.stat(path).st_mode)
    except OSError as error:
        raise SourceError(path, f"cannot be opened: {error.strerror}.") from None
    if reason:
        raise SourceError(path, f"is {reason}. A shard or a table must be a file, or a link to one.")


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
        for shard in shards:
            _require_plain(shard.path)
        return shards  # img2dataset writes its own tables beside its shards: they are not a second copy
    if any(name in FOLDER_TABLES for name in names):
        return [File(path, "folder")]
    tables = [n for n in names if _extension(n) in TABLES]
    if tables and not _is_img2dataset_files(path, names):
        for name in tables:
            _require_plain(os.path.join(path, name))
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


def tar_members(stream: BinaryIO) -> tuple[list[Member], str]:
    """The files of a tar, and how it is damaged first ("" if it is complete)."""
    members, damages = read_tar(stream)
    return members, f"{damages[0].reason} at byte {damages[0].start:,}" if damages else ""


def _read_tar(file: File) -> Iterator[Pair | Problem]:
    """A pair's members need not be adjacent; pairs are in the order of their images."""
    images: dict[str, Member] = {}
    captions: dict[str, Member] = {}
    problems = []
    with open_plain(local_copy(file.path, file.version)) as stream:
        size = os.fstat(stream.fileno()).st_size
        members, damages = read_tar(stream)
    for member in members:
        key, extension = member.key, member.extension
        place = images if extension in IMAGE_EXTENSIONS else captions if extension == "txt" else None
        if place is None:
            continue
        if not member.plain:
            problems.append(_problem(file.path, member, member.problem))
        elif key in place:
            problems.append(_problem(file.path, member, f"duplicate key, second .{extension} skipped"))
        else:
            place[key] = member
    problems += _damaged(file.path, damages, members, len(images))
    for key, image in images.items():
        caption = captions.pop(key, None)
        if reason := _unusable(image, caption, size):
            yield _problem(file.path, image, reason)
        elif caption is not None:
            yield Pair((image.offset, image.size), (caption.offset, caption.size))
    problems += [_problem(file.path, caption, "caption without an image") for caption in captions.values()]
    yield from problems


def _problem(path: str, member: Member, reason: str) -> Problem:
    return Problem(path, member.key, reason, place=f"byte {member.header:,}")


def _damaged(path: str, damages: list[Damage], members: list[Member], images: int) -> Iterator[Problem]:
    """The number of lost pairs is estimated from the average size of the readable ones."""
    last = members[-1] if members else Member("", "", 0, 0, 0)
    end = last.offset + last.size
    read = end - sum(damage.stop - damage.start for damage in damages if damage.stop <= last.header)
    for start, stop, reason, key in damages:
        if reason != DAMAGED:  # of a single member
            yield Problem(path, key, reason, place=f"byte {start:,}")
            continue
        lost = stop - (start if stop <= last.header else end)
        pairs = max(1, round(lost / (read / images))) if images and read else 1
        yield Problem(path, key, f"{reason} after {images:,} images", pairs, f"byte {start:,}")


def _unusable(image: Member, caption: Member | None, file_size: int) -> str:
    if image.offset + image.size > file_size:
        return "image cut off by the end of the tar"
    if image.size == 0:
        return EMPTY_FILE
    if image.size > LARGEST_SIZE:
        return "image of more than 4 GiB"
    if caption is None:
        return "no caption"
    if caption.size == 0:
        return "empty caption"
    if caption.offset + caption.size > file_size:
        return "caption cut off by the end of the tar"
    return LONG_CAPTION if caption.size > LONGEST_CAPTION else ""


def _read_folder(path: str, columns: Columns) -> Iterator[Pair | Problem]:
    for name in FOLDER_TABLES:
        table = os.path.join(path, name)
        if os.path.exists(table):
            _require_plain(table)
            read = read_jsonl if name.endswith("jsonl") else read_csv
            yield from read(File(table, "table"), columns)
            return
    images = [name for name in list_folder(path) if name.rsplit(".", 1)[-1].lower() in IMAGE_EXTENSIONS]
    if not images:
        raise SourceError(path, f"has no tar shards, tables or images ({', '.join(IMAGE_EXTENSIONS)}).")
    for name in images:
        try:
            caption = _read_caption(Path(path, name).with_suffix(".txt"), columns.encoding)
        except _BadCaption as error:
            yield Problem(path, name, str(error))
            continue
        pair = file_pair(path, name, caption)
        if isinstance(pair, Pair) and caption is not None:
            pair = pair._replace(extra_captions=pair.extra_captions + len(caption_lines(caption)) - 1)
        yield pair


class _BadCaption(Exception):
    """A caption beside an image that cannot be used; the message is the reason."""


def _read_caption(path: Path, encoding: str) -> str | None:
    """The caption in a file beside its image; None if there is none."""
    try:
        with open_plain(path) as stream:
            if os.fstat(stream.fileno()).st_size > LONGEST_CAPTION:
                raise _BadCaption(LONG_CAPTION)
            return TextIOWrapper(stream, with_mark(encoding)).read()
    except FileNotFoundError:
        return None
    except NotAFile as error:
        raise _BadCaption(f"caption is {error.reason}") from None
    except UnicodeError:
        raise _BadCaption(not_decodable(encoding)) from None
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno not in ERRORS_OF_A_NAME:
            raise
        raise _BadCaption(f"caption cannot be read: {error.strerror}") from None


def list_folder(path: str) -> list[str]:
    """List all files below a folder, relative to it, in byte order of their names.

    Links are followed, except to a folder that holds them: its files are listed already.
    """
    names = []
    for folder, folders, files in os.walk(path, followlinks=True):
        names += [os.path.relpath(os.path.join(folder, name), path) for name in files]
        folders[:] = [name for name in folders if not _leads_back(os.path.join(folder, name))]
    return sorted(names, key=os.fsencode)


def _leads_back(folder: str) -> bool:
    """Whether it is a link to a folder that holds it."""
    if not os.path.islink(folder):
        return False
    target, holder = os.path.realpath(folder), os.path.realpath(os.path.dirname(folder))
    return os.path.commonpath([target, holder]) == target
