"""Time of `fastclip --help`, compared with a Python that does nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.record import interleaved, save

TARGET = 0.5  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    commands = {
        "fastclip --help": [str(Path(sys.executable).with_name("fastclip")), "--help"],
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    seconds = interleaved({name: lambda c=command: _run(c) for name, command in commands.items()}, rounds)
    ours, nothing = seconds.values()
    figures = {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "ratio": round(ours / nothing, 1),
        "target_seconds": TARGET,
        "rounds": rounds,
    }
    print(figures)
    save("start_up", 0, figures)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
