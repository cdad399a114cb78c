"""A folder of many files, built by many processes, that can be stopped at any moment and continued.

A job writes its files aside, renames them, then leaves a record. A job with a record is not run again.
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

from fastclip.files import aside, atomic_write
from fastclip.terminal import progress as progress_bar

log = logging.getLogger(__name__)

RECORDS = ".records"
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A piece of the work; its files depend on its arguments alone, whoever does it and whenever."""

    name: str
    work: Callable[..., Record]
    """A function of a module (workers import it) that writes files and returns what the summary needs."""
    arguments: tuple[Any, ...]
    pictures: int
    """How many pictures it makes, for the progress bar."""


def begin(out: Path, plan: Record) -> None:
    """Keep what was made under the same plan; remove what was made under another."""
    kept = read_plan(out)
    if kept != plan:
        if kept is not None:
            log.warning("%s was begun with other data or settings: starting again.", out)
        (out / RECORDS / "plan.json").unlink(missing_ok=True)  # first: what follows may be interrupted too
        for old in (out / "train", out / "tasks", out / RECORDS):
            shutil.rmtree(old, ignore_errors=True)
        (out / RECORDS).mkdir(parents=True)
        atomic_write(out / RECORDS / "plan.json", json.dumps(plan))
    for folder in (out / "train", out / "tasks"):
        folder.mkdir(parents=True, exist_ok=True)


def read_plan(out: Path) -> Record | None:
    path = out / RECORDS / "plan.json"
    return json.loads(path.read_text()) if path.exists() else None


def finish(out: Path, summary: Record) -> None:
    """Remove traces of interruptions and say that all is there. Nothing may follow."""
    for part in list(out.rglob("*.part")):
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)  # one may hold another
    atomic_write(out / "complete.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(out / RECORDS)


def run(jobs: Sequence[Job], out: Path, *, workers: int, progress: bool, label: str) -> list[Record]:
    """Do the jobs that have no record yet; give the records of all, in the order of `jobs`."""
    paths = [out / RECORDS / f"{job.name}.json" for job in jobs]
    todo = [(job, path) for job, path in zip(jobs, paths, strict=True) if not path.exists()]
    if done := len(jobs) - len(todo):
        log.info("%s: continuing; %d of %d parts are there.", label, done, len(jobs))
    total = sum(job.pictures for job in jobs)
    before = total - sum(job.pictures for job, _ in todo)
    with progress_bar(label, "pictures") if progress else nullcontext(lambda done, total: None) as update:
        run_all = _run_here if workers == 1 or len(todo) < 2 else _run_in_pool
        run_all(todo, min(workers, len(todo)), lambda made: update(before + made, total))
    return [json.loads(path.read_text()) for path in paths]


def tick() -> None:
    """Work functions call it after each picture: it moves the bar, and ends a worker if the run stopped."""
    _on_tick()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Members in the given order; nothing in the headers tells who wrote the file, or when."""
    part = aside(path)
    with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size, header.mode, header.mtime, header.uid, header.gid = len(content), 0o644, 0, 0, 0
            tar.addfile(header, io.BytesIO(content))
    part.replace(path)


def write_pairs(path: Path, pairs: Iterable[tuple[str, bytes, str]], extension: str = "txt") -> None:
    """A tar of pictures, KEY.png, each with its caption or label beside it, KEY.extension."""
    members = (((f"{key}.png", png), (f"{key}.{extension}", text.encode())) for key, png, text in pairs)
    write_tar(path, chain.from_iterable(members))


def shard_counts(shards: list[Record]) -> Record:
    """What the summary says of the training shards."""
    pairs = {f"{i:05d}.tar": record["pairs"] for i, record in enumerate(shards)}
    return {"pairs": sum(pairs.values()), "shards": pairs}


def _perform(job: Job, record: Path) -> None:
    atomic_write(record, json.dumps(job.work(*job.arguments)))


def _run_here(todo: list[tuple[Job, Path]], _workers: int, show: Callable[[int], None]) -> None:
    global _on_tick
    made = count(1)
    before, _on_tick = _on_tick, lambda: show(next(made))
    try:
        for job, record in todo:
            _perform(job, record)
    finally:
        _on_tick = before


def _run_in_pool(todo: list[tuple[Job, Path]], workers: int, show: Callable[[int], None]) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of torch's threads
    made, stop = context.Value("q", 0), context.Event()
    waiting, running = iter(todo), set[Future[None]]()
    with ProcessPoolExecutor(workers, context, _enter_worker, (made, stop)) as pool:
        try:
            while True:
                for job, record in islice(waiting, workers + 1 - len(running)):  # one ready ahead
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


def _enter_worker(made: Any, stop: Any) -> None:
    """In a worker: count for the parent, leave Ctrl-C to it, and do not outlive it (kill -9 says nothing)."""
    global _on_tick

    def count_for_parent() -> None:
        if stop.is_set():
            raise RuntimeError("stopped: another part failed, or the run was interrupted")
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
