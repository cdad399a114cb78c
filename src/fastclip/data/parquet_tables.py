"""Read pairs from Parquet tables, with file names or image bytes. A damaged row group costs itself alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any

from fastclip.data.pairs import Columns, File, Pair, Problem, SourceError
from fastclip.data.plain_files import open_plain
from fastclip.data.remote import local_copy
from fastclip.data.tables import NO_IMAGE, Unreadable, at, file_pair, find_columns, table_pair

DAMAGED_PAGE = "damaged Parquet page"


class DamagedParquet(ValueError):
    """A Parquet file, or a column of a row group, that cannot be read; the message says why."""

    def __init__(self, message: str, column: str = ""):
        super().__init__(message)
        self.column = column


def open_parquet(path: str | PathLike[str]) -> Any:
    """Open a Parquet file; DamagedParquet if its footer cannot be read."""
    import pyarrow.parquet as pq

    open_plain(path).close()  # pyarrow would wait for the writer of a FIFO
    return _read(lambda: pq.ParquetFile(path))


def read_column(table: Any, group: int, column: str) -> Any:
    """A column of a row group; DamagedParquet if it cannot be read, or is not as long as the footer says."""
    found = _read(lambda: table.read_row_group(group, columns=[column]).column(0), column)
    if len(found) != table.metadata.row_group(group).num_rows:
        raise DamagedParquet(f"{len(found):,} values, not as many as the footer says", column)
    return found


def _read(read: Callable[[], Any], column: str = "") -> Any:
    import pyarrow as pa

    try:
        return read()
    except (pa.ArrowException, OSError, UnicodeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; pyarrow's have none
            raise
        raise DamagedParquet(" ".join(str(error).split()), column) from None


def read_parquet(file: File, columns: Columns) -> Iterator[Pair | Problem]:
    """Yield pairs of a table of image bytes (binary, or Hugging Face's struct), or of file names."""
    import pyarrow as pa

    try:
        table = open_parquet(local_copy(file.path, file.version))
        schema = _read(lambda: table.schema_arrow)
        names = _read(lambda: schema.names)
    except DamagedParquet as error:
        raise SourceError(file.path, f"is not a readable Parquet file: {error}") from error
    chosen = find_columns(file.path, names, columns)
    for column in chosen:
        if names.count(column) > 1:
            raise SourceError(file.path, f"has several columns called {column}. Rename all but one of them.")
    image_column, caption_column = chosen
    kind = schema.field(image_column).type
    plain_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    row = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        try:
            captions = _values(read_column(table, group, caption_column))
            if plain_bytes or pa.types.is_struct(kind):
                empty = _empty_rows(table, group, image_column) if plain_bytes else set()
                yield from _pairs_with_bytes(file.path, row, captions, empty)
            else:
                images = _values(read_column(table, group, image_column))
                for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
                    yield at(file_pair(file.path, image, caption), f"row {row + i}")
        except DamagedParquet as error:
            place = f"row group {group}, column {error.column} (rows {row} to {row + rows - 1})"
            yield Problem(file.path, "", DAMAGED_PAGE, rows, place)
        row += rows


def _pairs_with_bytes(path: str, row: int, captions: list, empty: set[int]) -> Iterator[Pair | Problem]:
    for i, caption in enumerate(captions):
        key = f"row {row + i}"
        yield Problem(path, key, NO_IMAGE) if i in empty else table_pair(path, key, row + i, caption)


def _values(column: Any) -> list[Any]:
    """The values of a column; one that Python cannot hold becomes Unreadable, the others are as they are."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError, ArithmeticError):
        return [python_value(scalar) for scalar in column]


def python_value(scalar: Any) -> Any:
    """A value of a column as Python has it, or Unreadable."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return Unreadable("is not UTF-8")
    except (ValueError, OverflowError, ArithmeticError):  # a date beyond the year 9999, say
        return Unreadable("cannot be read")


def _empty_rows(table: Any, group: int, column: str) -> set[int]:
    """Rows of a group whose image is null, as img2dataset writes for failed downloads."""
    _check_metadata(table, group, column)
    places = [number for number in range(len(table.schema)) if _path(table, number) == column]
    known = table.metadata.row_group(group).column(places[0]).statistics if places else None
    if known is not None and known.has_null_count and known.null_count == 0:
        return set()  # known without reading the images
    nulls = read_column(table, group, column).is_null()
    return {i for i, null in enumerate(nulls.to_pylist()) if null}


def _check_metadata(table: Any, group: int, column: str) -> None:
    """DamagedParquet if asking for a column's metadata would end the process, which pyarrow lets happen.

    The reader gets the same error as an exception, before those of damaged pages, which cost only rows.
    """
    try:
        _read(lambda: next(table.iter_batches(1, row_groups=[group], columns=[column]), None), column)
    except DamagedParquet as error:
        if any(word in str(error).lower() for word in ("histogram", "metadata")):
            raise


def _path(table: Any, number: int) -> str | None:
    """The name of a column, with those of the structs around it; None if it is damaged."""
    try:
        return table.schema.column(number).path
    except UnicodeDecodeError:
        return None
