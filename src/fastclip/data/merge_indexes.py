"""Merge the indexes of the files of a collection, in their order, into the files of its manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fastclip.checked_files import CheckedWriter
from fastclip.data.index_files import absolute, read_index
from fastclip.data.pairs import ExtraCaptions, File, Problem, SourceError
from fastclip.data.rows import IN_FILE, IN_TAR, ROW


class Merger:
    """Writes rows.bin, strings.bin and problems.jsonl into a folder, and adds up what was found."""

    def __init__(self, part: Path):
        self.part = part
        self.pairs, self.image_bytes = 0, 0
        self.files: list[dict] = []
        self.problem_counts = Counter[str]()
        self.extra_captions = ExtraCaptions()
        self._content = blake2b(digest_size=16)
        self._first: Problem | None = None

    def merge(self, files: list[File], indexes: list[Path], progress: Callable[[], None]) -> None:
        """Merge the index of each file; DamagedFile if one is damaged, SourceError if there is no pair."""
        with ExitStack() as stack:
            names = ("rows.bin", "strings.bin", "problems.jsonl")
            writers = [stack.enter_context(CheckedWriter(self.part / name)) for name in names]
            self._rows, self._strings, self._problems = writers
            for file, index in zip(files, indexes, strict=True):
                self._merge(file, index)
                progress()
        if not self.pairs:
            worst = "; ".join(f"{count:,} × {reason}" for reason, count in self.problem_counts.most_common(3))
            problem = f"contains no usable pairs ({worst})." if worst else "contains no pairs."
            if self._first:
                problem += f" The first: {self._first}."
            raise SourceError(files[0].path, f"{problem} docs/data.md describes the formats.")

    def fingerprint_1(self) -> str:
        """The fingerprint of rule 1: names, sizes and offsets, captions in tables, the ends of each shard."""
        with (self.part / "strings.bin").open("rb") as written:
            while piece := written.read(1 << 22):
                self._content.update(piece)
        return self._content.hexdigest()

    def _merge(self, file: File, index: Path) -> None:
        summary, records = read_index(index)
        number, strings_before = len(self.files), self._strings.size
        for record in records:
            rows = _move(record.rows, number, strings_before)
            self._content.update(record.content)
            self._content.update(rows)
            self._rows.write(rows)
            self._strings.write(record.strings)
            self._problems.write(record.problems)
            if record.problems and self._first is None:
                self._first = Problem(**json.loads(record.problems.splitlines()[0]))
        self.pairs += summary.pairs
        self.image_bytes += summary.image_bytes
        self.problem_counts.update(summary.problem_counts)
        pairs, captions = summary.extra_captions
        self.extra_captions = ExtraCaptions(
            self.extra_captions.pairs + pairs, self.extra_captions.captions + captions
        )
        about = {"path": absolute(file.path), "kind": file.kind, "rows": summary.pairs}
        self.files.append(about | {"captions": summary.captions})


def _move(packed: bytes, number: int, strings_before: int) -> bytes:
    """The rows of a file's index as those of file `number`, whose strings begin at `strings_before`."""
    rows = np.frombuffer(packed, dtype=ROW).copy()
    rows["file"] = number
    rows["image"] += np.where(rows["kind"] == IN_FILE, np.uint64(strings_before), np.uint64(0))
    rows["caption"] += np.where(rows["kind"] != IN_TAR, np.uint64(strings_before), np.uint64(0))
    return rows.tobytes()
