"""A cable unplugged during a run of two hosts: how soon and with what message the job stops, and whether it
resumes from its checkpoint once the cable is back, with the same result as an undisturbed run.

It needs root, iproute2 and the emoji pairs: `fastclip data get emoji`.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.namespaces import Hosts
from benchmarks.record import save
from fastclip.run.metrics_file import read_metrics

TIMEOUT = 20  # seconds that ranks wait for each other
GRACE = 60  # seconds more for torchrun to end
CUT_AFTER = 25  # steps, where checkpoints are 10 apart
OPTIONS = [
    "--config=emoji",
    "--data.train=data/emoji/train/00000.tar",
    "--evaluate.pairs=null",
    "--batch.size=64",
    "--epochs=2",
    "--checkpoint.every_steps=10",
    "--log.every_steps=1",
    f"--timeout={TIMEOUT}",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as name, Hosts(2) as hosts:
        folder = Path(name)
        undisturbed = _finished(hosts, folder / "undisturbed", folder)
        nodes = hosts.torchrun(_command(folder / "cut"), folder)
        _wait_for_step(CUT_AFTER, folder / "cut", nodes)
        hosts.cut(1)
        start = time.monotonic()
        logs = [folder / f"host{host}.log" for host in range(2)]
        _wait_until(lambda: all(map(_final_message, logs)), 5 * TIMEOUT)
        stopped = time.monotonic() - start
        messages, last = [_final_message(log) for log in logs], max(_losses(folder / "cut"))
        _wait_until(lambda: all(node.poll() is not None for node in nodes), GRACE)
        launchers = [node.poll() for node in nodes]
        hosts.stop()
        hosts.reconnect(1)
        resumed = _finished(hosts, folder / "cut", folder)
        log = (folder / "host0.log").read_text()
    figures = {
        "timeout_s": TIMEOUT,
        "last_step_before_the_cut": last,
        "seconds_until_all_workers_had_stopped": round(stopped, 1),
        "said": messages,
        f"exit_codes_of_torchrun_within_{GRACE}_s": launchers,
        "went_on_after_step": int(re.findall(r"step (\d+)", log)[0]),
        "steps": len(resumed),
        "largest_difference_of_a_loss": max(abs(undisturbed[step] - resumed[step]) for step in undisturbed),
    }
    print(json.dumps(figures, indent=1))
    save("cut_link", 0, figures)


def _command(out: Path) -> list[str]:
    return ["-m", "fastclip", "train", *OPTIONS, f"--out={out}"]


def _finished(hosts: Hosts, out: Path, logs: Path) -> dict[int, float]:
    """Run to the end; return the losses."""
    hosts.wait(hosts.torchrun(_command(out), logs), logs, 300)
    return _losses(out)


def _losses(out: Path) -> dict[int, float]:
    if not (out / "metrics.jsonl").exists():
        return {}
    return {
        record["step"]: record["loss"] for record in read_metrics(out / "metrics.jsonl") if "loss" in record
    }


def _wait_for_step(step: int, out: Path, nodes: list[subprocess.Popen]) -> None:
    while not any(done >= step for done in _losses(out)):
        if any(node.poll() is not None for node in nodes):
            raise SystemExit("The run ended before its cable was unplugged.")
        time.sleep(0.1)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for the condition, at most this many seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)


def _final_message(log: Path) -> str:
    """The error that fastclip printed, without torch's part of it and torchrun's own report."""
    ends = (line for line in log.read_text().splitlines() if line.startswith("fastclip train:"))
    return next(ends, "").split(" torch says:")[0]


if __name__ == "__main__":
    main()
