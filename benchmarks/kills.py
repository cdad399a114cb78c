"""Kills runs at random moments, again and again, and checks that the result is bit-identical."""

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
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            figures[f"K={ranks}"] = kill_repeatedly(Path(folder), ranks, kills, Random(seed))
    save("kills", seed, figures)


def kill_repeatedly(folder: Path, ranks: int, kills: int, random: Random) -> dict:
    """Kill and resume this often; AssertionError if the end differs in one bit from an undisturbed run."""
    lab = Lab(folder, epochs=2 * kills)  # 12 steps per kill, more than it needs
    moments = Counter()
    for number in range(kills):
        moment = random.choice(MOMENTS)
        lab.start(folder / "run", ranks).kill_during(moment, random)
        moments[moment] += 1
        print(f"K={ranks}: kill {number + 1} of {kills}, during {moment}", flush=True)
    lab.start(folder / "run", ranks).finish(timeout=600)
    assert_same_run(folder / "run", lab.reference(ranks))
    steps = metrics(folder / "run")[-1]["step"]
    print(f"K={ranks}: bit-identical after {kills} kills and {steps} steps", flush=True)
    return {
        "algorithm": ALGORITHM[ranks],
        "steps": steps,
        "kills": dict(sorted(moments.items())),
        "bit_equal": ["weights", "optimizer", "sample state", "metrics"],
    }


if __name__ == "__main__":
    main()
