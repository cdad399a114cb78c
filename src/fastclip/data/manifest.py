"""The manifest of a collection: where each pair is, and its id, which is its row.

It is made by one pass over headers, kept in the cache, memory-mapped, and used again while the files are
unchanged. Only the list of files is read into memory, so 300 million pairs open at once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastclip.data.cache import built_once, cache_folder, is_remote, local_copy, remote_stamp
from fastclip.data.sources import (
    File,
    Pair,
    Problem,
    SourceError,
    find_columns,
    find_files,
    list_folder,
    read_pairs,
)

log = logging.getLogger(__name__)
VERSION = 1
IN_TAR, IN_FILE, IN_PARQUET = range(3)
ROW = np.dtype(
    [
        ("file", "<u4"),  # number of the shard, table or folder
        ("kind", "<u4"),  # IN_TAR, IN_FILE or IN_PARQUET
        ("image", "<u8"),  # offset in the tar; offset of the path in strings.bin; row of the Parquet file
        ("image_size", "<u4"),
        ("caption_size", "<u4"),
        ("caption", "<u8"),  # offset in the tar, or in strings.bin
    ]
)
_BLOCK = 8192  # rows of a table or folder that count as one block for `shuffle: blocks`


class Sample(NamedTuple):
    """A pair as it lies on the disk."""

    image: bytes
    caption: str


class Place(NamedTuple):
    """A row of the manifest."""

    file: int
    kind: int
    image: int
    image_size: int
    caption_size: int
    caption: int


class Manifest:
    """Pairs by id. Open one with `open_manifest`."""

    def __init__(self, folder: Path):
        self.folder = folder
        about = json.loads((folder / "manifest.json").read_text())
        self.files: list[str] = [file["path"] for file in about["files"]]
        self.kinds: list[str] = [file["kind"] for file in about["files"]]
        self.fingerprint: str = about["fingerprint"]
        self.problem_counts: dict[str, int] = about["problems"]
        self._image_column: str | None = about["columns"][0]
        self._file_rows = np.array([file["rows"] for file in about["files"]], dtype=np.int64)
        self.rows = np.memmap(folder / "rows.bin", dtype=ROW, mode="r", shape=(about["pairs"],))
        self._cells = self.rows.view(f"V{ROW.itemsize}")
        strings = folder / "strings.bin"
        self._strings = np.memmap(strings, mode="r") if strings.stat().st_size else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, samples: np.ndarray) -> np.ndarray:
        """The rows of these samples, one look-up for a whole batch; `Place(*row.item())` is one of them."""
        return self._cells.take(samples).view(ROW)  # cells of 32 bytes are found ten times as fast as records

    def place(self, sample: int) -> Place:
        """Where one sample is."""
        return Place(*self.rows[sample].item())

    def read(self, sample: int) -> Sample:
        """The image's bytes and the caption of one pair."""
        place = self.place(sample)
        return Sample(self.image_at(place), self.caption_at(place))

    def image_at(self, place: Place) -> bytes:
        """The image's bytes."""
        if place.kind == IN_TAR:
            return _OPEN_FILES.read(self.files[place.file], place.image_size, place.image)
        if place.kind == IN_FILE:
            return local_copy(self._path(place)).read_bytes()
        return _parquet_image(self.files[place.file], place.image, self._image_column)

    def caption_at(self, place: Place) -> str:
        """The caption."""
        if place.kind == IN_TAR:
            raw = _OPEN_FILES.read(self.files[place.file], place.caption_size, place.caption)
        else:
            raw = self._string(place.caption, place.caption_size)
        return raw.decode("utf-8", errors="replace")

    def where(self, sample: int) -> str:
        """The file that a person should look at when this pair is broken."""
        place = self.place(sample)
        return self._path(place) if place.kind == IN_FILE else self.files[place.file]

    def block_ends(self) -> np.ndarray:
        """Where blocks of neighbouring pairs end: shards, and pieces of tables and folders."""
        ends, start = [], 0
        for kind, rows in zip(self.kinds, self._file_rows, strict=True):
            step = max(1, int(rows)) if kind == "tar" else _BLOCK
            ends += [start + min(i + step, int(rows)) for i in range(0, int(rows), step)]
            start += int(rows)
        return np.array(ends, dtype=np.int64)

    def problems(self) -> Iterator[Problem]:
        """What was left out while indexing."""
        with (self.folder / "problems.jsonl").open() as lines:
            for line in lines:
                yield Problem(**json.loads(line))

    def _path(self, place: Place) -> str:
        """An image's own file, relative to its folder or to its table's folder."""
        name = self._string(place.image, place.image_size).decode()
        file = self.files[place.file]
        root = file if self.kinds[place.file] == "folder" else os.path.dirname(file)
        return name if is_remote(name) else os.path.join(root, name)

    def _string(self, place: int, size: int) -> bytes:
        return self._strings[place : place + size].tobytes()


def open_manifest(
    paths: str | list[str],
    *,
    image_column: str | None = None,
    caption_column: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """The manifest of a collection; it is made if there is none, or if the files have changed.

    Several processes may ask at once: one makes it, the others wait. `progress(done, total)` counts bytes.
    """
    files = find_files(paths)
    columns = (image_column, caption_column)
    stamps = [_stamp(file) for file in files]
    key = _digest([VERSION, columns, [_absolute(file.path) for file in files]])
    folder = cache_folder("manifests") / key
    with built_once(folder):
        if not _is_current(folder, stamps):
            _build(folder, files, stamps, columns, progress)
    return Manifest(folder)


def _is_current(folder: Path, stamps: list) -> bool:
    about = folder / "manifest.json"
    return about.exists() and json.loads(about.read_text())["stamps"] == stamps


def _stamp(file: File) -> list[str]:
    """What changes when a file changes: size and time, of every file in a folder."""
    if is_remote(file.path):
        return remote_stamp(file.path)
    if file.kind != "folder":
        return _stat(file.path)
    return [_digest([[name, *_stat(os.path.join(file.path, name))] for name in list_folder(file.path)])]


def _stat(path: str) -> list[str]:
    stat = os.stat(path)
    return [str(stat.st_size), str(stat.st_mtime_ns)]


def _digest(thing: object) -> str:
    return blake2b(json.dumps(thing).encode(), digest_size=16).hexdigest()


def _build(folder: Path, files: list[File], stamps: list, columns: tuple, progress: Callable | None) -> None:
    """Write the manifest aside and rename it, so that a killed process leaves none."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    sizes = [os.path.getsize(file.path) if os.path.isfile(file.path) else 0 for file in files]
    about, reasons, total = [], Counter[str](), 0
    content = blake2b(digest_size=16)
    with (
        (part / "rows.bin").open("wb") as rows_file,
        (part / "strings.bin").open("wb") as strings,
        (part / "problems.jsonl").open("w") as problems,
    ):
        for number, file in enumerate(files):
            rows = []
            for item in read_pairs(file, columns):
                if isinstance(item, Problem):
                    problems.write(json.dumps(item._asdict()) + "\n")
                    reasons[item.reason.split(" after ")[0]] += 1
                else:
                    rows.append(_row(number, item, strings))
            packed = np.array(rows, dtype=ROW).tobytes()
            rows_file.write(packed)
            content.update(os.path.basename(file.path).encode() + b"\0" + packed)
            about.append({"path": _absolute(file.path), "kind": file.kind, "rows": len(rows)})
            total += len(rows)
            if progress:
                progress(sum(sizes[: number + 1]), sum(sizes))
    if not total:
        shutil.rmtree(part)
        worst = "; ".join(f"{count:,} × {reason}" for reason, count in reasons.most_common(3))
        raise SourceError(f"{files[0].path} holds no usable pair" + (f" ({worst})." if worst else "."))
    with (part / "strings.bin").open("rb") as strings:
        while piece := strings.read(1 << 22):
            content.update(piece)
    summary = {
        "version": VERSION,
        "pairs": total,
        "fingerprint": content.hexdigest(),
        "problems": dict(reasons),
        "columns": columns,
        "stamps": stamps,
        "files": about,
    }
    (part / "manifest.json").write_text(json.dumps(summary))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    log.info("indexed %s pairs in %s files", f"{total:,}", f"{len(files):,}")


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _row(number: int, pair: Pair, strings) -> tuple:
    def keep(text: str) -> tuple[int, int]:
        raw, place = text.encode("utf-8", errors="replace"), strings.tell()
        strings.write(raw)
        return place, len(raw)

    caption, caption_size = pair.caption if isinstance(pair.caption, tuple) else keep(pair.caption)
    if isinstance(pair.image, tuple):
        return number, IN_TAR, *pair.image, caption_size, caption
    if isinstance(pair.image, str):
        return number, IN_FILE, *keep(pair.image), caption_size, caption
    return number, IN_PARQUET, pair.image, 0, caption_size, caption


class _OpenFiles:
    """The files last read from; `pread` has no position that forked workers could disturb."""

    def __init__(self, most: int = 64):
        self.most = most
        self.descriptors: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, size: int, offset: int) -> bytes:
        if path in self.descriptors:
            self.descriptors.move_to_end(path)
        else:
            self.descriptors[path] = os.open(local_copy(path), os.O_RDONLY)
            if len(self.descriptors) > self.most:
                os.close(self.descriptors.popitem(last=False)[1])
        data = os.pread(self.descriptors[path], size, offset)
        if len(data) != size:
            raise OSError(
                f"the file ends {size - len(data):,} bytes too early; it changed after it was indexed"
            )
        return data


_OPEN_FILES = _OpenFiles()


def _parquet_image(path: str, row: int, image_column: str | None) -> bytes:
    group, within = _find_row_group(path, row)
    value = _row_group_images(path, group, image_column)[within].as_py()
    if isinstance(value, dict):  # Hugging Face's image: bytes, and the name of the file that they came from
        value = value.get("bytes")
    if not value:
        raise OSError("the row holds no image bytes")
    return value


def _find_row_group(path: str, row: int) -> tuple[int, int]:
    ends = _parquet_file(path)[1]
    group = int(np.searchsorted(ends, row, side="right"))
    return group, row - (int(ends[group - 1]) if group else 0)


@lru_cache(maxsize=16)
def _parquet_file(path: str):
    import pyarrow.parquet as pq

    file = pq.ParquetFile(local_copy(path))
    counts = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    return file, np.cumsum(counts)


@lru_cache(maxsize=4)
def _row_group_images(path: str, group: int, image_column: str | None):
    file = _parquet_file(path)[0]
    column, _ = find_columns(path, file.schema_arrow.names, (image_column, None))
    return file.read_row_group(group, columns=[column]).column(0)
