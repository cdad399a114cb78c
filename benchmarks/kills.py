"""Kills runs at random moments, again and again, and looks whether they end as if nothing had happened."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from tests.training.runs import ALGORITHM, MOMENTS, Lab, assert_same_run, metrics

from benchmarks.record import save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    kills, seed, figures = parser.parse_args().kills, 0, {}
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            figures[f"K={workers}"] = kill_again_and_again(Path(folder), workers, kills, Random(seed))
    save("kills", seed, figures)


def kill_again_and_again(folder: Path, workers: int, kills: int, random: Random) -> dict:
    """Kill −9 and resume this often; AssertionError if a bit of the end differs from an undisturbed run."""
    lab = Lab(folder, epochs=2 * kills)  # 12 steps for each kill, which is more than it can need
    moments = Counter()
    for number in range(kills):
        moment = random.choice(MOMENTS)
        lab.start(folder / "run", workers).kill_during(moment, random)
        moments[moment] += 1
        print(f"K={workers}: kill {number + 1} of {kills}, during {moment}", flush=True)
    lab.start(folder / "run", workers).finish(timeout=600)
    assert_same_run(folder / "run", lab.reference(workers))
    steps = metrics(folder / "run")[-1]["step"]
    print(f"K={workers}: the same end, bit for bit, after {kills} kills and {steps} steps", flush=True)
    return {
        "algorithm": ALGORITHM[workers],
        "steps": steps,
        "kills": dict(sorted(moments.items())),
        "bit_equal": ["weights", "optimizer", "sample state", "metrics"],
    }


if __name__ == "__main__":
    main()
