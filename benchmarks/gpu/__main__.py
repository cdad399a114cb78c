"""An hour's programme for a machine with one or two GPUs: is everything right there, and how fast is it?

Each part says what it would prove. Without a GPU, the parts that can run on a CPU do, and the others are
listed. It prints one table and writes results/gpu.json. `fastclip data get emoji` first, for a better test of
training; otherwise it trains on generated scenes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.gpu import jobs, numbers, speed
from benchmarks.gpu.bench import Bench, Outcome, Part
from benchmarks.record import save
from fastclip.terminal import console

PROGRAMME = (
    Part("losses", "the loss kernels are right on this device", "nothing", numbers.losses_and_gradients),
    Part("precisions", "so are whole steps in each precision", "nothing", numbers.steps_in_every_precision),
    Part("no waiting", "the host never waits for the GPU within a step", "a GPU", numbers.never_waits),
    Part("pinned memory", "batches reach the GPU while it works", "a GPU", numbers.pinned_memory),
    Part("compile", "torch.compile changes the speed and not the result", "a GPU", numbers.compiled),
    Part("killed rank", "a rank's death ends the job, and it resumes", "two GPUs", jobs.killed_rank),
    Part("two ranks", "NCCL ranks train like one process", "two GPUs", jobs.two_ranks),
    Part("open_clip", "training is at least as fast as open_clip_train", "minutes", speed.against_open_clip),
    Part("plan", "`fastclip plan` estimates memory well", "a GPU", speed.against_plan),
    Part("training", "real training works over many minutes", "nothing", jobs.real_training),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=10, help="of real training")
    parser.add_argument("--only", help=f"parts, separated by commas: {', '.join(p.name for p in PROGRAMME)}")
    parser.add_argument("--short", action="store_true", help="the least of everything, to test the programme")
    options = parser.parse_args(words)
    chosen = options.only.split(",") if options.only else [part.name for part in PROGRAMME]
    if unknown := set(chosen) - {part.name for part in PROGRAMME}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(torch.device(options.device), Path(folder), options.short, options.minutes)
        for part in PROGRAMME:
            if part.name in chosen:
                rows.append((part, *perform(part, bench)))
    console().print(table(rows))
    name = "gpu-short" if options.short else "gpu"
    arguments = sys.argv[1:] if words is None else words
    figures = machine(bench) | {"parts": {part.name: _record(part, *row) for part, *row in rows}}
    save(name, numbers.SEED, figures, " ".join(["python -m benchmarks.gpu", *arguments]))
    return int(any(outcome is not None and not outcome.good for _, outcome, _ in rows))


def perform(part: Part, bench: Bench) -> tuple[Outcome | None, float]:
    """The outcome, None if something is missing, and the seconds it took; an error is that of its part."""
    if bench.lacks(part.needs):
        return None, 0.0
    print(f"{part.name}: {part.proves} …", flush=True)
    start = time.monotonic()
    try:
        outcome = part.run(bench)
    except (Exception, SystemExit) as error:
        outcome = Outcome(False, f"{type(error).__name__}: {error}"[:500], {})
    return outcome, time.monotonic() - start


def table(rows: list[tuple[Part, Outcome | None, float]]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for heading in ("part", "would prove that", "result", "found", "s"):
        shown.add_column(heading, justify="right" if heading == "s" else "left", overflow="fold")
    for part, outcome, seconds in rows:
        result = f"needs {part.needs}" if outcome is None else _verdict(outcome)
        shown.add_row(part.name, part.proves, result, outcome.found if outcome else "", f"{seconds:.0f}")
    return shown


def _verdict(outcome: Outcome) -> str:
    return "ok" if outcome.good else "FAILED"


def machine(bench: Bench) -> dict:
    """What it ran on."""
    if not bench.gpus:
        return {"device": "cpu", "short": bench.short}
    return {
        "device": [torch.cuda.get_device_name(number) for number in range(bench.gpus)],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "short": bench.short,
    }


def _record(part: Part, outcome: Outcome | None, seconds: float) -> dict:
    if outcome is None:
        return {"result": f"needs {part.needs}"}
    return {
        "result": _verdict(outcome),
        "found": outcome.found,
        "seconds": round(seconds, 1),
        **outcome.figures,
    }


if __name__ == "__main__":
    sys.exit(main())
