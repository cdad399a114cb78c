"""What a plan means: what communication hides, when FastCLIP's exchange matters, how large the errors are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastclip.objective.algorithms import find_algorithm
from fastclip.tools.profiling.memory import dtype_of
from fastclip.tools.profiling.network import ERRORS, ETHERNET, GPUS_PER_NODE, HIDING, MEASURED, MOST_NODES
from fastclip.tools.profiling.plan import Plan, Row, traffic_of
from fastclip.tools.profiling.traffic import Traffic


class Advice(NamedTuple):
    """A note to print below the tables; a plan has at most one of each kind."""

    kind: str
    text: str
    value: int | None = None  # the batch, or the number of nodes or GPUs, that the note is about


def advise(plan: Plan) -> list[Advice]:
    """All notes on a plan, in the order to print them."""
    return [*_time(plan), *_exchange(plan), *_memory(plan), *_limits(plan)]


def _time(plan: Plan) -> Iterator[Advice]:
    job = plan.job
    if not job.computation:
        yield Advice(
            "time unknown",
            "Step time is not estimated: pass --compute_ms (the time of a step on one GPU) or --profile "
            "(from `fastclip profile`). The paper's times apply only to its own recipes on its own clusters.",
        )
        return
    row = _ours(plan)
    given, step = job.computation[row.algorithm], row.step
    times = f"{given.computation:.1f} ms per step, others {given.others:.1f} ms"
    yield Advice("computation", f"Computation takes {times} ({given.source}).", given.local_batch)
    if {job.local_batch(nodes) for nodes in (1, *job.nodes)} != {given.local_batch}:
        yield Advice(
            "computation scaled",
            "At other local batches computation is scaled in proportion, which is too optimistic for small "
            "ones: measure --compute_ms at the local batch you want, or fix it with --batch_per_gpu.",
            given.local_batch,
        )
    if step.communication:
        yield Advice(
            "overlap",
            f"At {_nodes(row.nodes)} {row.algorithm} hides {step.hidden:.0f} of {step.communication:.0f} ms "
            f"of communication behind computation. The remaining {step.pure:.0f} ms are "
            f"{100 * step.pure / step.total:.0f} % of the step.",
            row.nodes,
        )
        yield _window([r for r in plan.rows if r.algorithm == row.algorithm])


def _window(rows: list[Row]) -> Advice:
    """The number of nodes from which the backward pass is too short."""
    buckets = rows[0].traffic.buckets
    if buckets == 1:
        return Advice(
            "one bucket",
            "All weight gradients fit into one DDP bucket, sent after the backward pass: nothing hides.",
        )
    limit = 0.999 * HIDING.of_computation
    if short := [row.nodes for row in rows if 0 < limit * row.step.computation <= row.step.hidden]:
        return Advice(
            "backward pass too short",
            f"From {_nodes(min(short))} on, the backward pass is too short to hide all that could overlap: "
            "communication added by more nodes is fully exposed.",
            min(short),
        )
    return Advice(
        "backward pass long enough",
        f"The backward pass is long enough at every size to hide {100 * HIDING.share(buckets):.0f} % of the "
        "weight gradients.",
    )


def _exchange(plan: Plan) -> Iterator[Advice]:
    """Features against weights: what FastCLIP saves, and whether it matters here."""
    ours = _ours(plan)
    if ours.ranks == 1 or find_algorithm(ours.algorithm).peer:
        return
    theirs = _openclip(plan, ours)
    saved = theirs.exchange - ours.traffic.exchange
    yield Advice(
        "exchange",
        f"At {_nodes(ours.nodes)} OpenCLIP's features and their gradients are {_mb(theirs.exchange)} per "
        f"rank, {100 * theirs.exchange / theirs.weights:.1f} % of the {_mb(theirs.weights)} of weight "
        f"gradients; {ours.algorithm} sends {_mb(ours.traffic.exchange)} instead, "
        f"{100 * saved / theirs.total:.1f} % less traffic in total.",
        ours.nodes,
    )
    weights = plan.size.trained // dtype_of(plan.job.configs[0]).itemsize
    equal = weights // (2 * plan.size.features)
    yield Advice(
        "break-even batch",
        "Features grow with the global batch, weights do not: OpenCLIP's exchange would be as large as the "
        f"weight gradients at a batch of {equal:,} (weights / 2·features); here the batch is {ours.batch:,}.",
        equal,
    )
    if ours.time is None:
        return
    error = ERRORS.ratio_unseen.mean
    saving = {row.nodes: _saving(plan, row) for row in plan.rows if row.algorithm == ours.algorithm}
    ms, share = saving[ours.nodes]
    matters = [nodes for nodes, (_, part) in saving.items() if part > error]
    saves = f"At {_nodes(ours.nodes)} this saves {ms:.1f} ms, {100 * share:.1f} % of OpenCLIP's step."
    limit = f"the model's error for such ratios ({100 * error:.1f} %)"
    if matters:
        first = min(matters)
        verdict = f"From {_nodes(first)} on, the saving exceeds {limit}: FastCLIP's exchange matters there."
        yield Advice("exchange matters", f"{saves} {verdict}", first)
    else:
        verdict = f"That is within {limit}: FastCLIP's exchange does not change the time of this job."
        yield Advice("exchange negligible", f"{saves} {verdict}")


def _openclip(plan: Plan, row: Row) -> Traffic:
    """The traffic of OpenCLIP in place of this row's algorithm."""
    return traffic_of(plan.job.configs[0], plan.size, row.ranks, row.local_batch, "openclip")


def _saving(plan: Plan, row: Row) -> tuple[float, float]:
    """ms per step saved by the smaller exchange, and their share of OpenCLIP's step."""
    saved = _openclip(plan, row).exchange - row.traffic.exchange
    ms = saved / 1e6 * plan.network.likely.ms_per_megabyte(row.nodes)
    return ms, ms / (row.step.total + ms)


def _memory(plan: Plan) -> Iterator[Advice]:
    yield Advice(
        "memory",
        "Memory is counted on the model itself, for a GPU. Activations are estimated: from fused attention "
        "(all in half precision under autocast) to attention that stores its matrix, all in float32. "
        "Not included: CUDA context, NCCL buffers, allocator fragmentation.",
    )
    if plan.rows[0].memory.activations is None:
        yield Advice(
            "activations unknown",
            "Activations are not estimated with gradient checkpointing: far less than without.",
        )
    if plan.job.configs[0].batch.micro == "auto":
        yield Advice(
            "micro-batch unknown",
            "batch.micro=auto is planned as the whole batch. Training splits it if it does not fit: then "
            "activations are those of the part, and computation takes about a third longer.",
        )
    if any(row.memory.state is None for row in plan.rows):
        yield Advice(
            "state unknown",
            "The per-sample state is not included: 8 bytes per pair over all ranks together (36 with "
            "individual τ). Pass --num_pairs to include it.",
        )


def _limits(plan: Plan) -> Iterator[Advice]:
    """Where the tables do not support a number, and the model's error where they do."""
    job, name = plan.job, plan.job.network
    if not job.computation:
        return
    if name in ETHERNET:
        yield Advice(
            "network not measured",
            f"{name} is not in the paper's tables. Its range is from a fully used link "
            f"({ETHERNET[name] / 1e9:.0f} Gbit/s) to the same link with hosts as slow as the paper's slowest "
            f"cluster ({plan.network.slow.bits_per_second / 1e9:.1f} Gbit/s overall); the likely value "
            "assumes hosts as fast as its fastest.",
        )
    else:
        rate = plan.network.likely.bits_per_second / 1e9
        yield Advice(
            "network measured",
            f"{name} is {MEASURED[name]}, where a rank sent {rate:.0f} Gbit/s between two nodes.",
        )
    if max(job.nodes) > MOST_NODES:
        yield Advice(
            "nodes not measured",
            f"There are no measurements beyond {MOST_NODES} nodes: there the range is from a network that "
            "gets no slower to one that slows down linearly.",
            MOST_NODES,
        )
    if job.gpus_per_node != GPUS_PER_NODE:
        yield Advice(
            "gpus per node not measured",
            f"All measured nodes had {GPUS_PER_NODE} GPUs: with {job.gpus_per_node} the range may be too "
            "narrow.",
            job.gpus_per_node,
        )
    seen, unseen, ratio, equal = (
        f"{100 * size.mean:.1f} % (at most {100 * size.largest:.1f} %)"
        for size in (ERRORS.step_seen, ERRORS.step_unseen, ERRORS.ratio_unseen, ERRORS.ratio_one)
    )
    yield Advice(
        "model error",
        "On the paper's 24 cells with 2 to 8 nodes, of both algorithms, the model's error of a step is "
        f"{seen}, and {unseen} on tables held out of the fit. For the ratio FastCLIP-v3 / OpenCLIP it is "
        f"{ratio}; assuming equal times gives {equal}.",
    )


def _ours(plan: Plan) -> Row:
    """The row to discuss: the last of our own algorithms, at the largest size."""
    algorithms = [config.algorithm for config in plan.job.configs]
    ours = next((name for name in reversed(algorithms) if not find_algorithm(name).peer), algorithms[0])
    return plan.row(ours, max(plan.job.nodes))


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _mb(count: float) -> str:
    return f"{count / 1e6:,.{1 if count >= 1e7 else 3}f} MB"
