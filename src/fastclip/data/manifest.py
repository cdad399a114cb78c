"""The manifest of a collection: the location of each pair, and its id, which is its row.

It is built in one pass over headers, cached, memory-mapped, and reused while the files are unchanged. Only
the list of files is read into memory, so 300 million pairs open immediately.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastclip.data.images import UnusableSample
from fastclip.data.pairs import EMPTY_FILE, NO_FILE, File, Pair, Problem, SourceError
from fastclip.data.readers import OpenFiles, ParquetImages
from fastclip.data.remote import is_remote, local_copy, remote_stamp
from fastclip.data.sources import find_files, list_folder, read_pairs
from fastclip.data.tables import folder_of
from fastclip.files import atomic_folder, build_lock, cache_folder
from fastclip.text import counted

log = logging.getLogger(__name__)
VERSION = 1
_CHUNK = 8192  # rows held in memory while indexing
_END = 1 << 14
IN_TAR, IN_FILE, IN_PARQUET = range(3)
_BLOCK = 8192  # rows of a table or folder that count as one block for `shuffle: blocks`


class Sample(NamedTuple):
    """A pair as stored on disk."""

    image: bytes
    caption: str


class Place(NamedTuple):
    """A row of the manifest."""

    file: int  # number of the shard, table or folder
    kind: int  # IN_TAR, IN_FILE or IN_PARQUET
    image: int  # offset in the tar; offset of the path in strings.bin; row of the Parquet file
    image_size: int
    caption_size: int
    caption: int  # offset in the tar, or in strings.bin


ROW = np.dtype({"names": Place._fields, "formats": ["<u4", "<u4", "<u8", "<u4", "<u4", "<u8"]})


class Manifest:
    """Pairs by id. Open one with `open_manifest`."""

    def __init__(self, folder: Path):
        self.folder = folder
        about = json.loads((folder / "manifest.json").read_text())
        self.files: list[str] = [file["path"] for file in about["files"]]
        self.kinds: list[str] = [file["kind"] for file in about["files"]]
        self.stamps: list[list[str]] = about["stamps"]
        self.fingerprint: str = about["fingerprint"]
        self.problem_counts: dict[str, int] = about["problems"]
        self._file_rows = np.array([file["rows"] for file in about["files"]], dtype=np.int64)
        self.rows = np.memmap(folder / "rows.bin", dtype=ROW, mode="r", shape=(about["pairs"],))
        self._cells = self.rows.view(f"V{ROW.itemsize}")
        strings = folder / "strings.bin"
        self._strings = np.memmap(strings, mode="r") if strings.stat().st_size else np.zeros(0, np.uint8)

        versions = [_version(path, stamp) for path, stamp in zip(self.files, self.stamps, strict=True)]
        self._tars = OpenFiles(dict(zip(self.files, versions, strict=True)))
        self._tables = ParquetImages(tuple(about["columns"]), self._tars.versions)

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self):
        """Pickle the path alone: the receiving process maps the files itself."""
        return Manifest, (self.folder,)

    def find(self, samples: np.ndarray) -> np.ndarray:
        """The rows of these samples in one look-up per batch; `Place(*row.item())` unpacks one."""
        return self._cells.take(samples).view(ROW)  # ten times as fast on cells of 32 bytes as on records

    def place(self, sample: int) -> Place:
        """The location of one sample."""
        return Place(*self.rows[sample].item())

    def read(self, sample: int) -> Sample:
        """Read the image's bytes and the caption of one pair."""
        place = self.place(sample)
        return Sample(self.image_at(place), self.caption_at(place))

    def image_at(self, place: Place) -> bytes:
        """Read the image's bytes."""
        if place.kind == IN_TAR:
            return self._tars.read(self.files[place.file], place.image_size, place.image)
        if place.kind == IN_FILE:
            return local_copy(self.path_of(place)).read_bytes()
        return self._tables.read(self.files[place.file], place.image)

    def caption_at(self, place: Place) -> str:
        """Read the caption, stripped of white space; UnusableSample if nothing is left."""
        if place.kind == IN_TAR:
            raw = self._tars.read(self.files[place.file], place.caption_size, place.caption)
        else:
            raw = self._string(place.caption, place.caption_size)
        caption = raw.decode("utf-8", errors="replace").strip()
        if not caption:
            raise UnusableSample("empty caption")
        return caption

    def where(self, sample: int) -> str:
        """The file to inspect when this pair is damaged."""
        place = self.place(sample)
        return self.path_of(place) if place.kind == IN_FILE else self.files[place.file]

    def block_ends(self) -> np.ndarray:
        """The ends of blocks of neighbouring pairs: shards, and pieces of tables and folders."""
        ends, start = [], 0
        for kind, rows in zip(self.kinds, self._file_rows, strict=True):
            step = max(1, int(rows)) if kind == "tar" else _BLOCK
            ends += [start + min(i + step, int(rows)) for i in range(0, int(rows), step)]
            start += int(rows)
        return np.array(ends, dtype=np.int64)

    def problems(self) -> Iterator[Problem]:
        """The pairs that indexing skipped."""
        return _problems(self.folder)

    def path_of(self, place: Place) -> str:
        """The path of an image that is a separate file."""
        name = os.fsdecode(self._string(place.image, place.image_size))
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
    """Open the manifest of a collection; build it if there is none, or if the files have changed.

    Several processes may call this at the same time: one builds, the others wait. `progress(done, total)`
    counts bytes.
    """
    files = find_files(paths)
    columns = (image_column, caption_column)
    with ThreadPoolExecutor(32) as pool:  # remote files respond slowly, but many at a time
        stamps = list((pool.map if any(is_remote(file.path) for file in files) else map)(_stamp, files))
    files = [f._replace(version=_version(f.path, s)) for f, s in zip(files, stamps, strict=True)]
    folder = cache_folder("manifests") / digest([VERSION, columns, [_absolute(file.path) for file in files]])
    with build_lock(folder):
        if not _is_current(folder, stamps):
            with atomic_folder(folder) as part:
                _build(part, files, stamps, columns, progress)
        manifest = Manifest(folder)
    for reason, count in manifest.problem_counts.items():
        log.warning("%s: skipped %s × %s", manifest.files[0], f"{count:,}", reason)
    return manifest


def _is_current(folder: Path, stamps: list) -> bool:
    """Whether the files are unchanged, and images that were missing are still missing."""
    path = folder / "manifest.json"
    if not path.exists() or (about := json.loads(path.read_text()))["stamps"] != stamps:
        return False
    if not {NO_FILE, EMPTY_FILE} & about["problems"].keys():
        return True
    problems = (p for p in _problems(folder) if not p.file.endswith(".tar"))
    absent = (os.path.join(folder_of(p.file), p.key) for p in problems if p.reason in (NO_FILE, EMPTY_FILE))
    return not any(os.path.exists(path) and os.path.getsize(path) for path in absent)


def _problems(folder: Path) -> Iterator[Problem]:
    with (folder / "problems.jsonl").open() as lines:
        for line in lines:
            yield Problem(**json.loads(line))


def _stamp(file: File) -> list[str]:
    """Size and time of a file, or a digest of those of all files in a folder: changes when a file does."""
    if is_remote(file.path):
        return remote_stamp(file.path)
    if file.kind != "folder":
        return _stat(file.path)
    return [digest([[name, *_stat(os.path.join(file.path, name))] for name in list_folder(file.path)])]


def _stat(path: str) -> list[str]:
    try:
        stat = os.stat(path)
    except OSError:  # a dangling link
        return ["missing"]
    return [str(stat.st_size), str(stat.st_mtime_ns)]


def _version(path: str, stamp: list[str]) -> str:
    return " ".join(stamp) if is_remote(path) else ""


def digest(thing: object) -> str:
    """Hash anything that can be written as JSON."""
    return blake2b(json.dumps(thing).encode(), digest_size=16).hexdigest()


def caption_lines(text: str) -> list[str]:
    """Split the captions of an image that may have several, one per line."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def _build(part: Path, files: list[File], stamps: list, columns: tuple, progress: Callable | None) -> None:
    """Write a manifest into the folder `part`."""
    about, reasons, total, content = [], Counter[str](), 0, blake2b(digest_size=16)
    sizes = (os.path.getsize(file.path) if os.path.isfile(file.path) else 0 for file in files)
    starts = [0, *accumulate(sizes)]  # bytes before each file, and in total
    with (
        (part / "rows.bin").open("wb") as rows_file,
        (part / "strings.bin").open("wb") as strings,
        (part / "problems.jsonl").open("w") as problems,
    ):
        for number, file in enumerate(files):
            count = 0
            content.update(os.path.basename(file.path).encode() + b"\0" + _ends(file))
            items = read_pairs(file, columns)
            while some := list(islice(items, _CHUNK)):
                rows = []
                for item in some:
                    if isinstance(item, Problem):
                        problems.write(json.dumps(item._asdict()) + "\n")
                        reasons[item.reason.split(" after ")[0]] += item.pairs
                        continue
                    rows.append(_row(number, item, strings))
                    if isinstance(item.image, str):
                        content.update(_stat(os.path.join(folder_of(file.path), item.image))[0].encode())
                packed = np.array(rows, dtype=ROW).tobytes()
                rows_file.write(packed)
                content.update(packed)
                count += len(rows)
                if progress and starts[-1]:
                    inside = int(rows[-1][2]) if rows and file.kind == "tar" else 0
                    progress(starts[number] + inside, starts[-1])
            about.append({"path": _absolute(file.path), "kind": file.kind, "rows": count})
            total += count
    if not total:
        worst = "; ".join(f"{count:,} × {reason}" for reason, count in reasons.most_common(3))
        problem = f"contains no usable pairs ({worst})." if worst else "contains no pairs."
        raise SourceError(files[0].path, f"{problem} docs/data.md describes the formats.")
    with (part / "strings.bin").open("rb") as written:
        while piece := written.read(1 << 22):
            content.update(piece)
    summary = {"version": VERSION, "pairs": total, "fingerprint": content.hexdigest(), "problems": reasons}
    summary |= {"columns": columns, "stamps": stamps, "files": about}
    (part / "manifest.json").write_text(json.dumps(summary))
    log.info("indexed %s in %s", counted(total, "pair"), counted(len(files), "file"))


def _ends(file: File) -> bytes:
    """The first and last bytes of a shard or table: cheap to read, and rarely the same in two versions."""
    if file.kind == "folder":
        return b""
    with open(local_copy(file.path, file.version), "rb") as stream:
        start = stream.read(_END)
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END))
        return start + stream.read(_END)


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _row(number: int, pair: Pair, strings) -> tuple:
    def store(raw: bytes) -> tuple[int, int]:
        strings.write(raw)
        return strings.tell() - len(raw), len(raw)

    text = pair.caption
    caption, caption_size = text if isinstance(text, tuple) else store(text.encode("utf-8", "replace"))
    if isinstance(pair.image, tuple):
        return number, IN_TAR, *pair.image, caption_size, caption
    if isinstance(pair.image, str):
        return number, IN_FILE, *store(os.fsencode(pair.image)), caption_size, caption
    return number, IN_PARQUET, pair.image, 0, caption_size, caption
