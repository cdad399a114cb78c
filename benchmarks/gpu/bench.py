"""What the parts of the programme share: the device, pairs to train on, runs, and what a part reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fastclip.config.parse import parse
from fastclip.config.resolved import Resolved, resolve
from fastclip.datasets.scenes import draw_shard

Needs = Literal["nothing", "minutes", "a GPU", "two GPUs"]


class Outcome(NamedTuple):
    """What a part found."""

    good: bool
    found: str
    figures: dict[str, Any]


class Part(NamedTuple):
    """A row of the programme."""

    name: str
    proves: str
    needs: Needs
    """Without GPUs, parts that need two run over gloo. The short form leaves out what takes minutes."""
    run: Callable[[Bench], Outcome]


@dataclass
class Bench:
    """The machine, and a folder with pairs and runs.

    Args:
        short: the least that exercises every part, for tests.
        minutes: of real training.
    """

    device: torch.device
    folder: Path
    short: bool
    minutes: float
    kept: dict[str, Any] = field(default_factory=dict)
    """What one part measured for another."""

    def __post_init__(self) -> None:
        for name, shard, count in (("train", 0, 96 if self.short else 4096), ("held-out", 1, 64)):
            (self.folder / name).mkdir()
            draw_shard(self.folder / name / "pairs.tar", shard, count)

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count() if self.device.type == "cuda" else 0

    @property
    def steps(self) -> int:
        """Of runs that are compared with each other."""
        return 3 if self.short else 40

    def lacks(self, needs: Needs) -> bool:
        return {"minutes": self.short, "a GPU": not self.gpus, "two GPUs": self.gpus == 1}.get(needs, False)

    def options(self, name: str, **changed: object) -> list[str]:
        """Of `fastclip train`, for a run called `name`."""
        batch, pairs = (16, 96) if self.short else (64, 4096)
        options = {
            "config": "scenes",
            "out": self.folder / name,
            "data.train": self.folder / "train",
            "evaluate.pairs": "null",
            "data.keep_decoded": "false",
            "batch.size": batch,
            "epochs": 1000 if self.short else self.steps * batch / pairs,  # the short form ends it itself
            "log.every_steps": 1,
        } | {key.replace("__", "."): value for key, value in changed.items()}
        return [f"--{key}={value}" for key, value in options.items()]

    def config(self, **changed: object) -> Resolved:
        return resolve(parse(self.options("unused", **changed)))
