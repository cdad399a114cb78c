"""The verb `fastclip plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from fastclip.config.parse import parse
from fastclip.tools.profiling.configs import configs_for
from fastclip.tools.profiling.job import SETTINGS, Computation, Job, from_paper, from_profile, stated
from fastclip.tools.profiling.network import CLUSTERS, ERRORS, HIDING, NETWORKS, check_network

if TYPE_CHECKING:
    from rich.table import Table

    from fastclip.config.resolved import Resolved
    from fastclip.tools.profiling.plan import Plan, Row


def plan(
    train_options: list[str],
    config: Sequence[str] = (),
    network: str | None = None,
    nodes: str = "1,2,4,8",
    gpus_per_node: int = 4,
    batch_per_gpu: int | None = None,
    algorithm: str | None = None,
    compute_ms: float | None = None,
    profile: Path | None = None,
    pairs: int | None = None,
    json: bool = False,
) -> None:
    """Foretell memory, bytes and time of a training step, before machines are rented. Nothing is trained.

      fastclip plan --config cc12m-large --network 25gbe --nodes 1,4,16 --batch-per-gpu 256 --compute-ms 300
      fastclip plan --config cc3m-medium --network ib --batch-per-gpu 128      the paper's own cluster
      fastclip plan --config laion-xlarge --network 100gbe --gpus-per-node 8 --compute-ms 410
      fastclip plan --config mine.yaml --network 10gbe --profile profiles/mine --loss.wire_dtype float16

    Any option of `fastclip train` may be given. Networks: NETWORKS; the last three are the clusters of the
    paper, on whose tables the model of the network was fitted (benchmarks/plan_fit.py). It prints its own
    error there, and a range where the tables cannot tell.

    batch.size is the global batch, as in `fastclip train`: more nodes make the local batch smaller. The paper
    keeps the batch of each GPU; so does --batch-per-gpu. How long a step computes is yours to say:
    --compute-ms is what it takes one GPU alone at the local batch of the first of --nodes; --profile reads
    what `fastclip profile` measured, and tells computation from what nothing can hide behind. If both are
    left out it is the paper's, for its recipes (cc3m-medium, cc12m-large, laion-xlarge) on the clusters that
    timed them.

    Args:
        config: a recipe's name, or a YAML file.
        network: between the nodes: NETWORKS.
        nodes: numbers of machines.
        gpus_per_node: workers on each.
        batch_per_gpu: pairs a GPU at any number of nodes, and not batch.size.
        algorithm: A,B to compare; openclip and the recipe's if left out.
        compute_ms: what a step takes one GPU alone, without communication.
        profile: the same, from a profile.json of `fastclip profile`.
        pairs: in the data set; those of data.train, if it is here.
        json: print JSON instead of tables.
    """
    counts = _counts_of_nodes(nodes)
    network = check_network(network)
    positive = {
        "gpus-per-node": (gpus_per_node, 4),
        "batch-per-gpu": (batch_per_gpu, 128),
        "pairs": (pairs, 10**6),
    }
    for name, (value, example) in positive.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1; try --{name} {example}.")
    if compute_ms is not None and profile is not None:
        raise ValueError("--compute-ms and --profile say the same thing in two ways: give one of them.")
    # before torch is imported: errors surface immediately
    parsed = parse([*(f"--config={name}" for name in config), *train_options], prog="fastclip plan")
    algorithms = algorithm.split(",") if algorithm else ["openclip", parsed.algorithm]
    configs, left_out = configs_for(algorithms, parsed)
    job = Job(configs, counts, gpus_per_node, network, batch_per_gpu, None, {})
    local_batches = [job.local_batch(count) for count in counts]  # which checks that it can be divided
    recipe = Path(config[-1]).stem if config else ""
    known = _computation(job, recipe, compute_ms, profile, local_batches[0])
    pairs = _pairs(configs[0], recipe) if pairs is None else pairs
    job = replace(job, computation=known, pairs=pairs)
    from fastclip.tools.profiling.advice import sentences
    from fastclip.tools.profiling.plan import make_plan

    made = make_plan(job)
    _print(made, [*left_out, *sentences(made)], json)


plan.__doc__ = str(plan.__doc__).replace("NETWORKS", ", ".join(NETWORKS))


def _print(made: Plan, told: list[str], as_json: bool) -> None:
    if as_json:
        print(dumps(as_dict(made, told), indent=2))
        return
    from fastclip.terminal import console

    for table in tables(made):
        console().print(table)
        print()
    print("\n".join(told))


def _counts_of_nodes(nodes: str) -> list[int]:
    numbers = [number.strip() for number in nodes.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        what = "whole numbers above 0, with commas between"
        raise ValueError(f"--nodes {nodes} must be {what}; try --nodes 1,2,4.")
    return list(dict.fromkeys(map(int, numbers)))


def _computation(
    job: Job, recipe: str, compute_ms: float | None, profile: Path | None, first_batch: int
) -> dict[str, Computation]:
    """Of each algorithm, or nothing."""
    names, model = [config.algorithm for config in job.configs], job.configs[0].model
    if compute_ms is not None:
        return {name: stated(compute_ms, first_batch) for name in names}
    if profile is not None:
        return {name: from_profile(profile, name) for name in names}
    if model.gradient_checkpointing or model.freeze != "none" or job.configs[0].batch.micro is not None:
        return {}  # the paper timed none of these
    rows = {name: from_paper(recipe, model.name, job.network, name) for name in names}
    return {algorithm: row for algorithm, row in rows.items() if row is not None}


def _pairs(config: Resolved, recipe: str) -> int | None:
    """As counted, or as the paper says of its own recipes."""
    if config.data.train is None:
        setting = SETTINGS.get(recipe)
        return None if setting is None else setting.pairs
    from fastclip.distributed.world import World
    from fastclip.training.training_pairs import open_manifest_of

    try:
        return len(open_manifest_of(config.data.train, config.data, World.alone()))
    except (OSError, ValueError):  # a job may be planned where its data are not
        return None


def tables(plan: Plan) -> Iterator[Table]:
    """Memory, bytes and time."""
    counted = ["weights", "gradients", "optimizer", "batch", "features", "loss", "state", "sum"]
    yield _table("Memory of a worker, MiB", [*counted, "activations (estimate)"], plan, _memory_cells)
    sent = ["features", "their gradients", "scalars", "weights' gradients", "all", "exchange / weights"]
    yield _table("Sent by a worker in a step, MB", sent, plan, _bytes_cells)
    if plan.job.computation:
        title = f"Time of a step on {plan.job.network}, ms"
        parts = ["step", "range", "communication", "hidden", "waited for", "pairs/s"]
        yield _table(title, [*parts, "speed-up over one node"], plan, _time_cells)


def _table(title: str, headings: list[str], plan: Plan, cells: Callable[[Row], list[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False)
    table.padding = (0, 2, 0, 0)
    table.add_column("algorithm", no_wrap=True)
    for heading in ("nodes", "GPUs", "pairs a GPU", *headings):
        table.add_column(heading, justify="right")
    for row in plan.rows:
        table.add_row(row.algorithm, str(row.nodes), str(row.workers), f"{row.local_batch:,}", *cells(row))
    return table


def _memory_cells(row: Row) -> list[str]:
    *counted, activations = row.memory
    ends = [f"{count / 2**20:,.0f}" for count in activations or ()]
    return [*map(_mib, (*counted, row.memory.counted)), "–".join(dict.fromkeys(ends)) or "?"]


def _bytes_cells(row: Row) -> list[str]:
    t = row.traffic
    parts = [t.features, t.feature_gradients, t.scalars, t.weights, t.total]
    share = f"{100 * t.exchange / t.weights:.2f} %" if t.weights else "–"
    return [*(f"{part / 1e6:,.2f}" for part in parts), share]


def _time_cells(row: Row) -> list[str]:
    assert row.time is not None
    step, low, high, rate, speed_up = row.time
    parts = [step.communication, step.hidden, step.pure, rate]
    cells = [f"{step.total:,.0f}", f"{low:,.0f}–{high:,.0f}", *(f"{part:,.0f}" for part in parts)]
    return [*cells, f"{speed_up:.2f} ×"]


def _mib(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**20:,.{1 if count < 100 << 20 else 0}f}"


def as_dict(plan: Plan, told: list[str]) -> dict:
    """The same for machines: bytes, ms, pairs a second."""
    job = plan.job
    asked = {name: getattr(job, name) for name in ("nodes", "gpus_per_node", "network", "pairs")}
    computation = {name: known._asdict() for name, known in job.computation.items()}
    return {
        "job": {"model": job.configs[0].model.name, **asked, "computation": computation},
        "units": {"memory": "bytes", "sent": "bytes a step", "time": "ms"},
        "rows": [_row_dict(row) for row in plan.rows],
        "model": {
            "networks": {name: network._asdict() for name, network in CLUSTERS.items()},
            "hiding": HIDING._asdict(),
            "errors": {name: size._asdict() for name, size in ERRORS._asdict().items()},
        },
        "sentences": told,
    }


def _row_dict(row: Row) -> dict:
    memory, sent = row.memory, row.traffic
    activations = memory.activations and memory.activations._asdict()
    found = {name: getattr(row, name) for name in ("algorithm", "nodes", "workers", "local_batch")}
    found["memory"] = memory._asdict() | {"activations": activations, "counted": memory.counted}
    found["sent"] = sent._asdict() | {"exchange": sent.exchange, "total": sent.total}
    if row.time is None:
        return found | {"time": None}
    step, own = row.time.step, row.time._asdict()
    return found | {"time": step._asdict() | {"pure": step.pure} | own | {"step": step.total}}
