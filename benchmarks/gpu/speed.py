"""Parts that measure runs of ViT-B-32: samples/s and memory, against open_clip_train and `fastclip plan`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.end_to_end import Case, Speed, photo_shards
from benchmarks.gpu.bench import Bench, Outcome
from fastclip.tools.profiling.plan import make_plan
from fastclip.tools.profiling.plan_command import make_job

RECIPE, WORKERS = "cc12m-large", 4
TOLERANCE = 0.25  # of the planned memory; the allocator's rounding is not planned


def against_open_clip(bench: Bench) -> Outcome:
    """Samples/s and peak memory of `fastclip train` and of open_clip_train: the same shards, model, batch."""
    ours, theirs = _measured(bench, "ours"), _measured(bench, "theirs")
    figures: dict = {"fastclip": ours._asdict(), "open_clip": theirs._asdict()}
    figures["speed_ratio"] = ours.samples_per_second / theirs.samples_per_second
    found = f"{ours.samples_per_second:,.0f} samples/s against {theirs.samples_per_second:,.0f}"
    if theirs.peak_bytes:
        figures["memory_ratio"] = ours.peak_bytes / theirs.peak_bytes
        found += f", {ours.peak_bytes >> 20:,} MiB against {theirs.peak_bytes >> 20:,}"
    return Outcome(figures["speed_ratio"] >= 0.95, found, figures)


def against_plan(bench: Bench) -> Outcome:
    """The peak memory of a run is what `fastclip plan` estimates."""
    batch, _, pairs = sizes(bench)
    options = ["--precision=bfloat16", f"--batch.size={batch}"]
    job, _ = make_job(options, [RECIPE], "ib", "1", 1, batch, "fastclip-v3", None, None, pairs)
    memory = make_plan(job).rows[0].memory
    assert memory.activations is not None
    low, high = (memory.counted + part for part in memory.activations)
    peak = _measured(bench, "ours").peak_bytes
    figures = {"measured_bytes": peak, "planned_bytes": [low, high]}
    good = (1 - TOLERANCE) * low <= peak <= (1 + TOLERANCE) * high
    return Outcome(good, f"{peak >> 20:,} MiB, planned {low >> 20:,}–{high >> 20:,}", figures)


def sizes(bench: Bench) -> tuple[int, int, int]:
    """Batch, steps and pairs."""
    return (256, 30, 8192) if bench.gpus else (16, 3, 64)


def _measured(bench: Bench, trainer: str) -> Speed:
    """Of the second of two runs: the first fills the caches of files and kernels."""
    if trainer not in bench.kept:
        run = getattr(_case(bench), trainer)
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                bench.kept[trainer] = run(WORKERS, Path(folder))
    return bench.kept[trainer]


def _case(bench: Bench) -> Case:
    batch, steps, pairs = sizes(bench)
    if "shards" not in bench.kept:
        bench.kept["shards"] = photo_shards(bench.folder / "photos", "CC12M", pairs)
    precision = "bfloat16" if bench.gpus else "float32"
    where = bench.device.type, precision
    return Case(RECIPE, "ViT-B-32", bench.kept["shards"], pairs, batch, steps, (WORKERS,), *where)
