"""The manifest of a collection: the location of each pair, and its id, which is its row.

It is built in one pass over headers, cached, memory-mapped, and reused while the files are unchanged. Only
the list of files is read into memory, so 300 million pairs open immediately.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastclip.checked_files import (
    SMALL,
    CheckedFile,
    DamagedFile,
    build_anew,
    checked,
    open_current,
    set_aside,
    write_checked,
)
from fastclip.data.fingerprint import IMAGES, READ_WHOLE, take_fingerprint
from fastclip.data.images import UnusableSample
from fastclip.data.index_files import absolute
from fastclip.data.index_together import Crew, Task, index_together
from fastclip.data.merge_indexes import Merger
from fastclip.data.pairs import (
    COMMON_COLUMNS,
    UTF_8,
    Columns,
    ExtraCaptions,
    File,
    Problem,
    SourceError,
    may_be_found_later,
    not_decodable,
)
from fastclip.data.plain_files import read_image_file
from fastclip.data.readers import UNUSABLE, OpenFiles, ParquetImages, Span
from fastclip.data.remote import is_remote, local_copy
from fastclip.data.rows import IN_FILE, IN_TAR, ROW, Place
from fastclip.data.sources import find_files
from fastclip.data.stamps import digest, size_of, stamp_of, version_of
from fastclip.data.tables import folder_of
from fastclip.files import build_lock, cache_folder, cores
from fastclip.text import counted

log = logging.getLogger(__name__)
VERSION = 3  # of the files in the cache: ids and order of intact collections stay as they are
_THREAD_DESCRIPTORS = 64  # of each thread that reads: it takes shards one after another
INDEXES = ".indexes"  # ends the name of the folder where the files of a manifest are indexed
_GIVEN_UP = 7 * 86_400  # seconds after which an interrupted index is not expected to resume
_SHOWN = 5  # problems that are logged one by one
_BLOCK = 8192  # rows of a table or folder that count as one block for `shuffle: blocks`


class Sample(NamedTuple):
    """A pair as stored on disk."""

    image: bytes
    caption: str


class Manifest:
    """Pairs by id. Open one with `open_manifest`."""

    def __init__(self, folder: Path):
        self.folder = folder
        about = json.loads(checked(folder / "manifest.json").read_text())
        self.files: list[str] = [file["path"] for file in about["files"]]
        self.kinds: list[str] = [file["kind"] for file in about["files"]]
        self.stamps: list[list[str]] = about["stamps"]
        self.fingerprint: str = about["fingerprint"]
        self.fingerprint_1: str = about["fingerprint_1"]
        self.images_sampled: bool = about["images_sampled"]
        self.problem_counts: dict[str, int] = about["problems"]
        self.extra_captions = ExtraCaptions(*about["extra_captions"])
        self.captions: list[str] = [file["captions"] for file in about["files"]]  # a digest of each file's
        self.file_rows = np.array([file["rows"] for file in about["files"]], dtype=np.int64)
        self.file_ends = np.cumsum(self.file_rows)
        self._rows = CheckedFile(folder / "rows.bin", size=int(self.file_rows.sum()) * ROW.itemsize)
        self._cells = self._rows.data.view(f"V{ROW.itemsize}")
        self._strings = CheckedFile(folder / "strings.bin")

        versions = [version_of(path, stamp) for path, stamp in zip(self.files, self.stamps, strict=True)]
        self._tars = OpenFiles(dict(zip(self.files, versions, strict=True)))
        self._columns = Columns(*about["columns"])
        self._tables = ParquetImages(self._columns, self._tars.versions)

    def __len__(self) -> int:
        return len(self._cells)

    def __reduce__(self):
        """Pickle the path alone: the receiving process maps the files itself."""
        return Manifest, (self.folder,)

    def find(self, samples: np.ndarray) -> np.ndarray:
        """The rows of these samples in one look-up per batch; `Place(*row.item())` unpacks one."""
        try:
            self._rows.check_places(samples, ROW.itemsize)
        except DamagedFile as error:
            raise self._damaged(error) from None
        return self._cells.take(samples).view(ROW)  # ten times as fast on cells of 32 bytes as on records

    def place(self, sample: int) -> Place:
        """The location of one sample."""
        return Place(*self.find(np.array([sample]))[0].item())

    def read(self, sample: int) -> Sample:
        """Read the image's bytes and the caption of one pair."""
        place = self.place(sample)
        return Sample(self.image_at(place), self.caption_at(place))

    def image_at(self, place: Place) -> bytes:
        """Read the image's bytes."""
        if place.kind == IN_TAR:
            return self._tars.read(self.files[place.file], place.image_size, place.image)
        if place.kind == IN_FILE:
            return read_image_file(local_copy(self.path_of(place)))
        return self._tables.read(self.files[place.file], place.image)

    def pair_at(self, place: Place) -> Sample:
        """Read a pair: `caption_at`, then `image_at`, but in one read if they are neighbours in a tar."""
        both = None
        if place.kind == IN_TAR:
            caption, image = Span(place.caption, place.caption_size), Span(place.image, place.image_size)
            both = self._tars.read_neighbours(self.files[place.file], caption, image)
        if both is not None:
            return Sample(both[1], _decoded(both[0], self._columns.encoding))
        text = self.caption_at(place)
        return Sample(self.image_at(place), text)

    def image_content(self, place: Place) -> bytes:
        """What a fingerprint covers of an image: its bytes, or its name if it is a remote file of its own."""
        if place.kind == IN_FILE and is_remote(self.path_of(place)):
            return self._string(place.image, place.image_size)
        try:
            return self.image_at(place)
        except UNUSABLE:
            return b""

    def caption_at(self, place: Place) -> str:
        """Read the caption, stripped of white space; UnusableSample if nothing is left or it is not text."""
        encoding = self._columns.encoding if place.kind == IN_TAR else UTF_8
        return _decoded(self.caption_bytes(place), encoding)

    def caption_bytes(self, place: Place) -> bytes:
        """Read the caption as it is stored."""
        if place.kind == IN_TAR:
            return self._tars.read(self.files[place.file], place.caption_size, place.caption)
        return self._string(place.caption, place.caption_size)

    def fingerprint_like(self, other: str) -> str:
        """The fingerprint under the rule of another one, to compare them."""
        return self.fingerprint if ":" in other else self.fingerprint_1

    def where(self, sample: int) -> str:
        """The file to inspect when this pair is damaged."""
        place = self.place(sample)
        return self.path_of(place) if place.kind == IN_FILE else self.files[place.file]

    def position(self, sample: int) -> str:
        """Where in that file the pair is: "byte 10,240" of its image, or "row 3"; "" if it is the file."""
        place = self.place(sample)
        return {IN_TAR: f"byte {place.image:,}", IN_FILE: ""}.get(place.kind, f"row {place.image}")

    def block_ends(self) -> np.ndarray:
        """The ends of blocks of neighbouring pairs: shards, and pieces of tables and folders."""
        ends, start = [], 0
        for kind, rows in zip(self.kinds, self.file_rows, strict=True):
            step = max(1, int(rows)) if kind == "tar" else _BLOCK
            ends += [start + min(i + step, int(rows)) for i in range(0, int(rows), step)]
            start += int(rows)
        return np.array(ends, dtype=np.int64)

    def problems(self) -> Iterator[Problem]:
        """The pairs that indexing skipped."""
        with checked(self.folder / "problems.jsonl").open() as lines:
            for line in lines:
                yield Problem(**json.loads(line))

    def path_of(self, place: Place) -> str:
        """The path of an image that is a separate file."""
        name = os.fsdecode(self._string(place.image, place.image_size))
        file = self.files[place.file]
        root = file if self.kinds[place.file] == "folder" else os.path.dirname(file)
        return name if is_remote(name) else os.path.join(root, name)

    def reader(self) -> Manifest:
        """The same manifest for another thread: it opens files of its own."""
        other = Manifest.__new__(Manifest)
        other.__dict__.update(self.__dict__)  # `copy` would open the manifest again, as __reduce__ says
        other._tars = OpenFiles(self._tars.versions, _THREAD_DESCRIPTORS)
        other._tables = ParquetImages(self._columns, self._tars.versions)
        return other

    def check(self) -> None:
        """Check its files, except large ones, which are checked while they are used; raises DamagedFile."""
        self._rows.check_whole(SMALL)
        self._strings.check_whole(SMALL)
        checked(self.folder / "problems.jsonl")
        if not self.images_sampled or (self.folder / IMAGES).exists():
            checked(self.folder / IMAGES)

    def _string(self, place: int, size: int) -> bytes:
        try:
            return self._strings.read(place, size).tobytes()
        except DamagedFile as error:
            raise self._damaged(error) from None

    def _damaged(self, error: DamagedFile) -> DamagedFile:
        """Rename the cached files: they cannot be replaced while other processes use them."""
        set_aside(self.folder, self._rows)
        advice = "This cached index was set aside: run the same command again, which builds it anew."
        return DamagedFile(error.path, f"{error.problem} {advice}")


def _decoded(stored: bytes, encoding: str) -> str:
    try:
        caption = stored.decode(encoding).strip()
    except UnicodeError:
        raise UnusableSample(not_decodable(encoding)) from None
    if not caption:
        raise UnusableSample("empty caption")
    return caption


def open_manifest(
    paths: str | list[str],
    columns: Columns = COMMON_COLUMNS,
    *,
    crew: Crew | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Open the manifest of a collection; build it if there is none, or if the files have changed.

    Several processes may call this at the same time: they share the work.

    Args:
        crew: how many processes to start, and who else is at work. Default: one process per core.
        progress: called as progress(done, total) every second or so; counts bytes, or 0 if they are unknown.
    """
    files = find_files(paths)
    encoding = codecs.lookup(columns.encoding).name.removesuffix("-sig")  # one name per encoding
    columns = columns._replace(encoding=encoding)
    with ThreadPoolExecutor(32) as pool:  # remote files respond slowly, but many at a time
        stamps = list((pool.map if any(is_remote(file.path) for file in files) else map)(stamp_of, files))
    files = [f._replace(version=version_of(f.path, s)) for f, s in zip(files, stamps, strict=True)]
    name = digest([VERSION, columns, [absolute(file.path) for file in files]])
    building = _Building(
        cache_folder("manifests") / name, files, stamps, columns, progress or (lambda done, total: None)
    )
    manifest = building.open(crew or Crew(cores()))
    for reason, count in manifest.problem_counts.items():
        log.warning("%s: skipped %s × %s", manifest.files[0], f"{count:,}", reason)
    for problem in islice(manifest.problems(), _SHOWN):
        log.warning("skipped: %s", problem)
    return manifest


@dataclass
class _Building:
    """A manifest that is opened, or built: many processes index its files, one of them merges the indexes."""

    folder: Path
    files: list[File]
    stamps: list[list[str]]
    columns: Columns
    progress: Callable[[int, int], None]

    def __post_init__(self) -> None:
        self.indexes = self.folder.with_name(self.folder.name + INDEXES)
        self._shown = (0, 0)
        self._damaged: set[str] = set()  # indexes that were damaged once

    def open(self, crew: Crew) -> Manifest:
        with build_lock(self.folder, self._waiting):
            manifest = self._current()
            if manifest is None:
                self._make_indexes()
            elif self.indexes.exists():  # a process was killed before it removed them
                self._remove_indexes()
        while manifest is None:
            tasks = self._tasks()
            index_together(tasks, self.columns, crew, self._show)
            with build_lock(self.folder, self._waiting):
                manifest = self._current()
                if manifest is None:  # else another process was faster
                    manifest = self._merge([task.path for task in tasks])
        return manifest

    def _current(self) -> Manifest | None:
        def is_current(found: Manifest) -> bool:
            return found.stamps == self.stamps and not _found_again(found)

        return open_current(self.folder, lambda: _open(self.folder), is_current)

    def _tasks(self) -> list[Task]:
        return [
            Task(file, self.indexes / f"{digest([file, stamp])}.index", size_of(stamp))
            for file, stamp in zip(self.files, self.stamps, strict=True)
        ]

    def _merge(self, indexes: list[Path]) -> Manifest | None:
        """Build the manifest of these indexes and remove them; None if some must be written again."""
        try:
            build_anew(self.folder, lambda part: self._write(part, indexes))
        except DamagedFile as error:
            if Path(error.path) not in indexes or error.path in self._damaged:
                raise
            self._damaged.add(error.path)
            log.warning("%s Its file is indexed again.", error)
            self._make_indexes()
            Path(error.path).unlink(missing_ok=True)
            return None
        except SourceError:  # no usable pair
            self._remove_indexes()
            raise
        self._remove_indexes()
        manifest = _open(self.folder)
        if _found_again(manifest):  # since its table was indexed, before an interruption
            self._make_indexes()
            return None
        return manifest

    def _write(self, part: Path, indexes: list[Path]) -> None:
        found = Merger(part)
        found.merge(self.files, indexes, self._waiting)

        def read(done: int, total: int) -> None:
            self._show(found.image_bytes * done // total, found.image_bytes)

        about: dict = {"version": VERSION, "pairs": found.pairs, "problems": found.problem_counts}
        about |= {"columns": self.columns, "stamps": self.stamps, "extra_captions": found.extra_captions}
        about |= {"fingerprint": "", "fingerprint_1": found.fingerprint_1(), "files": found.files}
        about |= {"images_sampled": found.image_bytes > READ_WHOLE}
        write_checked(part / "manifest.json", json.dumps(about))
        about["fingerprint"] = take_fingerprint(Manifest(part), read)
        write_checked(part / "manifest.json", json.dumps(about))
        log.info("indexed %s in %s", counted(found.pairs, "pair"), counted(len(self.files), "file"))

    def _make_indexes(self) -> None:
        """Make their folder under the lock, as it is removed: no process begins when another has finished."""
        cache_folder("manifests", self.indexes.name)

    def _remove_indexes(self) -> None:
        """Remove the indexes of single files, and those of collections that were given up."""
        leaving = self.indexes.with_name(self.indexes.name + ".part")
        shutil.rmtree(leaving, ignore_errors=True)
        self.indexes.rename(leaving)  # processes that look for them now find all or none
        for folder in self.folder.parent.glob(f"*{INDEXES}*"):
            if folder == leaving or time.time() - folder.stat().st_mtime > _GIVEN_UP:
                shutil.rmtree(folder, ignore_errors=True)

    def _show(self, done: int, total: int) -> None:
        self._shown = (done, total)
        self.progress(done, total)

    def _waiting(self) -> None:
        self.progress(*self._shown)


def _open(folder: Path) -> Manifest:
    manifest = Manifest(folder)
    manifest.check()
    return manifest


def _found_again(manifest: Manifest) -> bool:
    """Whether an image that was missing is there now."""
    if not any(map(may_be_found_later, manifest.problem_counts)):
        return False
    problems = (p for p in manifest.problems() if not p.file.endswith(".tar"))
    absent = (os.path.join(folder_of(p.file), p.key) for p in problems if may_be_found_later(p.reason))
    return any(os.path.isfile(path) and os.path.getsize(path) for path in absent)
