"""Read pairs from tables: CSV, TSV, Parquet with file names or image bytes, and metadata.jsonl."""

from __future__ import annotations

import ast
import csv
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fastclip.data.pairs import (
    EMPTY_FILE,
    NO_FILE,
    UTF_8,
    Columns,
    File,
    Pair,
    Problem,
    SourceError,
    not_decodable,
)
from fastclip.data.remote import is_remote, local_copy
from fastclip.data.text_files import open_text

# The names that open_clip, img2dataset, Hugging Face and common datasets use, tried in this order
IMAGE_COLUMNS = (
    *("filepath", "file_path", "image_path", "img_path", "file_name", "filename"),
    *("image", "img", "path", "jpg", "png", "webp"),
)
CAPTION_COLUMNS = ("title", "caption", "text", "txt", "description", "sentence", "prompt", "captions")
NO_IMAGE = "the row has no image"
_MAX_FIELD = 1 << 24  # characters of a CSV field
_MAX_LINES = 100  # of a caption


def read_csv(file: File, columns: Columns) -> Iterator[Pair | Problem]:
    """Yield pairs of a table of file names, delimited by commas or tabs: whichever the header has more of."""
    csv.field_size_limit(_MAX_FIELD)
    with open_text(file, columns.encoding, newline="") as stream:
        header = stream.readline()
        delimiter = "\t" if header.count("\t") >= header.count(",") and "\t" in header else ","
        stream.seek(0)
        rows = csv.DictReader(stream, delimiter=delimiter)
        image_column, caption_column = find_columns(file.path, list(rows.fieldnames or []), columns)
        try:
            for row in rows:
                if None in row:
                    reason = "more fields than columns: is a comma in the caption not quoted?"
                    yield Problem(file.path, f"line {rows.line_num}", reason)
                else:
                    yield file_pair(file.path, row.get(image_column), row.get(caption_column))
        except csv.Error as error:
            raise SourceError(file.path, f", line {rows.line_num}: {error}") from error


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
    """A pair whose caption is in a table; of a list of captions, the first that is not empty."""
    captions = _listed(caption)
    if isinstance(caption, (list, tuple)):
        caption = captions[0] if captions else None
    if caption is None:
        return Problem(file, key, "no caption")
    if not isinstance(caption, str):
        return Problem(file, key, f"caption is a {type(caption).__name__}, not text")
    if not caption.strip():
        return Problem(file, key, "empty caption")
    if caption.count("\n") > _MAX_LINES:
        return Problem(file, key, f"caption of more than {_MAX_LINES} lines: is a quote not closed?")
    try:
        caption.encode(UTF_8)
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON can hold
        return Problem(file, key, not_decodable(UTF_8))
    return Pair(image, caption, max(0, len(captions) - 1))


def _listed(caption: object) -> list[str]:
    """The captions of a list that are not empty; also of a list written as text, in JSON or Python."""
    if isinstance(caption, str) and (text := caption.strip()).startswith("[") and text.endswith("]"):
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


def read_parquet(file: File, columns: Columns) -> Iterator[Pair | Problem]:
    """Yield pairs of a table of image bytes (binary, or Hugging Face's struct), or of file names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(local_copy(file.path, file.version))
    except pa.ArrowException as error:
        raise SourceError(file.path, f"is not a readable Parquet file: {error}") from error
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
                yield Problem(file.path, f"row {row}", NO_IMAGE)
            elif holds_bytes:
                yield _pair(file.path, f"row {row}", row, caption)
            else:
                yield file_pair(file.path, values[image_column][i], caption)
            row += 1


def _empty_rows(table: Any, group: int, column: str) -> set[int]:
    """Rows of a group whose image is null, as img2dataset writes for failed downloads."""
    metadata = table.metadata.row_group(group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    known = next(chunk.statistics for chunk in chunks if chunk.path_in_schema == column)
    if known is not None and known.has_null_count and known.null_count == 0:
        return set()  # known without reading the images
    nulls = table.read_row_group(group, columns=[column]).column(0).is_null()
    return {i for i, null in enumerate(nulls.to_pylist()) if null}


def read_jsonl(file: File, columns: Columns) -> Iterator[Pair | Problem]:
    """Yield pairs of Hugging Face's metadata.jsonl: one object per line, with file_name and a caption."""
    path, chosen = file.path, None
    with open_text(file, columns.encoding) as stream:
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
                chosen = chosen or find_columns(path, list(row), columns)
            except SourceError:
                yield Problem(path, f"line {number}", "no image or no caption on this line")
                continue
            yield file_pair(path, row.get(chosen[0]), row.get(chosen[1]))
