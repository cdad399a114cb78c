"""Saves a benchmark's figures under results/ with the command, date, versions and machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

RESULTS = Path(__file__).parent.parent / "results"


def save(name: str, seed: int | list[int], figures: dict, command: str | None = None) -> None:
    """Write results/NAME.json atomically: an interrupted run leaves the old figures unchanged."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "command": command or "python " + " ".join(["-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "seed": seed,
        "versions": {
            package: version(package) for package in ("fastclip", "torch", "open_clip_torch", "numpy")
        },
        "machine": {
            "cpu_threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "figures": figures,
    }
    part = RESULTS / f"{name}.json.part"
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.rename(RESULTS / f"{name}.json")
    print(f"saved in results/{name}.json")


def interleaved(cases: dict, rounds: int) -> dict[str, float]:
    """Median seconds of each case; every round runs all of them, so a busy machine slows all equally."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()
    for _ in range(rounds):
        for name, case in cases.items():
            start = perf_counter()
            case()
            seconds[name].append(perf_counter() - start)
    return {name: median(times) for name, times in seconds.items()}
