"""Parts that measure runs of ViT-B-32: samples/s and memory, against open_clip_train and `fastclip plan`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.end_to_end import THEIR_MAIN, photo_shards, run, their_webdataset
from benchmarks.gpu.bench import Bench, Outcome
from fastclip.model import OWN_MODELS
from fastclip.tools.profiling.plan import make_plan
from fastclip.tools.profiling.plan_command import make_job

MODEL, RECIPE, WORKERS = "ViT-B-32", "cc12m-large", 4
PEAK = (
    "\nimport torch\nprint('peak', torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)\n"
)
OUR_MAIN = "import sys\nfrom fastclip.cli import main\nif main(sys.argv[1:]): sys.exit(1)"
TOLERANCE = 0.25  # of the planned memory; the allocator's rounding is not planned


class Speed(NamedTuple):
    """What a trainer needs."""

    samples_per_second: float
    peak_bytes: int


def against_open_clip(bench: Bench) -> Outcome:
    """Samples/s and peak memory of `fastclip train` and of open_clip_train: the same shards, model, batch."""
    ours, theirs = _ours(bench), _theirs(bench)
    figures: dict = {"fastclip": ours._asdict(), "open_clip": theirs._asdict()}
    figures["speed_ratio"] = ours.samples_per_second / theirs.samples_per_second
    found = f"{ours.samples_per_second:,.0f} samples/s against {theirs.samples_per_second:,.0f}"
    if theirs.peak_bytes:
        figures["memory_ratio"] = ours.peak_bytes / theirs.peak_bytes
        found += f", {ours.peak_bytes >> 20:,} MiB against {theirs.peak_bytes >> 20:,}"
    return Outcome(figures["speed_ratio"] >= 0.95, found, figures)


def against_plan(bench: Bench) -> Outcome:
    """The peak memory of a run is what `fastclip plan` estimates."""
    batch, _, pairs = _sizes(bench)
    options = ["--precision=bfloat16", f"--batch.size={batch}"]
    job, _ = make_job(options, [RECIPE], "ib", "1", 1, batch, "fastclip-v3", None, None, pairs)
    memory = make_plan(job).rows[0].memory
    assert memory.activations is not None
    low, high = (memory.counted + part for part in memory.activations)
    peak = _ours(bench).peak_bytes
    figures = {"measured_bytes": peak, "planned_bytes": [low, high]}
    good = (1 - TOLERANCE) * low <= peak <= (1 + TOLERANCE) * high
    return Outcome(good, f"{peak >> 20:,} MiB, planned {low >> 20:,}–{high >> 20:,}", figures)


def _sizes(bench: Bench) -> tuple[int, int, int]:
    """Batch, steps and pairs."""
    return (256, 30, 8192) if bench.gpus else (64, 6, 512)


def _shards(bench: Bench) -> list[Path]:
    if "shards" not in bench.kept:
        bench.kept["shards"] = photo_shards(bench.folder / "photos", "CC12M", _sizes(bench)[2])
    return bench.kept["shards"]


def _ours(bench: Bench) -> Speed:
    """Of the second of two runs: the first fills the caches of files and kernels."""
    if "ours" in bench.kept:
        return bench.kept["ours"]
    batch, steps, pairs = _sizes(bench)
    options = {
        "config": RECIPE, "data.train": _shards(bench)[0].parent, "batch.size": batch, "optim.warmup": 1,
        "precision": "bfloat16" if bench.gpus else "float32", "data.workers": WORKERS, "log.every_steps": 1,
        "epochs": batch * steps / pairs, "evaluate.every_epochs": 1000,
    }  # fmt: skip
    for _ in range(2):
        with tempfile.TemporaryDirectory() as name:
            words = ["train", *(f"--{key}={value}" for key, value in options.items()), f"--out={name}/run"]
            output = run([sys.executable, "-c", OUR_MAIN + PEAK, *words], {"FASTCLIP_CACHE": f"{name}/cache"})
            lines = (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()
        speeds = [json.loads(line)["time"]["samples_per_second"] for line in lines if '"loss"' in line]
        bench.kept["ours"] = Speed(median(speeds[1:]), _peak(output))
    return bench.kept["ours"]


def _theirs(bench: Bench) -> Speed:
    batch, steps, _ = _sizes(bench)
    shards = _shards(bench)
    for _ in range(2):
        with tempfile.TemporaryDirectory() as name:
            options = {
                "model": MODEL, "train-data": str(shards[0].parent / f"{{0..{len(shards) - 1}}}.tar"),
                "dataset-type": "webdataset", "workers": WORKERS, "train-num-samples": batch * steps,
                "batch-size": batch, "epochs": 1, "lr": 1e-4, "warmup": 1, "log-every-n-steps": 1,
                "precision": "amp_bf16" if bench.gpus else "fp32", "device": bench.device.type,
                "logs": name, "name": "theirs", "seed": 0,
            }  # fmt: skip
            words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
            words += ["--local-loss", "--gather-with-grad", "--aug-cfg", "scale=(0.9, 1.0)"]
            command = [sys.executable, "-c", THEIR_MAIN + PEAK, str(OWN_MODELS), *words]
            output = run(command, {"PYTHONPATH": str(their_webdataset())})
    speeds = [float(speed) for speed in re.findall(r"([\d.]+)/s, [\d.]+/s/gpu", output)]
    return Speed(median(speeds[1:]), _peak(output))


def _peak(output: str) -> int:
    return int(re.findall(r"^peak (\d+)$", output, re.MULTILINE)[-1])
