"""The manifest of a collection: where each pair is, and its id, which is its row.

It is made by one pass over headers, kept in the cache, memory-mapped, and used again while the files are
unchanged. Only the list of files is read into memory, so 300 million pairs open at once.
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

log = logging.getLogger(__name__)
VERSION = 1
_CHUNK = 8192  # rows that are held in memory while indexing
_END = 1 << 14
IN_TAR, IN_FILE, IN_PARQUET = range(3)
_BLOCK = 8192  # rows of a table or folder that count as one block for `shuffle: blocks`


class Sample(NamedTuple):
    """A pair as it lies on the disk."""

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
        """A process that gets it maps the files anew: nothing of size n is sent."""
        return Manifest, (self.folder,)

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
            return self._tars.read(self.files[place.file], place.image_size, place.image)
        if place.kind == IN_FILE:
            return local_copy(self.path_of(place)).read_bytes()
        return self._tables.read(self.files[place.file], place.image)

    def caption_at(self, place: Place) -> str:
        """The caption, without white space around it; UnusableSample if there is nothing else."""
        if place.kind == IN_TAR:
            raw = self._tars.read(self.files[place.file], place.caption_size, place.caption)
        else:
            raw = self._string(place.caption, place.caption_size)
        caption = raw.decode("utf-8", errors="replace").strip()
        if not caption:
            raise UnusableSample("empty caption")
        return caption

    def where(self, sample: int) -> str:
        """The file that a person should look at when this pair is broken."""
        place = self.place(sample)
        return self.path_of(place) if place.kind == IN_FILE else self.files[place.file]

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
        return _problems(self.folder)

    def path_of(self, place: Place) -> str:
        """An image's own file, relative to its folder or to its table's folder."""
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
    """The manifest of a collection; it is made if there is none, or if the files have changed.

    Several processes may ask at once: one makes it, the others wait. `progress(done, total)` counts bytes.
    """
    files = find_files(paths)
    columns = (image_column, caption_column)
    with ThreadPoolExecutor(32) as pool:  # remote files answer slowly, but many at once; local ones at once
        stamps = list((pool.map if any(is_remote(file.path) for file in files) else map)(_stamp, files))
    files = [f._replace(version=_version(f.path, s)) for f, s in zip(files, stamps, strict=True)]
    folder = cache_folder("manifests") / digest([VERSION, columns, [_absolute(file.path) for file in files]])
    with build_lock(folder):
        if not _is_current(folder, stamps):
            with atomic_folder(folder) as part:
                _build(part, files, stamps, columns, progress)
        manifest = Manifest(folder)
    for reason, count in manifest.problem_counts.items():
        log.warning("left out of %s: %s × %s", manifest.files[0], f"{count:,}", reason)
    return manifest


def _is_current(folder: Path, stamps: list) -> bool:
    """Whether the files are those of the manifest, and no image that was missing has come since."""
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
    """What changes when a file changes: size and time, of every file in a folder."""
    if is_remote(file.path):
        return remote_stamp(file.path)
    if file.kind != "folder":
        return _stat(file.path)
    return [digest([[name, *_stat(os.path.join(file.path, name))] for name in list_folder(file.path)])]


def _stat(path: str) -> list[str]:
    try:
        stat = os.stat(path)
    except OSError:  # a link that leads nowhere
        return ["missing"]
    return [str(stat.st_size), str(stat.st_mtime_ns)]


def _version(path: str, stamp: list[str]) -> str:
    return " ".join(stamp) if is_remote(path) else ""


def digest(thing: object) -> str:
    """Of anything that is JSON."""
    return blake2b(json.dumps(thing).encode(), digest_size=16).hexdigest()


def caption_lines(text: str) -> list[str]:
    """Where an image may have several captions, each stands on a line."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def _build(part: Path, files: list[File], stamps: list, columns: tuple, progress: Callable | None) -> None:
    """Write a manifest into the folder `part`."""
    about, reasons, total, content = [], Counter[str](), 0, blake2b(digest_size=16)
    sizes = (os.path.getsize(file.path) if os.path.isfile(file.path) else 0 for file in files)
    behind = [0, *accumulate(sizes)]  # bytes before each file, and of all
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
                if progress and behind[-1]:
                    inside = int(rows[-1][2]) if rows and file.kind == "tar" else 0
                    progress(behind[number] + inside, behind[-1])
            about.append({"path": _absolute(file.path), "kind": file.kind, "rows": count})
            total += count
    if not total:
        worst = "; ".join(f"{count:,} × {reason}" for reason, count in reasons.most_common(3))
        raise SourceError(f"{files[0].path} holds no usable pair" + (f" ({worst})." if worst else "."))
    with (part / "strings.bin").open("rb") as kept:
        while piece := kept.read(1 << 22):
            content.update(piece)
    summary = {"version": VERSION, "pairs": total, "fingerprint": content.hexdigest(), "problems": reasons}
    summary |= {"columns": columns, "stamps": stamps, "files": about}
    (part / "manifest.json").write_text(json.dumps(summary))
    log.info("indexed %s pairs in %s file%s", f"{total:,}", f"{len(files):,}", "s" * (len(files) != 1))


def _ends(file: File) -> bytes:
    """The first and last bytes of a shard or table: cheap to read, and seldom the same in two versions."""
    if file.kind == "folder":
        return b""
    with open(local_copy(file.path, file.version), "rb") as stream:
        start = stream.read(_END)
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END))
        return start + stream.read(_END)


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _row(number: int, pair: Pair, strings) -> tuple:
    def keep(raw: bytes) -> tuple[int, int]:
        strings.write(raw)
        return strings.tell() - len(raw), len(raw)

    words = pair.caption
    caption, caption_size = words if isinstance(words, tuple) else keep(words.encode("utf-8", "replace"))
    if isinstance(pair.image, tuple):
        return number, IN_TAR, *pair.image, caption_size, caption
    if isinstance(pair.image, str):
        return number, IN_FILE, *keep(os.fsencode(pair.image)), caption_size, caption
    return number, IN_PARQUET, pair.image, 0, caption_size, caption
