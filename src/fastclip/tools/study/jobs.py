"""Runs of a study as child processes: several in parallel, none twice; a failure does not stop the others.

A job is `fastclip train` and then, if there are tests, `fastclip eval`, each in its own process group,
with its output in OUT/logs/NAME.log. A child ends with its parent, even if that is killed: see processes.py.
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

from fastclip.errors import PathError
from fastclip.files import cores as available_cores
from fastclip.processes import PAUSE, PROGRAM, kill, start
from fastclip.run.folder import is_trained
from fastclip.tools.study.folder import SCORES_FILE, failure_file, is_scored
from fastclip.tools.study.live_status import LiveStatus

log = logging.getLogger(__name__)
STOPPED = 75  # the exit code of `fastclip train` that was stopped and has saved
_LAST_LINES = 8  # of a failed run's log


@dataclass
class Job:
    """A run to train, and to score if there are tests."""

    name: str
    folder: Path
    train: list[str]
    """Arguments of `fastclip train`, except its folder."""
    epochs: float
    tests: list[str] = field(default_factory=list)
    """Arguments of `fastclip eval`; empty if nothing is scored."""

    def next_step(self) -> list[str]:
        """The next command to run: `train` or `eval` with its arguments, or nothing."""
        if not _trained(self.folder):
            return ["train", *self.train, f"--out={self.folder}"]
        if self.tests and not is_scored(self.folder):
            return ["eval", str(self.folder), *self.tests, "--json"]
        return []


class Stopped(Exception):
    """The study was interrupted: its runs have saved and ended."""


class Jobs:
    """Runs jobs in parallel, one per place.

    Args:
        out: the study's folder.
        places: for each place, environment variables of its jobs: their GPU or number of threads.
        lock: the study's lock, which children hold too; see `locked`.
        program: the command for `fastclip`.
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
        """Runs that were stopped from outside: they have saved and can resume."""
        self.failed: list[str] = []

    def run(self, jobs: list[Job]) -> None:
        """Run all of them; failures are reported and written to files. Raises Stopped after a signal."""
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
                    self._poll()
                    self.status.refresh()
                    time.sleep(PAUSE)
            finally:
                self._end_all()
        if self._stop is not None:
            raise Stopped(f"{self._stop.name}: all runs have saved.")

    def _start(self, job: Job) -> None:
        failure_file(self.out, job.name).unlink(missing_ok=True)
        self.status.started(job.name, job.folder, job.epochs)
        self._running.append(_Process(job, self._free.pop(0), self))

    def _poll(self) -> None:
        """Check every process; one that has ended continues with the next command of its job, if any."""
        for process in list(self._running):
            code = process.child.poll()
            if code is None:
                continue
            job, command = process.job, process.end(code)
            if code == 0 and (following := job.next_step()) != command:
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
            why = "exit code 0, but its model or scores are missing"
        lines = [line for line in _tail(path) if line.strip() and not line.startswith("$ ")][-_LAST_LINES:]
        failure_file(self.out, job.name).write_text("\n".join([*lines, f"({why}; {path})"]) + "\n")
        self.status.failed(job.name, [*lines, f"({why}; full log: {path})"])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C stop the runs; a second Ctrl-C kills them."""

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
        """Make running children save and end, and wait for them."""
        if self._running:
            self.status.message("Stopping: runs are saving. Press Ctrl-C again to quit immediately.")
        for process in self._running:
            process.signal(signal.SIGTERM)
        for process in self._running:
            process.end(process.child.wait())
        self._running.clear()


class _Process:
    """A job in its place: one child after another."""

    def __init__(self, job: Job, place: dict[str, str], jobs: Jobs):
        self.job, self.place, self.jobs = job, place, jobs
        self.started = time.monotonic()
        self.start(job.next_step())

    def start(self, command: list[str]) -> None:
        self.command = command
        log, scores = self.jobs.out / "logs" / f"{self.job.name}.log", self._scores()
        if scores is not None:
            scores.parent.mkdir(parents=True, exist_ok=True)
            scores.unlink(missing_ok=True)
        with open(log, "ab") as errors, open(scores or log, "ab") as output:
            errors.write(f"$ fastclip {shlex.join(command)}\n".encode())
            errors.flush()
            self.child = start(
                [*self.jobs.program, *command],
                stdout=output,
                stderr=errors,
                env=os.environ | self.place,
                pass_fds=() if self.jobs.lock is None else (self.jobs.lock.fileno(),),
            )

    def end(self, code: int) -> list[str]:
        """Keep the scores of a successful evaluation; return the command that ended."""
        scores = self._scores()
        if scores is not None and code == 0:
            scores.replace(self.job.folder / SCORES_FILE)
        elif scores is not None:
            scores.unlink(missing_ok=True)
        return self.command

    def signal(self, number: signal.Signals) -> None:
        """Signal the child only: its loader workers end with it. SIGKILL goes to all of them."""
        if self.child.poll() is not None:
            return
        if number == signal.SIGKILL:
            kill(self.child)
        else:
            self.child.send_signal(number)

    def _scores(self) -> Path | None:
        """The file for an evaluation's scores until it has ended."""
        return self.job.folder / f"{SCORES_FILE}.part" if self.command[0] == "eval" else None


@contextmanager
def locked(out: Path) -> Iterator[BinaryIO]:
    """Lock the study's folder for this process and its children; PathError if it is locked already."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PathError(
                out,
                "is in use by another `fastclip compare`, or its last runs are still saving. Wait for it, or "
                "choose another --out.",
            ) from None
        yield file


def places(at_once: int | None, gpus: int | None = None, cores: int | None = None) -> list[dict[str, str]]:
    """The environment of each parallel job: one job per GPU, or as many as the cores have threads for.

    On CPUs a job has OMP_NUM_THREADS threads (default: 1), so that the results do not depend on the number of
    parallel jobs.

    Args:
        at_once: the number of parallel jobs.
        gpus, cores: how many there are; by default, those of this machine.
    """
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(number) for number in range(gpus)]
        return [{"CUDA_VISIBLE_DEVICES": names[job % gpus]} for job in range(at_once or gpus)]
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() and int(given) else 1
    return [{"OMP_NUM_THREADS": str(threads)}] * (at_once or max(1, (cores or available_cores()) // threads))


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
