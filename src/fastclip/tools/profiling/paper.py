"""The paper's measured times: its three settings, and the eight tables of step times in its appendix.

`paper_times.csv` holds every figure as printed, in milliseconds, with its standard deviation. The tables
are named by their labels in the paper; the clusters are `ib` (InfiniBand) and `slingshot-1`, `slingshot-2`
(Slingshot).
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

GPUS_PER_NODE = 4
"""In all of the tables."""
MOST_NODES = 8
"""The largest number in any table: what is said of more is a guess."""


class Setting(NamedTuple):
    """One of the paper's settings (Table settings), under the name of our recipe for it."""

    model: str
    weights: int
    """How many numbers the model learns, of open_clip's model of this name."""
    features: int
    """The length of a feature vector."""
    local_batch: int
    """Pairs a GPU, at any number of nodes."""
    pairs: int
    """In the data set."""


SETTINGS = {
    "cc3m-medium": Setting("RN50", 102_007_137, 1024, 128, 2_700_000),
    "cc12m-large": Setting("ViT-B-32", 151_277_313, 512, 256, 9_100_000),
    "laion-xlarge": Setting("ViT-B-16", 149_620_737, 512, 640, 315_000_000),
}


class Timing(NamedTuple):
    """Where the time of a step went: means over runs in ms, and `sd`, their standard deviations by name."""

    table: str
    recipe: str
    network: str
    nodes: int
    algorithm: str
    total: float
    computation: float
    communication: float
    pure: float
    """Communication while nothing was computed."""
    overlap: float
    """Communication hidden behind computation."""
    others: float
    """Neither computation nor communication."""
    sd: dict[str, float]

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.recipe]


PARTS = ("total", "computation", "communication", "pure", "overlap", "others")


@cache
def paper_times() -> tuple[Timing, ...]:
    """All 64 columns of the eight tables: nodes 1, 2, 4, 8 of OpenCLIP and FastCLIP-v3."""
    with Path(__file__).with_name("paper_times.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_timing(row) for row in csv.DictReader(file))


def _timing(row: dict[str, str]) -> Timing:
    total, computation, communication, pure, overlap, others = (float(row[f"{part}_ms"]) for part in PARTS)
    return Timing(
        row["table"],
        row["recipe"],
        row["network"],
        int(row["nodes"]),
        row["algorithm"],
        total,
        computation,
        communication,
        pure,
        overlap,
        others,
        {part: float(row[f"{part}_sd"]) for part in PARTS},
    )


def one_node(timing: Timing) -> Timing:
    """What the same table says of the same algorithm on one node."""
    return next(
        t for t in paper_times() if (t.table, t.nodes, t.algorithm) == (timing.table, 1, timing.algorithm)
    )
