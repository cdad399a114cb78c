"""Signals to `fastclip train` at random moments from its first line to its last: part of `hostile.py`.

Real programs, alone and under torchrun, with one rank and two. Every rank must end with 75, or with 0 if
training had finished, and leave nothing behind; the same command resumes, and ends with the bits of an
undisturbed run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from math import inf
from pathlib import Path
from random import Random

from tests.training.runs import ALGORITHM, Lab, assert_same_run, metrics

from fastclip.processes import free_port

EPOCHS = 4  # 24 steps
CHANGED = {"data__keep_decoded": "true", "data__workers": 1, "checkpoint__every_steps": 16}
LIMIT = 120.0  # seconds for a program to end
OTHERS = 5.0  # seconds after which a launcher ends the ranks that are left
SIGNALS = (signal.SIGTERM, signal.SIGINT)
END = "last evaluation, save and export"
MOMENTS = {  # the phase to wait for, and for how many seconds at most from then on
    "imports and joining": 3.0,
    "start-up": 0.5,
    "training": 0.5,
    END: 0.2,
    "leaving": 0.3,
}
ENDED = "after its end"
LAUNCHES = [(ranks, torchrun) for ranks in (1, 2) for torchrun in (False, True)]
# The exit code of a rank, which torchrun does not report; the shell waits for it whatever it receives
NOTING = 'trap : TERM INT; "$@"; code=$?; echo $code > "$CODES/$RANK"; exit $code'


class Started:
    """One start of the command, in all its processes."""

    def __init__(self, lab: Lab, out: Path, ranks: int, torchrun: bool):
        self.out, self.ranks, self.torchrun = out, ranks, torchrun
        self.folder = out.with_name(out.name + ".start")
        self.folder.mkdir(exist_ok=True)
        for file in self.folder.iterdir():
            file.unlink()
        self.resumes = (out / "metrics.jsonl").exists()
        self.mark = f"FASTCLIP_SIGNALS={self.folder}"
        train = [sys.executable, "-m", "fastclip", "train", *lab.options(out, ALGORITHM[ranks], **CHANGED)]
        self.log = (self.folder / "log").open("w")
        common = {"OMP_NUM_THREADS": "1", "CODES": str(self.folder), "FASTCLIP_SIGNALS": str(self.folder)}
        self.environment = os.environ | lab.environment | common
        if torchrun:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
            launcher += [f"--nproc-per-node={ranks}", "sh", "-c", NOTING, "sh"]
            self.processes = [self._start([*launcher, *train])]
        elif ranks == 1:
            self.processes = [self._start(train)]
        else:
            place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            of_rank = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
            self.processes = [self._start(train, **place, **own) for own in of_rank]

    def _start(self, command: list[str], **environment: str) -> subprocess.Popen:
        environment = self.environment | environment
        return subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log, process_group=0)

    def phase(self) -> str:
        """What it is doing, as its files show."""
        if all(process.poll() is not None for process in self.processes):
            return ENDED
        if (self.out / "model").exists():
            return "leaving"
        if not (self.out / "running.json").exists():
            return "launcher" if self.torchrun and not self._ranks() else "imports and joining"
        if not (self.out / "metrics.jsonl").exists() or (self.resumes and "Resumed" not in self.output()):
            return "start-up"
        step = max((record["step"] for record in metrics(self.out)), default=0)
        return "training" if step < 6 * EPOCHS else END

    def wait_for(self, phase: str) -> None:
        """Until this phase, or a later one."""
        phases = [*MOMENTS, ENDED]
        later = phases[phases.index(phase) :]
        while self.phase() not in later:
            time.sleep(0.005)

    def signal(self, number: signal.Signals, all_ranks: bool) -> None:
        for process in self.processes if all_ranks else self.processes[-1:]:
            if process.poll() is None:
                process.send_signal(number)

    def codes(self) -> list[int]:
        """The exit codes of the ranks that had started; what is left of a job is ended, as launchers do."""
        end, others = time.monotonic() + LIMIT, inf
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < end, self.output()
            if others == inf and any(process.poll() is not None for process in self.processes):
                others = time.monotonic() + OTHERS
            if time.monotonic() > others:
                self.signal(signal.SIGTERM, all_ranks=True)
                others = end
            time.sleep(0.02)
        if not self.torchrun:
            return [process.returncode for process in self.processes]
        return [int(path.read_text()) for path in sorted(self.folder.glob("[0-9]*"))]

    def output(self) -> str:
        return (self.folder / "log").read_text()

    def left(self) -> list[int]:
        """Processes of this start that still exist."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it has ended, or belongs to another user
                continue
        return found

    def _ranks(self) -> bool:
        return any("RANK=0" in _environment(pid) for pid in self.left())

    def kill(self) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.log.close()


def _environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def signal_repeatedly(folder: Path, signals: int, random: Random) -> dict:
    """Send this many signals; how many came in which phase, and how the ranks ended."""
    lab = Lab(folder / "lab", epochs=EPOCHS)
    for ranks in (1, 2):
        lab.start(folder / f"reference-{ranks}", ranks, **CHANGED).finish(timeout=300)
    found: dict[str, Counter[str]] = {}
    counts = dict.fromkeys(("SIGTERM", "SIGINT"), 0)
    runs: Counter[tuple[int, bool]] = Counter()
    checked = 0
    for number in range(signals):
        launch = LAUNCHES[number % len(LAUNCHES)]
        out = folder / f"run-{launch[0]}-{launch[1]}-{runs[launch]}"
        lab.environment["FASTCLIP_CACHE"] = str(out.with_name(out.name + ".cache"))
        which = SIGNALS[number // len(LAUNCHES) % 2]
        started = Started(lab, out, *launch)
        try:
            moment = random.choice([*MOMENTS])
            started.wait_for(moment)
            time.sleep(random.uniform(0, MOMENTS[moment]))
            phase = started.phase()
            started.signal(which, all_ranks=random.random() < 0.5)
            codes = started.codes()
            _check_clean(started, codes, phase)
        finally:
            started.kill()
        outcome = " and ".join(map(str, sorted(set(codes))))
        found.setdefault(phase, Counter())[outcome] += 1
        counts[which.name] += 1
        print(f"signal {number + 1} of {signals}: {which.name} to {launch}: {phase}, {outcome}", flush=True)
        if codes and set(codes) == {0}:
            assert_same_run(out, folder / f"reference-{launch[0]}")
            runs[launch] += 1
            checked += 1
    return {
        "signals": counts,
        "launches": [f"{ranks} ranks, {'torchrun' if torchrun else 'alone'}" for ranks, torchrun in LAUNCHES],
        "phases": {phase: dict(sorted(ends.items())) for phase, ends in sorted(found.items())},
        "bit_equal_runs": checked + _finish(lab, folder, runs),
    }


def _check_clean(started: Started, codes: list[int], phase: str) -> None:
    output = started.output()
    assert len(codes) == started.ranks, f"{codes} in {phase}:\n{output}"
    assert set(codes) <= {0, 75}, f"{codes} in {phase}:\n{output}"
    if codes[0] == 75:
        assert "same command" in output, output
    assert not list(started.out.glob("running*")), output
    if not started.torchrun:
        assert "Traceback" not in output, output
    end = time.monotonic() + 30
    while left := started.left():
        assert time.monotonic() < end, f"{left} are left:\n{output}"
        time.sleep(0.05)


def _finish(lab: Lab, folder: Path, runs: Counter[tuple[int, bool]]) -> int:
    """The same commands without signals: each ends as an undisturbed run."""
    finished = 0
    for ranks, torchrun in LAUNCHES:
        out = folder / f"run-{ranks}-{torchrun}-{runs[ranks, torchrun]}"
        if not out.exists():
            continue
        started = Started(lab, out, ranks, torchrun)
        try:
            assert set(started.codes()) == {0}, started.output()
        finally:
            started.kill()
        assert_same_run(out, folder / f"reference-{ranks}")
        finished += 1
    return finished
