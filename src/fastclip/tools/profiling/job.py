"""What is asked of a plan. It imports nothing heavy: a batch that cannot be divided is told at once."""

from __future__ import annotations

from dataclasses import dataclass

from fastclip.config.options import TrainConfig
from fastclip.tools.profiling.computation import Computation


@dataclass(frozen=True)
class Job:
    """What is asked."""

    configs: list[TrainConfig]
    """One for each algorithm, all else the same; resolved."""
    nodes: list[int]
    gpus_per_node: int
    network: str
    batch_per_gpu: int | None
    """Pairs a GPU at any number of nodes; None divides `batch.size` among them."""
    pairs: int | None
    """In the data set, if known."""
    computation: dict[str, Computation]
    """Of each algorithm; empty if nobody knows."""

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
