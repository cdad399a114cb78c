"""Synthetic run folders: the files that training would have written."""

import json
from functools import cache

import torch

from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.run.checkpoint import Checkpoints
from fastclip.run.folder import write_config

PAIRS, BATCH, EPOCHS = 640, 64, 4
TOTAL = 40  # steps
VERSIONS = {"fastclip": "0.0.test", "torch": "9.9", "python": "3.99"}


def make_run(folder, algorithm="fastclip-v3", steps=TOTAL, saved=None, evaluated=True, **options):
    """A run at step `steps`: a record every 5 steps, an evaluation every 10, and a checkpoint at `saved`."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {"algorithm": algorithm, "batch.size": BATCH, "epochs": EPOCHS, **options}
    options["out"] = folder
    config = _config(tuple(f"--{name}={value}" for name, value in options.items()))
    write_config(config, folder)
    records = []
    for step in range(0, steps + 1, 5):
        if step:
            records.append(record(step, peer=algorithm in ("openclip", "siglip")))
        if step % 10 == 0 and evaluated:
            records.append(evaluation(step))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    if saved := steps if saved is None else saved:
        metadata = {
            "step": saved,
            "config": config.written,
            "num_samples": PAIRS,
            "best": {"score": 0.5, "step": saved, "measure": "mean_recall@1"} if evaluated else {},
            "elapsed": 2.0 * saved,
            "workers": 2,
            "versions": VERSIONS,
        }
        Checkpoints(folder / "checkpoints").save(saved, {"weight": torch.zeros(2)}, metadata)
    return folder


@cache
def _config(arguments):
    return resolve(parse(["--config", "scenes", *arguments]))


def record(step, peer=False):
    values = {
        "step": step,
        "epoch": step * BATCH / PAIRS,
        "samples": step * BATCH,
        "loss": 4 / step,
        "tau": 0.07,
        "grad_norm": 1 + 1 / step,
        "skipped": 0,
        "lr": 1e-3,
        "bad": 0,
        "time": {"elapsed": 2.0 * step, "samples_per_second": 30 + step, "data_wait": 0.1, "step": 2.0},
    }
    if not peer:
        values |= {"radius": step / 20, "gamma": 0.2, "tau_lr": 1e-3, "unvisited": max(0.0, 1 - step / 10)}
        values |= {"log_u_q05": -3.0, "log_u_q50": -2.0, "log_u_q95": -0.5, "max_weight": 1.0}
    return values


def evaluation(step):
    names = (
        "image_retrieval_recall@1",
        "text_retrieval_recall@1",
        "image_retrieval_recall@5",
        "mean_recall@1",
    )
    values = {name: (step + number) / 100 for number, name in enumerate(names)}
    return {"step": step, "epoch": step * BATCH / PAIRS, "evaluation": values, "best": step > 0}


def write_results(folder, *results):
    """Write results of `fastclip eval`: dicts, or bytes as they are."""
    (folder / "evaluation").mkdir(exist_ok=True)
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in results]
    (folder / "evaluation" / "results.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


def result(task, value, measure="acc1", **more):
    scores = {measure: value, "acc5": 0.9}
    return {"task": task, "key": f"{task} {value}", "kind": "classification", "measure": measure,
            "scores": scores, "images": 100, "unusable": 0, "error": ""} | more  # fmt: skip
