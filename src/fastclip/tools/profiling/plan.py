"""Memory, bytes and time of a step for each algorithm and size, before machines are rented."""

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
    """A step, its range in ms, and what it means for the job."""

    step: StepTime
    low: float
    high: float
    pairs_per_second: float
    speed_up: float  # pairs a second over those of one node


class Row(NamedTuple):
    """One algorithm at one size."""

    algorithm: str
    nodes: int
    workers: int
    local_batch: int
    memory: Memory
    traffic: Traffic
    time: Time | None  # None if nobody knows how long a step computes

    @property
    def batch(self) -> int:
        return self.workers * self.local_batch

    @property
    def step(self) -> StepTime:
        assert self.time is not None  # a job knows the computation of all its algorithms, or of none
        return self.time.step


class Plan(NamedTuple):
    """The answer."""

    job: Job
    size: ModelSize  # of the model under the first algorithm
    network: Bounds
    rows: list[Row]

    def row(self, algorithm: str, nodes: int) -> Row:
        return next(row for row in self.rows if (row.algorithm, row.nodes) == (algorithm, nodes))


def make_plan(job: Job) -> Plan:
    """Build the models without memory, count, and estimate."""
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
                workers, local_batch = nodes * job.gpus_per_node, job.local_batch(nodes)
                held = memory(config, size, workers, local_batch, job.pairs, activations)
                sent = traffic_of(config, size, workers, local_batch)
                time = _time(job, config, size, network, nodes)
                rows.append(Row(config.algorithm, nodes, workers, local_batch, held, sent, time))
            sizes.append(size)
            update(number + 1, len(job.configs))
    return Plan(job, sizes[0], network, rows)


def traffic_of(
    config: Resolved, size: ModelSize, workers: int, local_batch: int, algorithm: str | None = None
) -> Traffic:
    """What each worker of a run sends in a step, or would send under another algorithm."""
    place = {"workers": workers, "local_batch": local_batch}
    model = {"features": size.features, "trained_bytes": size.trained}
    wire = 2 if config.loss.wire_dtype else None  # float16 or bfloat16
    value = dtype_of(config).itemsize
    return step_traffic(algorithm or config.algorithm, **place, **model, value_bytes=value, wire_bytes=wire)


def _time(job: Job, config: Resolved, size: ModelSize, network: Bounds, nodes: int) -> Time | None:
    measured = job.computation.get(config.algorithm)
    if measured is None:
        return None

    def predicted(nodes: int) -> tuple[Prediction, float]:
        workers, local_batch = nodes * job.gpus_per_node, job.local_batch(nodes)
        sent, here = traffic_of(config, size, workers, local_batch), measured.at(local_batch)
        prediction = predict(sent, nodes, network, computation=here.computation, others=here.others)
        return prediction, workers * local_batch / prediction.step.total * 1000

    (prediction, rate), (_, alone) = predicted(nodes), predicted(1)
    return Time(*prediction, rate, rate / alone)
