"""Parts that train: two ranks over NCCL, a rank that is killed, minutes of real training."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.bench import Bench, Outcome
from benchmarks.gpu.numbers import train_steps
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.interrupts import StoppedCleanly
from fastclip.distributed.world import World
from fastclip.processes import PROGRAM, children, free_port, start
from fastclip.run.metrics_file import read_metrics
from fastclip.training.trainer import train

RANKS = 2
LIMIT = 1e-3  # relative difference of the losses of two ranks and one, in float32
MOST_SECONDS = 60  # for a job to end after one of its ranks was killed
START_SECONDS = 600


def two_ranks(bench: Bench) -> Outcome:
    """A run of two ranks has the losses of one process, step by step."""
    name = "killed" if bench.short else "two"  # the run that was killed has enough steps for the short form
    if not bench.short:
        with _launched(bench, name) as ranks:
            codes = [rank.wait(START_SECONDS) for rank in ranks]
        if any(codes):
            return Outcome(False, f"exit codes {codes}: {_last_lines(bench, name)}", {"exit_codes": codes})
    difference = _difference(bench, name)
    return Outcome(difference <= LIMIT, f"losses differ by {difference:.0e}", {"loss_difference": difference})


def killed_rank(bench: Bench) -> Outcome:
    """After kill −9 of one rank the job ends within a minute, and the same command finishes the run."""
    with _launched(bench, "killed", checkpoint__every_steps=1) as ranks:
        _wait_for_step(bench.folder / "killed", 3, ranks)
        began = time.monotonic()
        os.kill(ranks[1].pid, signal.SIGKILL)
        try:
            code = ranks[0].wait(2 * MOST_SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"the other rank still ran after {2 * MOST_SECONDS} s", {})
        seconds = time.monotonic() - began
    figures = {"seconds_until_the_job_ended": seconds, "exit_code_of_the_other_rank": code}
    found = f"the other rank ended {seconds:.0f} s later with code {code}"
    good = seconds <= MOST_SECONDS and code not in (0, 75)
    if bench.short:
        return Outcome(good, found, figures)
    with _launched(bench, "killed", checkpoint__every_steps=1) as ranks:
        codes = [rank.wait(START_SECONDS) for rank in ranks]
    difference = _difference(bench, "killed") if not any(codes) else float("inf")
    figures |= {"exit_codes_of_the_resumed_run": codes, "loss_difference": difference}
    found += f"; resumed, losses differ by {difference:.0e}"
    return Outcome(good and difference <= LIMIT, found, figures)


def real_training(bench: Bench) -> Outcome:
    """Minutes of training with evaluations: the loss falls, retrieval improves, no step is skipped."""
    emoji = Path("data/emoji/train").is_dir() and not bench.short
    changed: dict[str, object] = {"epochs": 1 if bench.short else 10_000, "evaluate__every_epochs": 1}
    changed |= {"checkpoint__every_minutes": 2, "log__every_steps": 1 if bench.short else 20}
    if emoji:
        changed |= {"config": "emoji", "data__train": "data/emoji/train", "batch__size": 512}
        changed |= {"evaluate__pairs": "data/emoji/tasks/twemoji_retrieval/test/*.tar"}
    else:
        changed |= {"evaluate__pairs": bench.folder / "held-out"}
    if bench.gpus:
        changed["precision"] = "bfloat16"
    timer = threading.Timer(60 * bench.minutes, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        train(resolve(parse(bench.options("training", **changed))), World.alone(bench.device))
    except StoppedCleanly:
        pass  # its time is over
    finally:
        timer.cancel()
    records = read_metrics(bench.folder / "training" / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    recalls = [record["evaluation"]["mean_recall@1"] for record in records if "evaluation" in record]
    skipped = sum(record["skipped"] for record in records if "loss" in record)
    speed = records[-2 if "evaluation" in records[-1] else -1]["time"]["samples_per_second"]
    figures = {
        "pairs": "emoji" if emoji else "scenes",
        "first_and_last_loss": [losses[0], losses[-1]],
        "mean_recall_at_1": recalls,
        "skipped_steps": skipped,
        "samples_per_second": speed,
    }
    good = losses[-1] < losses[0] and not skipped and (bench.short or max(recalls[1:]) > 2 * recalls[0])
    found = f"loss {losses[0]:.2f} → {losses[-1]:.2f}, recall@1 {recalls[0]:.3f} → {recalls[-1]:.3f}"
    return Outcome(good, f"{found}, {speed:,.0f} samples/s, {skipped} steps skipped", figures)


@contextmanager
def _launched(bench: Bench, name: str, **changed: object) -> Iterator[list[subprocess.Popen]]:
    """`fastclip train` as two ranks; none outlives the block."""
    place = {"WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if bench.device.type == "cpu":
        place |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": 1}
    command = [*PROGRAM, "train", *bench.options(name, **changed)]
    with children() as ranks:
        for rank in range(RANKS):
            own = {key: str(value) for key, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}
            with open(_log(bench, name, rank), "ab") as log:
                ranks.append(start(command, stdout=log, stderr=log, env=os.environ | own))
        yield ranks


def _wait_for_step(run: Path, step: int, ranks: list[subprocess.Popen]) -> None:
    end = time.monotonic() + START_SECONDS
    while step not in _losses(run):
        if any(rank.poll() is not None for rank in ranks) or time.monotonic() > end:
            raise RuntimeError(f"The run ended before step {step}: {run}.")
        time.sleep(0.05)


def _difference(bench: Bench, name: str) -> float:
    """The largest relative difference of a loss from that of one process."""
    if "losses" not in bench.kept:
        bench.kept["losses"] = train_steps(bench, bench.device).losses
    ours = _losses(bench.folder / name)
    return max(abs(ours[step] / loss - 1) for step, loss in enumerate(bench.kept["losses"], start=1))


def _losses(run: Path) -> dict[int, float]:
    if not (run / "metrics.jsonl").exists():
        return {}
    return {
        record["step"]: record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record
    }


def _log(bench: Bench, name: str, rank: int) -> Path:
    return bench.folder / f"{name}.rank{rank}.log"


def _last_lines(bench: Bench, name: str) -> str:
    lines = [line for rank in range(RANKS) for line in _log(bench, name, rank).read_text().splitlines()[-1:]]
    return " | ".join(lines)
