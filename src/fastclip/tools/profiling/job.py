"""The job to plan, and the computation time of a step: as given, as profiled, or from the paper.

Nothing heavy is imported, so errors surface immediately.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastclip.errors import OptionError
from fastclip.objective.algorithms import find_algorithm

if TYPE_CHECKING:
    from fastclip.config.resolved import Resolved


class Setting(NamedTuple):
    """One of the paper's settings (Table settings), keyed by the name of our recipe."""

    model: str
    weights: int  # trainable parameters of open_clip's model of this name
    features: int  # the length of a feature vector
    local_batch: int  # pairs per GPU, at any number of nodes
    num_pairs: int  # in the data set


SETTINGS = {
    "cc3m-medium": Setting("RN50", 102_007_137, 1024, 128, 2_700_000),
    "cc12m-large": Setting("ViT-B-32", 151_277_313, 512, 256, 9_100_000),
    "laion-xlarge": Setting("ViT-B-16", 149_620_737, 512, 640, 315_000_000),
}
ONE_NODE = {  # the paper's tables: (computation, others) on one node in ms, of OpenCLIP and FastCLIP-v3
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
    """ms per step at a local batch."""

    computation: float
    others: float  # neither computation nor communication
    local_batch: int
    source: str

    def at(self, local_batch: int) -> Computation:
        """Scaled to another batch; `others` does not depend on it."""
        ms = self.computation * local_batch / self.local_batch
        return self._replace(computation=ms, local_batch=local_batch)


@dataclass(frozen=True)
class Job:
    """What to plan."""

    configs: list[Resolved]  # one per algorithm, otherwise the same
    nodes: list[int]
    gpus_per_node: int
    network: str
    batch_per_gpu: int | None  # at any number of nodes; None divides `batch.size` among the GPUs
    num_pairs: int | None  # in the data set, if known
    computation: dict[str, Computation]  # by algorithm; empty if unknown

    def local_batch(self, nodes: int) -> int:
        """Pairs per GPU; the batch must be divisible."""
        if self.batch_per_gpu is not None:
            return self.batch_per_gpu
        batch, ranks = self.configs[0].batch.size, nodes * self.gpus_per_node
        if batch % ranks:
            raise OptionError(
                "batch.size",
                batch,
                f"must be divisible by {ranks} ranks ({nodes} nodes × {self.gpus_per_node} GPUs)",
                example=max(1, round(batch / ranks)) * ranks,
                advice=f"Or pass other --nodes, or --batch_per_gpu {max(1, batch // ranks)} to let the batch "
                "grow with the nodes.",
            )
        return batch // ranks


def stated(ms: float, local_batch: int) -> Computation:
    """The time given on the command line."""
    if not 0 < ms < float("inf"):
        raise OptionError("compute_ms", ms, "must be a positive number of milliseconds", example=250)
    return Computation(ms, 0.0, local_batch, f"--compute_ms {ms:g} at {local_batch:,} pairs per GPU")


def from_profile(path: Path, algorithm: str) -> Computation:
    """The time that `fastclip profile` measured: of this algorithm, otherwise of the first in the profile.

    It is that of the median rank, with the fewest ranks in the profile.
    """
    from fastclip.tools.profiling.breakdown import AlgorithmProfile

    file = path / "profile.json" if path.is_dir() else path
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))["profiles"]
        profiles = [AlgorithmProfile.from_dict(profile) for profile in saved]
        measured = min(profiles, key=lambda p: (p.algorithm != algorithm, p.num_ranks))
    except FileNotFoundError:
        advice = "Make one with `fastclip profile`."
        rule = "does not exist" if file == path else f"has no {file.name}"
        raise OptionError("profile", path, rule, advice=advice) from None
    except (KeyError, TypeError, ValueError) as error:
        raise OptionError(
            "profile",
            path,
            "must be a profile.json written by `fastclip profile`, or its folder; "
            f"{file} cannot be read ({type(error).__name__}: {error})",
        ) from None
    rank, local_batch = measured.median, measured.batch // measured.num_ranks
    source = f"{file}, {measured.algorithm} at {local_batch:,} pairs per rank"
    return Computation(rank.mean("computation"), rank.mean("others"), local_batch, source)


def from_paper(recipe: str, model: str, network: str, algorithm: str) -> Computation | None:
    """The paper's time on one node of this network's cluster, with that cluster's GPUs.

    None for a recipe, model or network that the paper did not time.
    """
    if (recipe, network) not in ONE_NODE or SETTINGS[recipe].model != model:
        return None
    table, openclip, v3 = ONE_NODE[recipe, network]
    batch = SETTINGS[recipe].local_batch
    source = f"the paper's Table {table}, one node of {network}, {batch} pairs per GPU"
    return Computation(*(openclip if find_algorithm(algorithm).peer else v3), batch, source)
