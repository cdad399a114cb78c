"""Time of `fastclip data get` with an empty cache, including the download."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from benchmarks.record import save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["scenes", "emoji", "icons"])
    figures = {}
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"FASTCLIP_CACHE": f"{folder}/cache"}
            command = [sys.executable, "-m", "fastclip", "data", "get", name, "--out", f"{folder}/{name}"]
            start = perf_counter()
            subprocess.run(command, env=environment, check=True)
            seconds = perf_counter() - start
            made = json.loads(Path(folder, name, "complete.json").read_text())
        figures[name] = {"seconds": round(seconds, 1), "pairs": made["pairs"], "tasks": len(made["tasks"])}
        print(name, figures[name], flush=True)
    save("data_get", 0, figures)


if __name__ == "__main__":
    main()
