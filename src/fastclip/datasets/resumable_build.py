"""Build a folder of many files with several processes; it can be interrupted at any moment and resumed.

A job writes temporary files, renames them, then writes a record. A job with a record is not run again.
"""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import shutil
import signal
import tarfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from fastclip.errors import CommandError, PathError
from fastclip.files import atomic_write, temporary_path
from fastclip.terminal import progress as progress_bar

log = logging.getLogger(__name__)

RECORDS = ".records"
_REBUILD = "Delete it, and run the same command again: what is there is built again as far as needed."
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A piece of the work; its files depend on its arguments alone."""

    name: str
    work: Callable[..., Record]
    """A function of a module (other processes import it) that writes files and returns its record."""
    arguments: tuple[Any, ...]
    images: int
    """How many images it makes, for the progress bar."""


def begin(out: Path, plan: Record) -> None:
    """Keep files built with the same plan; remove those built with another."""
    previous = read_plan(out)
    if previous != plan:
        if previous is not None:
            log.warning("%s was started with other data or settings: rebuilding.", out)
        (out / RECORDS / "plan.json").unlink(missing_ok=True)  # first: the next lines may be interrupted too
        for old in (out / "train", out / "tasks", out / RECORDS):
            shutil.rmtree(old, ignore_errors=True)
        (out / RECORDS).mkdir(parents=True)
        atomic_write(out / RECORDS / "plan.json", json.dumps(plan))
    for folder in (out / "train", out / "tasks"):
        folder.mkdir(parents=True, exist_ok=True)


def read_plan(out: Path) -> Record | None:
    path = out / RECORDS / "plan.json"
    return read_record(path) if path.exists() else None


def read_record(path: Path, **kinds: type) -> Record:
    """A JSON file of this folder; PathError if it is damaged, or lacks a value of one of these types."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PathError(path, f"is damaged ({error}). {_REBUILD}") from None
    if not isinstance(record, dict):
        raise PathError(path, f"is damaged: it is not a table. {_REBUILD}")
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise PathError(path, f"is damaged: {name} is {record.get(name)!r}. {_REBUILD}")
    return record


def finish(out: Path, summary: Record) -> None:
    """Remove leftovers of interruptions and mark the folder complete. This must be the last step."""
    for part in list(out.rglob("*.part")):
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)  # one may contain another
    atomic_write(out / "complete.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(out / RECORDS)


def run(jobs: Sequence[Job], out: Path, *, processes: int, progress: bool, label: str) -> list[Record]:
    """Run the jobs that have no record yet; return the records of all, in the order of `jobs`."""
    paths = [out / RECORDS / f"{job.name}.json" for job in jobs]
    todo = [(job, path) for job, path in zip(jobs, paths, strict=True) if not path.exists()]
    if done := len(jobs) - len(todo):
        log.info("%s: resuming, %d of %d parts are complete", label, done, len(jobs))
    total = sum(job.images for job in jobs)
    before = total - sum(job.images for job, _ in todo)
    with progress_bar(label, "images") if progress else nullcontext(lambda done, total: None) as update:
        run_all = _run_here if processes == 1 or len(todo) < 2 else _run_in_pool
        run_all(todo, min(processes, len(todo)), lambda made: update(before + made, total))
    return [read_record(path) for path in paths]


def tick() -> None:
    """Called by work functions after each image: advances the bar, and ends a process if the run stopped."""
    _on_tick()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write members in the given order; the headers have no user and no time."""
    part = temporary_path(path)
    with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size, header.mode, header.mtime, header.uid, header.gid = len(content), 0o644, 0, 0, 0
            tar.addfile(header, io.BytesIO(content))
    part.replace(path)


def write_pairs(path: Path, pairs: Iterable[tuple[str, bytes, str]], extension: str = "txt") -> None:
    """Write a tar of images, KEY.png, each with its caption or label, KEY.extension."""
    members = (((f"{key}.png", png), (f"{key}.{extension}", text.encode())) for key, png, text in pairs)
    write_tar(path, chain.from_iterable(members))


def shard_counts(shards: list[Record]) -> Record:
    """The training shards in the summary."""
    pairs = {f"{i:05d}.tar": record["pairs"] for i, record in enumerate(shards)}
    return {"pairs": sum(pairs.values()), "shards": pairs}


def _perform(job: Job, record: Path) -> None:
    atomic_write(record, json.dumps(job.work(*job.arguments)))


def _run_here(todo: list[tuple[Job, Path]], _processes: int, show: Callable[[int], None]) -> None:
    global _on_tick
    made = count(1)
    before, _on_tick = _on_tick, lambda: show(next(made))
    try:
        for job, record in todo:
            _perform(job, record)
    finally:
        _on_tick = before


def _run_in_pool(todo: list[tuple[Job, Path]], processes: int, show: Callable[[int], None]) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of torch's threads
    made, stop = context.Value("q", 0), context.Event()
    waiting, running = iter(todo), set[Future[None]]()
    with ProcessPoolExecutor(processes, context, _enter_process, (made, stop)) as pool:
        try:
            while True:
                for job, record in islice(waiting, processes + 1 - len(running)):  # one queued
                    running.add(pool.submit(_perform, job, record))
                if not running:
                    return
                finished, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                show(made.value)
        except BaseException:
            stop.set()
            raise


def _enter_process(made: Any, stop: Any) -> None:
    """Set up a process of the pool: count for the parent, leave Ctrl-C to it, and exit when it is killed."""
    global _on_tick

    def count_for_parent() -> None:
        if stop.is_set():
            raise CommandError("stopped: another part failed, or the build was interrupted")
        with made.get_lock():
            made.value += 1

    def follow_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    _on_tick = count_for_parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow_parent, daemon=True).start()


_on_tick: Callable[[], None] = lambda: None  # noqa: E731
