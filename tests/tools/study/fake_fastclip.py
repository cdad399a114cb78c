"""A fake `fastclip train` and `fastclip eval`: the same arguments and files, without training.

A run has 10 steps. `calls` in its folder has the arguments of each call, one per line. The algorithm decides
the outcome: mbcl fails; sogclr hangs at step 5 the first time, and saves when it is stopped; all others
succeed. The score is best at a learning rate of 0.001.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

PROGRAM = (sys.executable, __file__)
STEPS = 10


def main(command, *arguments):
    options = dict(one[2:].partition("=")[::2] for one in arguments if one.startswith("--"))
    folder = Path(arguments[0] if command == "eval" else options["out"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "calls", "a") as file:
        file.write(json.dumps([command, *arguments]) + "\n")
    if command == "eval":
        print(json.dumps({"results": [], "threads": os.environ.get("OMP_NUM_THREADS")}))
        return 0
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    first, metrics = _saved_step(folder), folder / "metrics.jsonl"
    for step in range(first + 1, STEPS + 1):
        score = 1 - abs(float(options.get("optim.lr", 0.001)) - 0.001)
        record = {"step": step, "epoch": step * float(options["epochs"]) / STEPS}
        with open(metrics, "a") as file:
            file.write(json.dumps(record | {"evaluation": {"mean_recall@1": score, "equal": 0.5}}) + "\n")
        if options["algorithm"] == "mbcl":
            print("fastclip train: mbcl always fails", file=sys.stderr)
            return 1
        while options["algorithm"] == "sogclr" and not stop and step == 5 and not first:
            time.sleep(0.01)
        if stop:
            _save(folder, step, options)
            return 75
    _save(folder, STEPS, options)
    (folder / "model").mkdir(exist_ok=True)
    return 0


def _saved_step(folder):
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*")), default=0)


def _save(folder, step, options):
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    config = {"epochs": float(options["epochs"]), "batch": {"size": 1}}
    metadata = {"step": step, "config": config, "num_samples": STEPS / float(options["epochs"])}
    (path / "state.json").write_text(json.dumps({"facts": metadata, "files": {}}))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
