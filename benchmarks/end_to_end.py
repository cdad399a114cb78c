"""Samples/s of a whole training run, compared with open_clip's own trainer: loader, towers, loss, update.

Both train the same model on the same shards with the same batch, crops, number of steps and 2 threads. On
emoji open_clip has 1 or 2 loader workers, whichever is faster, and fastclip decodes once, as its recipe says;
on photos both have 1, which decodes a batch in a fraction of a step. A speed is the median over the steps
that the trainer itself reports, but the first; runs of the two alternate. open_clip_train needs
webdataset 0.2.86, which is installed into a folder of its own. `fastclip data get emoji` gets the emoji.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import open_clip

from benchmarks.decode import photo, write_shards
from benchmarks.record import save
from benchmarks.unpadded_text import lengths_like
from fastclip.model import OWN_MODELS

SEED, WEBDATASET = 0, "webdataset==0.2.86"
OUR_MAIN = """
import sys
from fastclip.cli import main
if main(sys.argv[1:]): sys.exit(1)
"""
THEIR_MAIN = """
import sys, open_clip
open_clip.add_model_config(sys.argv[1])
from open_clip_train.main import main
main(sys.argv[2:])
"""
PEAK = """
import torch
print("peak", torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
"""
THEIR_PRECISION = {"float32": "fp32", "bfloat16": "amp_bf16"}


class Speed(NamedTuple):
    """What a trainer needs: the median over its steps but the first, and the memory of a GPU (0 on a CPU)."""

    samples_per_second: float
    peak_bytes: int

    @classmethod
    def of(cls, speeds: list[float], output: str) -> Speed:
        return cls(median(speeds[1:]), int(re.findall(r"^peak (\d+)$", output, re.MULTILINE)[-1]))


class Case:
    """A model and the shards it is trained on, and where."""

    def __init__(
        self,
        recipe: str,
        model: str,
        shards: list[Path],
        pairs: int,
        batch: int,
        steps: int,
        workers: tuple[int, ...],
        device: str = "cpu",
        precision: str = "float32",
    ):
        self.recipe, self.model, self.shards, self.pairs = recipe, model, shards, pairs
        self.batch, self.steps, self.workers = batch, steps, workers
        self.device, self.precision = device, precision
        self.scale = "0.8, 1.0" if recipe == "emoji" else "0.9, 1.0"  # of the random crops

    def theirs(self, workers: int, folder: Path) -> Speed:
        """open_clip_train."""
        first, last = self.shards[0], self.shards[-1]
        shards = str(first.parent / f"{{{first.stem}..{last.stem}}}.tar")
        options = {
            "model": self.model, "train-data": shards, "dataset-type": "webdataset", "workers": workers,
            "train-num-samples": self.batch * self.steps, "batch-size": self.batch, "epochs": 1,
            "lr": 1e-4, "warmup": 1, "log-every-n-steps": 1,
            "precision": THEIR_PRECISION[self.precision], "device": self.device,
            "logs": str(folder), "name": "theirs", "seed": SEED,
        }  # fmt: skip
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        arguments += ["--local-loss", "--gather-with-grad", "--aug-cfg", f"scale=({self.scale})"]
        output = self._run(THEIR_MAIN, [str(OWN_MODELS), *arguments], {"PYTHONPATH": str(their_webdataset())})
        return Speed.of([float(speed) for speed in re.findall(r"([\d.]+)/s, [\d.]+/s/gpu", output)], output)

    def ours(self, workers: int, folder: Path) -> Speed:
        """`fastclip train`."""
        options = {
            "config": self.recipe, "precision": self.precision, "device": self.device,
            "data.train": self.shards[0].parent, "data.augment": f"{{scale: [{self.scale}]}}",
            "batch.size": self.batch, "optim.warmup": 1,
            "epochs": self.batch * self.steps / self.pairs, "evaluate.every_epochs": 1000, "seed": SEED,
            "log.every_steps": 1, "out": folder / "ours",
        }  # fmt: skip
        if self.recipe != "emoji":
            options["data.workers"] = workers
        arguments = [f"--{name}={value}" for name, value in options.items()]
        cache = {"FASTCLIP_CACHE": str(folder / "cache")}
        output = self._run(OUR_MAIN, ["train", *arguments], cache)
        records = (folder / "ours" / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in records if '"loss"' in line]
        return Speed.of([record["time"]["samples_per_second"] for record in found], output)

    def measure(self, rounds: int) -> dict:
        """The speed of each trainer with its better number of loader workers, and their ratio."""
        speeds: dict[str, dict[int, list[float]]] = {"open_clip": {}, "fastclip": {}}
        for _ in range(rounds):
            for workers in self.workers:
                for name, run in (("open_clip", self.theirs), ("fastclip", self.ours)):
                    with tempfile.TemporaryDirectory() as folder:
                        speed = run(workers, Path(folder)).samples_per_second
                        speeds[name].setdefault(workers, []).append(speed)
        best = {
            name: max(median(found) for found in by_workers.values()) for name, by_workers in speeds.items()
        }
        figures = {f"{name}_samples_per_second": round(speed, 2) for name, speed in best.items()}
        return figures | {"ratio": round(best["fastclip"] / best["open_clip"], 3), "rounds": rounds}

    def _run(self, main: str, arguments: list[str], environment: dict[str, str]) -> str:
        threads = {"OMP_NUM_THREADS": "2"} if self.device == "cpu" else {}
        done = subprocess.run(
            [sys.executable, "-c", main + PEAK, *arguments],
            env=os.environ | threads | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{main.strip()}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
        return done.stdout + done.stderr


def their_webdataset() -> Path:
    """The folder of the version of webdataset that open_clip_train runs with."""
    folder = Path(tempfile.gettempdir()) / WEBDATASET
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, WEBDATASET], check=True)
    return folder


def photo_shards(folder: Path, like: str, count: int) -> list[Path]:
    """640 × 480 JPEGs with captions of CC3M's or CC12M's lengths."""
    import torch

    rng, tokenizer = np.random.default_rng(SEED), open_clip.get_tokenizer("ViT-B-32")
    words = [token[:-4] for token in tokenizer.encoder if token.endswith("</w>") and token[:-4].isalpha()]
    words = [word for word in words if word.isascii() and len(tokenizer.encode(word)) == 1]
    lengths = lengths_like(like, count, torch.Generator().manual_seed(SEED))
    text = [" ".join(rng.choice(words, length - 2)) for length in lengths]
    files = [photo(rng, 640, 480) for _ in range(64)]
    folder.mkdir()
    write_shards(folder, [files[i % len(files)] for i in range(count)], text)
    return sorted(folder.glob("*.tar"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/emoji"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="one of emoji, CC3M, CC12M")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        emoji = sorted((options.data / "train").glob("*.tar"))
        cases = {"emoji": lambda: Case("emoji", "vit-emoji", emoji, 16_694, 128, 100, (1, 2))}
        for like in ("CC3M", "CC12M"):
            cases[like] = lambda like=like: Case(
                "cc12m-large", "ViT-B-32", photo_shards(Path(temporary) / like, like, 512), 512, 64, 5, (1,)
            )
        figures = {}
        for name, case in cases.items():
            if options.only in (None, name):
                figures[name] = case().measure(options.rounds)
                print(name, figures[name], flush=True)
    if options.only is None:
        save("end_to_end", SEED, figures)


if __name__ == "__main__":
    main()
