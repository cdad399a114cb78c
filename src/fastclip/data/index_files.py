"""Index a collection: write the row of each pair, in one pass over headers, tables and captions."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import blake2b
from itertools import accumulate, islice
from pathlib import Path

import numpy as np

from fastclip.checked_files import CheckedWriter
from fastclip.data.fingerprint import CaptionDigest
from fastclip.data.pairs import Columns, ExtraCaptions, File, Pair, Problem, SourceError, caption_lines
from fastclip.data.readers import OpenFiles
from fastclip.data.remote import is_remote, local_copy
from fastclip.data.rows import IN_FILE, IN_PARQUET, IN_TAR, ROW, Place
from fastclip.data.sources import read_pairs
from fastclip.data.tables import folder_of

_CHUNK = 8192  # rows held in memory
_END = 1 << 14


class Indexer:
    """Writes rows.bin, strings.bin and problems.jsonl into a folder, and counts what it finds."""

    def __init__(self, part: Path, columns: Columns):
        self.columns, self.part = columns, part
        self.pairs, self.image_bytes = 0, 0
        self.files: list[dict] = []
        self.problem_counts = Counter[str]()
        self.extra_captions = ExtraCaptions()
        self._content = blake2b(digest_size=16)

    def index(self, files: list[File], progress: Callable[[int, int], None] | None) -> None:
        """Index these files; SourceError if no pair in them can be used. `progress` counts bytes."""
        sizes = (os.path.getsize(file.path) if os.path.isfile(file.path) else 0 for file in files)
        starts = [0, *accumulate(sizes)]  # bytes before each file, and in total
        with ExitStack() as stack:
            names = ("rows.bin", "strings.bin", "problems.jsonl")
            writers = [stack.enter_context(CheckedWriter(self.part / name)) for name in names]
            self._rows, self._strings, self._problems = writers
            for number, file in enumerate(files):
                before, captions = self.pairs, CaptionDigest()
                for inside in self._index(number, file, captions):
                    if progress and starts[-1]:
                        progress(starts[number] + inside, starts[-1])
                about = {"path": absolute(file.path), "kind": file.kind, "rows": self.pairs - before}
                self.files.append(about | {"captions": captions.hex()})
        if not self.pairs:
            worst = "; ".join(f"{count:,} × {reason}" for reason, count in self.problem_counts.most_common(3))
            problem = f"contains no usable pairs ({worst})." if worst else "contains no pairs."
            raise SourceError(files[0].path, f"{problem} docs/data.md describes the formats.")

    def fingerprint_1(self) -> str:
        """The fingerprint of rule 1: names, sizes and offsets, captions in tables, the ends of each shard."""
        with (self.part / "strings.bin").open("rb") as written:
            while piece := written.read(1 << 22):
                self._content.update(piece)
        return self._content.hexdigest()

    def _index(self, number: int, file: File, captions: CaptionDigest) -> Iterator[int]:
        """Write the rows of a file, and yield how far in it some of them are."""
        self._content.update(os.path.basename(file.path).encode() + b"\0" + _ends(file))
        items, tar, in_parquet = read_pairs(file, self.columns), OpenFiles({file.path: file.version}), False
        while some := list(islice(items, _CHUNK)):
            rows = []
            for item in some:
                if isinstance(item, Problem):
                    self._problems.write(json.dumps(item._asdict()).encode() + b"\n")
                    self.problem_counts[item.reason.split(" after ")[0]] += item.pairs
                    continue
                row = self._row(number, file, item)
                rows.append(row)
                in_parquet |= row.kind == IN_PARQUET
                if isinstance(item.caption, str):
                    captions.add(_utf8(item.caption))
                    self._count_extra(item.extra_captions)
                else:
                    caption = tar.read(file.path, row.caption_size, row.caption)
                    captions.add(caption)
                    self._count_extra(_extra_lines(caption, self.columns.encoding))
            packed = np.array(rows, dtype=ROW).tobytes()
            self._rows.write(packed)
            self._content.update(packed)
            self.pairs += len(rows)
            yield rows[-1].image if rows and file.kind == "tar" else 0
        if in_parquet:
            self.image_bytes += os.path.getsize(local_copy(file.path, file.version))

    def _count_extra(self, captions: int) -> None:
        if captions > 0:
            pairs, total = self.extra_captions
            self.extra_captions = ExtraCaptions(pairs + 1, total + captions)

    def _row(self, number: int, file: File, pair: Pair) -> Place:
        text = pair.caption
        caption, caption_size = text if isinstance(text, tuple) else self._store(_utf8(text))
        if isinstance(pair.image, tuple):
            self.image_bytes += pair.image[1]
            return Place(number, IN_TAR, *pair.image, caption_size, caption)
        if isinstance(pair.image, str):
            path = os.path.join(folder_of(file.path), pair.image)
            size = stat_of(path)[0]
            self._content.update(size.encode())
            self.image_bytes += 0 if is_remote(path) else int(size)
            return Place(number, IN_FILE, *self._store(os.fsencode(pair.image)), caption_size, caption)
        return Place(number, IN_PARQUET, pair.image, 0, caption_size, caption)

    def _store(self, raw: bytes) -> tuple[int, int]:
        self._strings.write(raw)
        return self._strings.size - len(raw), len(raw)


def stat_of(path: str) -> list[str]:
    """Size and time of a file."""
    try:
        stat = os.stat(path)
    except OSError:  # a dangling link
        return ["missing"]
    return [str(stat.st_size), str(stat.st_mtime_ns)]


def absolute(path: str) -> str:
    """The absolute path of a local file; the address of a remote one."""
    return path if is_remote(path) else os.path.abspath(path)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _extra_lines(caption: bytes, encoding: str) -> int:
    """The number of captions in a tar's text beyond the first, one per line."""
    return len(caption_lines(caption.decode(encoding, "replace"))) - 1


def _ends(file: File) -> bytes:
    """The first and last bytes of a shard or table: cheap to read, and rarely the same in two versions."""
    if file.kind == "folder":
        return b""
    with open(local_copy(file.path, file.version, whole=True), "rb") as stream:
        start = stream.read(_END)
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END))
        return start + stream.read(_END)
