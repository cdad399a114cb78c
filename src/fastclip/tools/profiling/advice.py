"""What a plan means in plain sentences: what hides, when FastCLIP's exchange matters, what is not known."""

from __future__ import annotations

from collections.abc import Iterator

from fastclip.objective.algorithms import find_algorithm
from fastclip.tools.profiling.memory import dtype_of
from fastclip.tools.profiling.network import ERRORS, ETHERNET, GPUS_PER_NODE, HIDING, MEASURED, MOST_NODES
from fastclip.tools.profiling.plan import Plan, Row, traffic_of
from fastclip.tools.profiling.traffic import Traffic


def sentences(plan: Plan) -> list[str]:
    """All that should be said beside the tables."""
    return [*_time(plan), *_exchange(plan), *_memory(plan), *_doubts(plan)]


def _time(plan: Plan) -> Iterator[str]:
    job = plan.job
    if not job.computation:
        yield (
            "How long a step takes cannot be said: give --compute-ms, what a step takes one GPU alone, or "
            "--profile, what `fastclip profile` wrote. The paper's own times are those of its recipes on its "
            "clusters; elsewhere there are other GPUs."
        )
        return
    row = _ours(plan)
    given, step = job.computation[row.algorithm], row.step
    times = f"{given.computation:.1f} ms and others {given.others:.1f} ms a step"
    yield f"Computation is {times}: {given.source}."
    if {job.local_batch(nodes) for nodes in (1, *job.nodes)} != {given.local_batch}:
        yield (
            "At other local batches computation is taken in proportion. Small ones take longer than that: "
            "give --compute-ms at the local batch that you want, or keep it with --batch-per-gpu."
        )
    if step.communication:
        yield (
            f"At {_nodes(row.nodes)} {row.algorithm} hides {step.hidden:.0f} of {step.communication:.0f} ms "
            f"of communication behind computation. The step waits for the other {step.pure:.0f} ms, "
            f"{100 * step.pure / step.total:.0f} % of it."
        )
        yield _window([r for r in plan.rows if r.algorithm == row.algorithm])


def _window(rows: list[Row]) -> str:
    """From how many nodes on the backward pass is too short."""
    buckets = rows[0].traffic.buckets
    if buckets == 1:
        return (
            "All gradients of the weights fit into one of DDP's buckets, which leaves when the backward pass "
            "is over: nothing hides."
        )
    limit = 0.999 * HIDING.of_computation
    if short := [row.nodes for row in rows if 0 < limit * row.step.computation <= row.step.hidden]:
        return (
            f"From {_nodes(min(short))} on the backward pass is too short to hide all that could be hidden: "
            "what more nodes add is waited for."
        )
    return (
        f"The backward pass is long enough at every size: {100 * HIDING.share(buckets):.0f} % of the "
        "weights' gradients hide behind it."
    )


def _exchange(plan: Plan) -> Iterator[str]:
    """Features against weights: what FastCLIP saves, and whether that is worth anything here."""
    ours = _ours(plan)
    if ours.workers == 1 or find_algorithm(ours.algorithm).peer:
        return
    theirs = _openclip(plan, ours)
    saved = theirs.exchange - ours.traffic.exchange
    yield (
        f"At {_nodes(ours.nodes)} OpenCLIP's features and their gradients are {_mb(theirs.exchange)} a "
        f"worker, {100 * theirs.exchange / theirs.weights:.1f} % of the {_mb(theirs.weights)} of weights' "
        f"gradients; {ours.algorithm} sends {_mb(ours.traffic.exchange)} in their place, "
        f"{100 * saved / theirs.total:.1f} % less of all bytes."
    )
    weights = plan.size.trained // dtype_of(plan.job.configs[0]).itemsize
    yield (
        "Features grow with the global batch and weights do not: OpenCLIP's exchange would be as large as "
        f"the weights' gradients at a batch of {weights // (2 * plan.size.features):,} (weights / "
        f"2·features); here it is {ours.batch:,}."
    )
    if ours.time is None:
        return
    error = ERRORS.ratio_unseen.mean
    saving = {row.nodes: _saving(plan, row) for row in plan.rows if row.algorithm == ours.algorithm}
    ms, share = saving[ours.nodes]
    matters = [nodes for nodes, (_, part) in saving.items() if part > error]
    limit = f"the model's error of such ratios, {100 * error:.1f} %"
    verdict = f"That is within {limit}: for the time of this job FastCLIP's exchange does not matter."
    if matters:
        first = _nodes(min(matters))
        verdict = f"From {first} on it is more than {limit}: there FastCLIP's exchange matters."
    yield f"At {_nodes(ours.nodes)} this saves {ms:.1f} ms, {100 * share:.1f} % of OpenCLIP's step. {verdict}"


def _openclip(plan: Plan, row: Row) -> Traffic:
    """What OpenCLIP would send in the place of this row's algorithm."""
    return traffic_of(plan.job.configs[0], plan.size, row.workers, row.local_batch, "openclip")


def _saving(plan: Plan, row: Row) -> tuple[float, float]:
    """ms of a step that the smaller exchange saves, and their share of OpenCLIP's step."""
    saved = _openclip(plan, row).exchange - row.traffic.exchange
    ms = saved / 1e6 * plan.network.likely.ms_per_megabyte(row.nodes)
    return ms, ms / (row.step.total + ms)


def _memory(plan: Plan) -> Iterator[str]:
    yield (
        "Memory is counted on the model itself, for a GPU. Activations are an estimate: from fused "
        "attention, under autocast all in half precision, to attention that keeps its matrix, all in "
        "float32. Not counted: CUDA's context, NCCL's buffers, what allocators waste."
    )
    if plan.rows[0].memory.activations is None:
        yield "With gradient checkpointing the activations are not known: far less than without."
    if any(row.memory.state is None for row in plan.rows):
        yield (
            "The samples' state is not in it: 8 bytes a pair over all workers together (36 with individual "
            "τ). Give --pairs to count it."
        )


def _doubts(plan: Plan) -> Iterator[str]:
    """Where the tables cannot support a number, and how wrong the model is where they can."""
    job, name = plan.job, plan.job.network
    if not job.computation:
        return
    if name in ETHERNET:
        yield (
            f"{name} is not in the paper's tables. Its range goes from a line used to the full "
            f"({ETHERNET[name] / 1e9:.0f} Gbit/s) to the same line behind hosts as slow as the paper's "
            f"slowest cluster ({plan.network.slow.bits_per_second / 1e9:.1f} Gbit/s together); the "
            "likely value has hosts as fast as its fastest."
        )
    else:
        rate = plan.network.likely.bits_per_second / 1e9
        yield f"{name} is {MEASURED[name]}, where a worker sent {rate:.0f} Gbit/s between two nodes."
    if max(job.nodes) > MOST_NODES:
        yield (
            f"Nobody measured more than {MOST_NODES} nodes: beyond, the range goes from a network that "
            "becomes no slower to one that slows down in a line."
        )
    if job.gpus_per_node != GPUS_PER_NODE:
        doubt = f"with {job.gpus_per_node} the range may be too narrow"
        yield f"All measured nodes had {GPUS_PER_NODE} GPUs: {doubt}."
    seen, unseen, ratio, equal = (
        f"{100 * size.mean:.1f} % (at most {100 * size.largest:.1f} %)"
        for size in (ERRORS.step_seen, ERRORS.step_unseen, ERRORS.ratio_unseen, ERRORS.ratio_one)
    )
    yield (
        f"On the paper's 24 cells with 2 to 8 nodes, of both algorithms, the model errs by {seen} of a step, "
        f"and by {unseen} on tables that it has not seen. On the ratio of FastCLIP-v3 to OpenCLIP it errs by "
        f"{ratio}; who takes them to be equal errs by {equal}."
    )


def _ours(plan: Plan) -> Row:
    """The row to talk about: the last of our own algorithms, at the largest size."""
    algorithms = [config.algorithm for config in plan.job.configs]
    ours = next((name for name in reversed(algorithms) if not find_algorithm(name).peer), algorithms[0])
    return plan.row(ours, max(plan.job.nodes))


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _mb(count: float) -> str:
    return f"{count / 1e6:,.{1 if count >= 1e7 else 3}f} MB"
