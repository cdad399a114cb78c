"""Time until training starts, and the speed-up of a second rank, with `--config emoji`.

It needs the emoji pairs of `fastclip data get emoji`, in the folder --data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.record import save

BATCHES = (128, 1024)  # the recipe's, and one at which the encoders outweigh the weights' gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/emoji"))
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    pairs = arguments.data / "tasks/twemoji_retrieval/test/*.tar"
    options = [
        "--config",
        "emoji",
        "--data.train",
        str(arguments.data / "train"),
        "--evaluate.pairs",
        str(pairs),
    ]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"FASTCLIP_CACHE": f"{folder}/cache"}
        first, again = (_seconds_to_first_step(options, folder, name, environment) for name in ("a", "b"))
        speeds: dict[tuple[int, int], list[float]] = {(b, k): [] for b in BATCHES for k in (1, 2)}
        for number in range(arguments.rounds):
            for (batch, ranks), measured in speeds.items():
                name = f"{batch}-{ranks}-{number}"
                measured.append(
                    _speed([*options, "--batch.size", str(batch)], folder, name, ranks, environment)
                )
    figures: dict = {
        "seconds_to_first_step": {"pairs never seen before": round(first, 1), "again": round(again, 1)},
    }
    for batch in BATCHES:
        one, two = (median(speeds[batch, ranks]) for ranks in (1, 2))
        figures[f"batch {batch}"] = {
            "samples_per_second": {
                "1 process of 1 thread": round(one),
                "2 processes of 1 thread": round(two),
            },
            "speed_up": round(two / one, 2),
        }
    print(figures)
    save("training_speed", 0, figures)


def _seconds_to_first_step(options: list[str], folder: str, name: str, environment: dict) -> float:
    """From the command to the first record of metrics.jsonl."""
    command = [
        sys.executable,
        "-m",
        "fastclip",
        "train",
        *options,
        "--log.every_steps",
        "1",
        "--out",
        f"{folder}/{name}",
    ]
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not any("loss" in record for record in _records(Path(folder, name))):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.02)
        return time.perf_counter() - start
    finally:
        process.kill()
        process.wait()


def _speed(options: list[str], folder: str, name: str, ranks: int, environment: dict) -> float:
    """Samples per second of a short run: the median of its records except the first."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "fastclip", "train", *options]
    command += [
        "--out",
        f"{folder}/{name}",
        "--epochs",
        "1",
        "--log.every_steps",
        "4",
        "--evaluate.every_epochs",
        "100",
    ]
    subprocess.run(command, env=environment | {"OMP_NUM_THREADS": "1"}, check=True, stderr=subprocess.DEVNULL)
    records = [record for record in _records(Path(folder, name)) if "loss" in record]
    return median(record["time"]["samples_per_second"] for record in records[1:])


def _records(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    main()
