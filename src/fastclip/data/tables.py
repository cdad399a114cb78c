"""Read pairs from tables of file names: CSV, TSV and metadata.jsonl. One bad row costs itself alone."""

from __future__ import annotations

import ast
import csv
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from fastclip.data.pairs import (
    EMPTY_FILE,
    LONG_CAPTION,
    LONGEST_CAPTION,
    NO_FILE,
    UTF_8,
    Columns,
    File,
    Pair,
    Problem,
    SourceError,
    not_decodable,
)
from fastclip.data.plain_files import BAD_NAME, not_a_file
from fastclip.data.remote import is_remote, url_problem
from fastclip.data.text_files import open_text

# The names that open_clip, img2dataset, Hugging Face and common datasets use, tried in this order
IMAGE_COLUMNS = (
    *("filepath", "file_path", "image_path", "img_path", "file_name", "filename"),
    *("image", "img", "path", "jpg", "png", "webp"),
)
CAPTION_COLUMNS = ("title", "caption", "text", "txt", "description", "sentence", "prompt", "captions")
NO_IMAGE = "the row has no image"
_LONGEST_LIST = 1 << 16  # characters of a list written as text; parsing takes a hundred times its memory
_MAX_LINES = 100  # of a caption


def read_csv(file: File, columns: Columns) -> Iterator[Pair | Problem]:
    """Yield pairs of a table of file names, delimited by commas or tabs: whichever the header has more of."""
    csv.field_size_limit(LONGEST_CAPTION)
    with open_text(file, columns.encoding, newline="") as stream:
        header = stream.readline(LONGEST_CAPTION)
        delimiter = "\t" if header.count("\t") >= header.count(",") and "\t" in header else ","
        stream.seek(0)
        rows = csv.reader(stream, delimiter=delimiter)
        try:
            names = next(rows, [])
        except csv.Error as error:
            raise SourceError(file.path, f", line {rows.line_num}: {error}") from error
        chosen = find_columns(file.path, names, columns)
        while True:
            first = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:  # a field without an end, say; the reader begins anew on the next line
                lines = rows.line_num - first + 1
                yield Problem(file.path, f"line {first}", f"not a readable row: {error}", lines)
                continue
            if row:
                yield _csv_pair(file.path, first, names, row, chosen, delimiter)


def _csv_pair(
    table: str, line: int, names: list[str], row: list[str], chosen: tuple[str, str], delimiter: str
) -> Pair | Problem:
    if len(row) > len(names):
        reason = "more fields than columns: is a comma in the caption not quoted?"
        found: Pair | Problem = Problem(table, f"line {line}", reason)
    else:
        cells = dict(zip(names, row, strict=False))
        found = at(file_pair(table, cells.get(chosen[0]), cells.get(chosen[1])), f"line {line}")
    longest = max(row, key=len)
    if isinstance(found, Pair) or longest.count("\n") <= _MAX_LINES:
        return found
    swallowed = csv.reader(longest.split("\n"), delimiter=delimiter, quoting=csv.QUOTE_NONE)
    alike = (dict(zip(names, other, strict=True)) for other in swallowed if len(other) == len(names))
    rows = sum(isinstance(file_pair(table, other[chosen[0]], "text"), Pair) for other in alike)
    return found._replace(pairs=1 + rows)


def at(found: Pair | Problem, place: str) -> Pair | Problem:
    """Say where in its table a problem is."""
    return found._replace(place=place) if isinstance(found, Problem) else found


class Unreadable(NamedTuple):
    """A cell whose value cannot be read."""

    reason: str
    """The rest of a sentence on it: "is not UTF-8"."""


def find_columns(path: str, names: list[str], given: Columns) -> tuple[str, str]:
    """Return the columns of the image and the caption: as given, or the first common name."""
    if not names:
        raise SourceError(path, "has no columns. Its first line must name them, e.g. filepath,title.")
    chosen = []
    lower = {name.lower(): name for name in reversed(names)}
    for kind, wanted, common in (
        ("image", given.image, IMAGE_COLUMNS),
        ("caption", given.caption, CAPTION_COLUMNS),
    ):
        known = next((lower[c] for c in common if c in lower), None) if not wanted else None
        column = wanted if wanted in names else known
        if column is None:
            raise SourceError(
                path,
                f"has no column {wanted or f'for the {kind}'}; its columns are {', '.join(names)}. "
                f"Name it with --data.{kind}_column NAME (`fastclip data`: --{kind}_column NAME).",
            )
        chosen.append(column)
    return chosen[0], chosen[1]


def file_pair(table: str, name: object, caption: object) -> Pair | Problem:
    """A pair whose image is a separate file, named relative to the table's folder."""
    if isinstance(name, Unreadable):
        return Problem(table, "", f"file name {name.reason}")
    if not name or not isinstance(name, str):
        return Problem(table, _short(name), "no file name")
    if not is_remote(name):
        try:
            found = os.stat(os.path.join(folder_of(table), name))
        except OSError:
            return Problem(table, name, NO_FILE)
        except ValueError:  # a NUL, or half of a character
            return Problem(table, name, BAD_NAME)
        if reason := not_a_file(found.st_mode):
            return Problem(table, name, reason)
        if found.st_size == 0:
            return Problem(table, name, EMPTY_FILE)
    elif reason := url_problem(name):
        return Problem(table, name, reason)
    return table_pair(table, name, name, caption)


def _short(name: object) -> str:
    """What stands in place of a name; a list or a number may be too large to print."""
    if isinstance(name, int) and name.bit_length() > 64:
        return "a large number"
    return str(name) if name is None or isinstance(name, (str, int, float)) else f"a {type(name).__name__}"


def table_pair(file: str, key: str, image: str | int, caption: object) -> Pair | Problem:
    """A pair whose caption is in a table; of a list of captions, the first that is not empty."""
    if isinstance(caption, Unreadable):
        return Problem(file, key, f"caption {caption.reason}")
    captions = _listed(caption)
    if isinstance(caption, (list, tuple)):
        caption = captions[0] if captions else None
    if caption is None:
        return Problem(file, key, "no caption")
    if not isinstance(caption, str):
        return Problem(file, key, f"caption is a {type(caption).__name__}, not text")
    if not caption.strip():
        return Problem(file, key, "empty caption")
    if len(caption) > LONGEST_CAPTION:
        return Problem(file, key, LONG_CAPTION)
    if caption.count("\n") > _MAX_LINES:
        return Problem(file, key, f"caption of more than {_MAX_LINES} lines: is a quote not closed?")
    try:
        caption.encode(UTF_8)
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON can hold
        return Problem(file, key, not_decodable(UTF_8))
    return Pair(image, caption, max(0, len(captions) - 1))


def _listed(caption: object) -> list[str]:
    """The captions of a list that are not empty; also of a list written as text, in JSON or Python."""
    text = caption.strip() if isinstance(caption, str) and len(caption) <= _LONGEST_LIST else ""
    if text.startswith("[") and text.endswith("]"):
        for parse in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                caption = parse(text)
                break
    if not isinstance(caption, (list, tuple)):
        return []
    return [one for one in caption if isinstance(one, str) and one.strip()]


def folder_of(path: str) -> str:
    """A folder itself, or the folder of a table."""
    return path if os.path.isdir(path) else os.path.dirname(path)


def read_jsonl(file: File, columns: Columns) -> Iterator[Pair | Problem]:
    """Yield pairs of Hugging Face's metadata.jsonl: one object per line, with file_name and a caption."""
    path, chosen = file.path, None
    with open_text(file, columns.encoding) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # no JSON, an integer of thousands of digits, or too deep
                row = None
            if not isinstance(row, dict):
                if line.strip():
                    yield Problem(path, f"line {number}", "not a JSON object")
                continue
            try:
                chosen = chosen or find_columns(path, list(row), columns)
            except SourceError:
                yield Problem(path, f"line {number}", "no image or no caption on this line")
                continue
            yield at(file_pair(path, row.get(chosen[0]), row.get(chosen[1])), f"line {number}")
