"""What is asked of a plan, and how long a step computes: as stated, as profiled, or as in the paper.

It imports nothing heavy: a batch that cannot be divided is an error at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastclip.objective.algorithms import find_algorithm

if TYPE_CHECKING:
    from fastclip.config.resolved import Resolved


class Setting(NamedTuple):
    """One of the paper's settings (Table settings), under the name of our recipe for it."""

    model: str
    weights: int  # how many numbers the model learns, of open_clip's model of this name
    features: int  # the length of a feature vector
    local_batch: int  # pairs a GPU, at any number of nodes
    pairs: int  # in the data set


SETTINGS = {
    "cc3m-medium": Setting("RN50", 102_007_137, 1024, 128, 2_700_000),
    "cc12m-large": Setting("ViT-B-32", 151_277_313, 512, 256, 9_100_000),
    "laion-xlarge": Setting("ViT-B-16", 149_620_737, 512, 640, 315_000_000),
}
ONE_NODE = {  # the paper's tables: computation and others on one node in ms, of OpenCLIP and of FastCLIP-v3
    ("cc3m-medium", "ib"): ("time_cc3m", (770.57, 70.09), (771.80, 69.06)),
    ("cc12m-large", "ib"): ("time_cc12m", (960.14, 108.42), (964.16, 109.14)),
    ("cc3m-medium", "slingshot-1"): ("time_cc3m_delta", (157.03, 47.12), (158.99, 50.35)),
    ("cc12m-large", "slingshot-1"): ("time_cc12m_delta", (153.12, 90.42), (154.22, 95.84)),
    ("laion-xlarge", "slingshot-1"): ("time_laion400m_delta", (418.29, 80.70), (419.27, 84.71)),
    ("cc3m-medium", "slingshot-2"): ("time_cc3m_bigred", (157.47, 50.52), (157.94, 51.72)),
    ("cc12m-large", "slingshot-2"): ("time_cc12m_bigred", (158.96, 85.44), (158.86, 84.84)),
    ("laion-xlarge", "slingshot-2"): ("time_laion400m_bigred", (415.30, 71.53), (415.34, 78.33)),
}


class Computation(NamedTuple):
    """ms of a step at a local batch."""

    computation: float
    others: float  # neither computation nor communication
    local_batch: int
    source: str

    def at(self, local_batch: int) -> Computation:
        """In proportion to the batch; `others` does not depend on it."""
        ms = self.computation * local_batch / self.local_batch
        return self._replace(computation=ms, local_batch=local_batch)


@dataclass(frozen=True)
class Job:
    """What is asked."""

    configs: list[Resolved]  # one for each algorithm, all else the same
    nodes: list[int]
    gpus_per_node: int
    network: str
    batch_per_gpu: int | None  # pairs a GPU at any number of nodes; None divides `batch.size` among them
    pairs: int | None  # in the data set, if known
    computation: dict[str, Computation]  # of each algorithm; empty if nobody knows

    def local_batch(self, nodes: int) -> int:
        """Pairs a GPU; the batch must be divisible."""
        if self.batch_per_gpu is not None:
            return self.batch_per_gpu
        batch, workers = self.configs[0].batch.size, nodes * self.gpus_per_node
        if batch % workers:
            near = max(1, round(batch / workers)) * workers
            raise ValueError(
                f"batch.size={batch} cannot be divided by {workers} workers ({nodes} nodes of "
                f"{self.gpus_per_node}). Try --batch.size {near}, other --nodes, or --batch-per-gpu "
                f"{max(1, batch // workers)} to let the batch grow with the nodes."
            )
        return batch // workers


def stated(ms: float, local_batch: int) -> Computation:
    """On the command line."""
    if not 0 < ms < float("inf"):
        raise ValueError(f"--compute-ms {ms} must be a positive number of milliseconds; try 250.")
    return Computation(ms, 0.0, local_batch, f"--compute-ms {ms:g}, at {local_batch:,} pairs a GPU")


def from_profile(path: Path, algorithm: str) -> Computation:
    """What `fastclip profile` measured: of this algorithm, or else of the first one there.

    Of several numbers of workers the smallest counts, and of its workers the median.
    """
    from fastclip.tools.profiling.breakdown import AlgorithmProfile

    file = path / "profile.json" if path.is_dir() else path
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))["profiles"]
        profiles = [AlgorithmProfile.from_dict(profile) for profile in saved]
        found = min(profiles, key=lambda p: (p.algorithm != algorithm, p.size))
    except FileNotFoundError:
        raise ValueError(f"--profile {path}: there is no {file}. Make one with `fastclip profile`.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--profile {path}: {file} is not what `fastclip profile` writes "
            f"({type(error).__name__}: {error}). Give its profile.json, or the folder that holds it."
        ) from None
    worker, local_batch = found.median, found.batch // found.size
    source = f"{file}, of {found.algorithm} at {local_batch:,} pairs a worker"
    return Computation(worker.mean("computation"), worker.mean("others"), local_batch, source)


def from_paper(recipe: str, model: str, network: str, algorithm: str) -> Computation | None:
    """The paper's row of one node on this network's cluster, whose GPUs it also is about.

    None for what the paper did not time: another recipe, another model in its place, another network.
    """
    if (recipe, network) not in ONE_NODE or SETTINGS[recipe].model != model:
        return None
    table, openclip, v3 = ONE_NODE[recipe, network]
    batch = SETTINGS[recipe].local_batch
    source = f"the paper's Table {table}, one node of {network}, {batch} pairs a GPU"
    return Computation(*(openclip if find_algorithm(algorithm).peer else v3), batch, source)
