"""Index the files of a collection in many processes at once, on one machine or several.

They meet in a folder of the cache. A file is claimed with a lock, which is released when its owner dies; its
finished index stays in the folder, whatever happens to the process. So any number of processes share the
work, and after an interruption only unfinished files are read again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastclip.data.index_files import write_index
from fastclip.data.pairs import Columns, File
from fastclip.files import claim, parallel_map

SMALL = 1 << 26  # bytes of files, indexed sooner than processes start
_AHEAD = 16  # files per process that may be done before a large one
_PAUSE = 0.05, 1.0  # seconds between two looks at files that other processes index: first, and at most
_LISTING_SHARE = 0.05  # of the time may be spent listing finished files; on a network it is slow


class Task(NamedTuple):
    """A file and where its index goes."""

    file: File
    path: Path
    size: int
    """Bytes, to show progress; 0 if unknown."""


class Crew(NamedTuple):
    """Who indexes a collection: `size` processes such as this one, each of which begins with other files."""

    jobs: int
    """Processes that each of them may start."""
    rank: int = 0
    size: int = 1


def index_together(
    tasks: list[Task], columns: Columns, crew: Crew, progress: Callable[[int, int], None]
) -> None:
    """Return when all are indexed, or when their folder was removed, as their manifest is complete.

    What no other process has claimed is indexed here. `progress(done, total)` counts the bytes of all
    processes; it is called every second or so, and may raise.
    """
    folder = tasks[0].path.parent
    shown = _Shown(folder, tasks, progress)
    unique = list({task.path: task for task in tasks}.values())
    ordered = [task for i in range(crew.size) for task in unique[(crew.rank + i) % crew.size :: crew.size]]
    left = [task for task in ordered if task.path.name not in shown.finished]
    jobs = min(crew.jobs, len(left)) if sum(task.size for task in left) > SMALL else 1
    if jobs > 1:
        work = partial(_index_if_free, columns)
        for _ in parallel_map(work, left, jobs, few=1, ahead=_AHEAD * jobs, waiting=shown.update):
            shown.update()
    pause = _PAUSE[0]
    while left := [task for task in left if not task.path.exists()]:
        indexed = False
        for task in left:
            if _index_if_free(columns, task, shown.update):
                indexed = True
                shown.add(task)
            shown.update()
        if not folder.exists():
            return
        pause = _PAUSE[0] if indexed else min(2 * pause, _PAUSE[1])
        time.sleep(0 if indexed else pause)
    shown.end()


def _index_if_free(columns: Columns, task: Task, progress: Callable[[int], None] | None = None) -> bool:
    """Index a file unless it is indexed, or another process does it; whether it was indexed here."""
    if task.path.exists():
        return False
    try:
        with claim(task.path.with_suffix(".lock")) as claimed:
            if not claimed or task.path.exists():
                return False
            write_index(task.file, columns, task.path, progress)
            return True
    except FileNotFoundError:
        if task.path.parent.exists():
            raise
        return False  # the manifest was completed by another process, which removed the folder


class _Shown:
    """Bytes of files that are indexed, by whatever process."""

    def __init__(self, folder: Path, tasks: list[Task], progress: Callable[[int, int], None]):
        self.finished: set[str] = set()
        self._folder, self._progress = folder, progress
        self._sizes: dict[str, int] = {}
        for task in tasks:  # one that is named twice is indexed once, and counts twice
            self._sizes[task.path.name] = self._sizes.get(task.path.name, 0) + task.size
        self._total, self._done, self._next = sum(self._sizes.values()), 0, 0.0
        self.update()

    def update(self, inside: int = 0) -> None:
        """Show what is finished; `inside` are bytes of the file that this process is indexing."""
        start = time.monotonic()
        if start >= self._next:
            try:
                self.finished = self._sizes.keys() & set(os.listdir(self._folder))
            except FileNotFoundError:
                self.finished = set(self._sizes)
            self._done = sum(self._sizes[name] for name in self.finished)
            end = time.monotonic()
            self._next = end + max(1.0, (end - start) / _LISTING_SHARE)
        self._progress(min(self._done + inside, self._total), self._total)

    def add(self, task: Task) -> None:
        """Count a file that this process has finished, before it is seen in the folder."""
        if task.path.name not in self.finished:
            self.finished.add(task.path.name)
            self._done += self._sizes[task.path.name]

    def end(self) -> None:
        self._progress(self._total, self._total)
