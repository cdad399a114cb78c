"""Memory, traffic and step time for each algorithm and number of nodes."""

from __future__ import annotations

from typing import NamedTuple

from fastclip.config.resolved import Resolved
from fastclip.terminal import progress
from fastclip.tools.profiling.job import Job
from fastclip.tools.profiling.memory import (
    Memory,
    ModelSize,
    activation_bytes,
    dtype_of,
    memory,
    model_size,
    towers_on_meta,
)
from fastclip.tools.profiling.network import Bounds, Prediction, StepTime, bounds, predict
from fastclip.tools.profiling.traffic import Traffic, step_traffic


class Time(NamedTuple):
    """A step, its range in ms, and the throughput."""

    step: StepTime
    low: float
    high: float
    pairs_per_second: float
    speed_up: float  # in pairs/s, over one node


class Row(NamedTuple):
    """One algorithm on one number of nodes."""

    algorithm: str
    nodes: int
    ranks: int
    local_batch: int
    memory: Memory
    traffic: Traffic
    time: Time | None  # None if the computation time is unknown

    @property
    def batch(self) -> int:
        return self.ranks * self.local_batch

    @property
    def step(self) -> StepTime:
        assert self.time is not None  # a job has the computation of all its algorithms, or of none
        return self.time.step


class Plan(NamedTuple):
    """The estimates for a job."""

    job: Job
    size: ModelSize  # of the model under the first algorithm
    network: Bounds
    rows: list[Row]

    def row(self, algorithm: str, nodes: int) -> Row:
        return next(row for row in self.rows if (row.algorithm, row.nodes) == (algorithm, nodes))


def make_plan(job: Job) -> Plan:
    """Build the models on the meta device, count, and estimate."""
    network, activations = bounds(job.network), None
    rows, sizes = [], []
    with progress("building models without weights", "models") as update:
        update(0, len(job.configs))
        for number, config in enumerate(job.configs):
            towers = towers_on_meta(config)
            if activations is None and not config.model.gradient_checkpointing:
                activations = activation_bytes(towers)
            size = model_size(towers)
            for nodes in job.nodes:
                ranks, local_batch = nodes * job.gpus_per_node, job.local_batch(nodes)
                held = memory(config, size, ranks, local_batch, job.num_pairs, activations)
                sent = traffic_of(config, size, ranks, local_batch)
                time = _time(job, config, size, network, nodes)
                rows.append(Row(config.algorithm, nodes, ranks, local_batch, held, sent, time))
            sizes.append(size)
            update(number + 1, len(job.configs))
    return Plan(job, sizes[0], network, rows)


def traffic_of(
    config: Resolved, size: ModelSize, ranks: int, local_batch: int, algorithm: str | None = None
) -> Traffic:
    """The traffic of each rank of a run, or of the same run with another algorithm."""
    place = {"workers": ranks, "local_batch": local_batch}
    model = {"features": size.features, "trained_bytes": size.trained}
    wire = 2 if config.loss.wire_dtype else None  # float16 or bfloat16
    value, distinct = dtype_of(config).itemsize, config.loss.negatives == "distinct"
    return step_traffic(
        algorithm or config.algorithm,
        **place,
        **model,
        value_bytes=value,
        wire_bytes=wire,
        distinct=distinct,
    )


def _time(job: Job, config: Resolved, size: ModelSize, network: Bounds, nodes: int) -> Time | None:
    measured = job.computation.get(config.algorithm)
    if measured is None:
        return None

    def predicted(nodes: int) -> tuple[Prediction, float]:
        ranks, local_batch = nodes * job.gpus_per_node, job.local_batch(nodes)
        sent, here = traffic_of(config, size, ranks, local_batch), measured.at(local_batch)
        prediction = predict(sent, nodes, network, computation=here.computation, others=here.others)
        return prediction, ranks * local_batch / prediction.step.total * 1000

    (prediction, rate), (_, alone) = predicted(nodes), predicted(1)
    return Time(*prediction, rate, rate / alone)
