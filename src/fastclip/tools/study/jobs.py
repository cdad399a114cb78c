"""Runs of a study as processes: some at once, none twice, none left behind, and a failure stops no other.

A job is `fastclip train` and then, if there are tests, `fastclip eval`, each a process in a group of its own
that prints to OUT/logs/NAME.log. A child ends with its parent, even a killed one: see processes.py.
Children hold the study's lock too: no second `fastclip compare` starts before the last of them has saved.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from fastclip.files import cores
from fastclip.processes import PAUSE, PROGRAM, kill, start
from fastclip.run.folder import is_trained
from fastclip.tools.study.folder import SCORES_FILE, failure_file, is_scored
from fastclip.tools.study.live_status import LiveStatus

log = logging.getLogger(__name__)
STOPPED = 75  # the exit code of `fastclip train` that was asked to stop, and saved
_LAST_LINES = 8  # of a failed run's log


@dataclass
class Job:
    """A run to be trained, and scored if there are tests."""

    name: str
    folder: Path
    train: list[str]
    """Options of `fastclip train`, but for its folder."""
    epochs: float
    tests: list[str] = field(default_factory=list)
    """Options of `fastclip eval`; none if nothing is to be scored."""

    def next_step(self) -> list[str]:
        """What is still to be done: `train` with its words, `eval` with its words, or nothing."""
        if not _trained(self.folder):
            return ["train", *self.train, f"--out={self.folder}"]
        if self.tests and not is_scored(self.folder):
            return ["eval", str(self.folder), *self.tests, "--json"]
        return []


class Stopped(Exception):
    """The study was asked to stop; its runs have ended, and those that train have saved."""


class Jobs:
    """Runs jobs, as many at once as there are places.

    Args:
        out: the study's folder.
        places: for each job at a time what its environment has besides the usual: a GPU, threads.
        lock: the study's lock, which children hold too; see `locked`.
        program: what `fastclip` is called as.
    """

    def __init__(
        self,
        out: Path,
        places: list[dict[str, str]],
        status: LiveStatus,
        lock: BinaryIO | None = None,
        program: tuple[str, ...] = PROGRAM,
    ):
        self.out, self.status, self.lock, self.program = out, status, lock, program
        self._free = list(places)
        self._running: list[_Process] = []
        self._stop: signal.Signals | None = None
        self.stopped: list[str] = []
        """Runs that somebody else stopped: they saved, and can go on."""
        self.failed: list[str] = []

    def run(self, jobs: list[Job]) -> None:
        """Bring all of them to their end; failures are told, written down, and left. Stopped if asked to."""
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        waiting = [job for job in jobs if job.next_step()]
        for job in jobs:
            if job not in waiting:
                failure_file(self.out, job.name).unlink(missing_ok=True)
                self.status.done(job.name, seconds=None)
        with self._signals():
            try:
                while (waiting or self._running) and self._stop is None:
                    while waiting and self._free and self._stop is None:
                        self._start(waiting.pop(0))
                    self._look()
                    self.status.refresh()
                    time.sleep(PAUSE)
            finally:
                self._end_all()
        if self._stop is not None:
            raise Stopped(f"{self._stop.name}: runs that were training have saved.")

    def _start(self, job: Job) -> None:
        failure_file(self.out, job.name).unlink(missing_ok=True)
        self.status.started(job.name, job.folder, job.epochs)
        self._running.append(_Process(job, self._free.pop(0), self))

    def _look(self) -> None:
        """At every process: what has ended goes on with the job's next step, or is over."""
        for process in list(self._running):
            code = process.child.poll()
            if code is None:
                continue
            job, words = process.job, process.end(code)
            if code == 0 and (following := job.next_step()) != words:
                if following:
                    self.status.scoring(job.name)
                    process.start(following)
                    continue
                self.status.done(job.name, seconds=time.monotonic() - process.started)
            elif code == STOPPED:
                self.stopped.append(job.name)
                self.status.stopped(job.name)
            else:
                self._failed(job, code)
            self._running.remove(process)
            self._free.append(process.place)

    def _failed(self, job: Job, code: int) -> None:
        path = self.out / "logs" / f"{job.name}.log"
        self.failed.append(job.name)
        why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == 0:
            why = "it ended well, but its model or its scores are not there"
        lines = [line for line in _tail(path) if line.strip() and not line.startswith("$ ")][-_LAST_LINES:]
        failure_file(self.out, job.name).write_text("\n".join([*lines, f"({why}; {path})"]) + "\n")
        self.status.failed(job.name, [*lines, f"({why}; all of it: {path})"])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C ask for a stop; a second Ctrl-C kills."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            again, self._stop = self._stop is not None, signal.Signals(number)
            for process in self._running:
                process.signal(signal.SIGKILL if again and number == signal.SIGINT else signal.SIGTERM)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """Ask what still runs to save and end, and wait for it."""
        if self._running:
            self.status.message("Stopping: runs save what they have. Ctrl-C again quits at once.")
        for process in self._running:
            process.signal(signal.SIGTERM)
        for process in self._running:
            process.end(process.child.wait())
        self._running.clear()


class _Process:
    """A job on its place: one child after another."""

    def __init__(self, job: Job, place: dict[str, str], jobs: Jobs):
        self.job, self.place, self.jobs = job, place, jobs
        self.started = time.monotonic()
        self.start(job.next_step())

    def start(self, words: list[str]) -> None:
        self.words = words
        log, scores = self.jobs.out / "logs" / f"{self.job.name}.log", self._scores()
        if scores is not None:
            scores.parent.mkdir(parents=True, exist_ok=True)
            scores.unlink(missing_ok=True)
        with open(log, "ab") as errors, open(scores or log, "ab") as output:
            errors.write(f"$ fastclip {shlex.join(words)}\n".encode())
            errors.flush()
            self.child = start(
                [*self.jobs.program, *words],
                stdout=output,
                stderr=errors,
                env=os.environ | self.place,
                pass_fds=() if self.jobs.lock is None else (self.jobs.lock.fileno(),),
            )

    def end(self, code: int) -> list[str]:
        """Keep the scores of an evaluation that worked; the words it was called with."""
        scores = self._scores()
        if scores is not None and code == 0:
            scores.replace(self.job.folder / SCORES_FILE)
        elif scores is not None:
            scores.unlink(missing_ok=True)
        return self.words

    def signal(self, number: signal.Signals) -> None:
        """To the child alone, as its readers end with it; SIGKILL to all of them."""
        if self.child.poll() is not None:
            return
        if number == signal.SIGKILL:
            kill(self.child)
        else:
            self.child.send_signal(number)

    def _scores(self) -> Path | None:
        """Where an evaluation's scores go until it has ended."""
        return self.job.folder / f"{SCORES_FILE}.part" if self.words[0] == "eval" else None


@contextmanager
def locked(out: Path) -> Iterator[BinaryIO]:
    """The study is this process' alone, and its children's; ValueError if another is at work."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another `fastclip compare` is at work in {out}, or its last runs are saving. Wait for it, "
                "or choose another --out."
            ) from None
        yield file


def places(at_once: int | None) -> list[dict[str, str]]:
    """Where jobs run: one on each GPU, or on CPUs as many as there are cores for their threads.

    On CPUs a job has OMP_NUM_THREADS threads, one if that is not set: however many jobs run at once, the
    results are the same.
    """
    import torch

    if count := torch.cuda.device_count():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = seen.split(",") if seen else [str(number) for number in range(count)]
        return [{"CUDA_VISIBLE_DEVICES": names[job % count]} for job in range(at_once or count)]
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() and int(given) else 1
    return [{"OMP_NUM_THREADS": str(threads)}] * (at_once or max(1, cores() // threads))


def _trained(folder: Path) -> bool:
    try:
        return is_trained(folder)
    except ValueError as error:
        log.warning("%s", error)
        return False


def _tail(path: Path) -> list[str]:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        return file.read().decode(errors="replace").splitlines()
