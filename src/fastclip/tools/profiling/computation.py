"""How long a worker's step takes besides communication, and who says so: its owner, a profile, or the
paper.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from fastclip.objective.algorithms import find_algorithm
from fastclip.tools.profiling.paper import SETTINGS, paper_times


class Computation(NamedTuple):
    """ms of a step at a local batch."""

    computation: float
    others: float
    """Neither computation nor communication."""
    local_batch: int
    source: str

    def at(self, local_batch: int) -> Computation:
        """In proportion to the batch; `others` does not depend on it."""
        return self._replace(
            computation=self.computation * local_batch / self.local_batch, local_batch=local_batch
        )


def stated(ms: float, local_batch: int) -> Computation:
    """By who plans."""
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
    setting = SETTINGS.get(recipe)
    if setting is None or setting.model != model:
        return None
    like = "openclip" if find_algorithm(algorithm).peer else "fastclip-v3"
    wanted = (recipe, network, 1, like)
    rows = (t for t in paper_times() if (t.recipe, t.network, t.nodes, t.algorithm) == wanted)
    row = next(rows, None)
    if row is None:
        return None
    source = f"the paper's Table {row.table}, one node of {row.network}, {setting.local_batch} pairs a GPU"
    return Computation(row.computation, row.others, setting.local_batch, source)
