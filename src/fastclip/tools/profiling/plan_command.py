"""The command `fastclip plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from fastclip.config.parse import parse
from fastclip.errors import OptionError
from fastclip.tools.profiling.configs import configs_for, dropped_notes
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
    num_pairs: int | None = None,
    json: bool = False,
) -> None:
    """Estimate memory, traffic and step time of a training job before renting machines. Nothing is trained.

      fastclip plan --config cc12m-large --network 25gbe --nodes 1,4,16 --batch_per_gpu 256 --compute_ms 300
      fastclip plan --config cc3m-medium --network ib --batch_per_gpu 128      the paper's own cluster
      fastclip plan --config laion-xlarge --network 100gbe --gpus_per_node 8 --compute_ms 410
      fastclip plan --config mine.yaml --network 10gbe --profile profiles/mine --loss.wire_dtype float16

    All options of `fastclip train` are accepted. Networks: NETWORKS; the last three are the paper's clusters,
    on whose tables the network model was fitted (benchmarks/plan_fit.py). The model's error there is printed,
    and a range is given where the tables do not support a single number.

    batch.size is the global batch, as in `fastclip train`: with more nodes the local batch shrinks.
    --batch_per_gpu fixes the local batch instead, as the paper does. The computation time of a step comes
    from --compute_ms (a step on one GPU, at the local batch of the first of --nodes) or from --profile, which
    also separates time that can hide communication from time that cannot. By default it is the paper's, for
    its recipes (cc3m-medium, cc12m-large, laion-xlarge) on the clusters that timed them.

    Args:
        config: name of a recipe, or a YAML file.
        network: network between the nodes: NETWORKS.
        nodes: numbers of machines, separated by commas.
        gpus_per_node: ranks on each machine.
        batch_per_gpu: pairs per GPU at any number of nodes (default: batch.size divided among the GPUs).
        algorithm: algorithms to compare, separated by commas (default: openclip and the recipe's).
        compute_ms: time of a step on one GPU, without communication.
        profile: profile.json of `fastclip profile`, to use instead of --compute_ms.
        num_pairs: pairs in the data set (default: counted in data.train, if it is available).
        json: print JSON instead of tables.
    """
    options = (nodes, gpus_per_node, batch_per_gpu, algorithm, compute_ms, profile, num_pairs)
    job, notes = make_job(train_options, config, network, *options)
    from fastclip.tools.profiling.advice import advise
    from fastclip.tools.profiling.plan import make_plan

    made = make_plan(job)
    _print(made, [*notes, *(advice.text for advice in advise(made))], json)


plan.__doc__ = str(plan.__doc__).replace("NETWORKS", ", ".join(NETWORKS))


def make_job(
    train_options: list[str],
    config: Sequence[str],
    network: str | None,
    nodes: str,
    gpus_per_node: int,
    batch_per_gpu: int | None,
    algorithm: str | None,
    compute_ms: float | None,
    profile: Path | None,
    num_pairs: int | None,
) -> tuple[Job, list[str]]:
    """Check the options of `plan`, before torch is imported; the second result is notes to print."""
    counts = _node_counts(nodes)
    network = check_network(network)
    positive = {
        "gpus_per_node": (gpus_per_node, 4),
        "batch_per_gpu": (batch_per_gpu, 128),
        "num_pairs": (num_pairs, 10**6),
    }
    for name, (value, example) in positive.items():
        if value is not None and value < 1:
            raise OptionError(name, value, "must be at least 1", example=example)
    if compute_ms is not None and profile is not None:
        raise OptionError(
            "compute_ms", compute_ms, "cannot be combined with --profile", advice="Pass one of them."
        )
    parsed = parse([*(f"--config={name}" for name in config), *train_options], prog="fastclip plan")
    algorithms = algorithm.split(",") if algorithm else ["openclip", parsed.algorithm]
    configs, dropped = configs_for(algorithms, parsed)
    job = Job(configs, counts, gpus_per_node, network, batch_per_gpu, None, {})
    local_batches = [job.local_batch(count) for count in counts]  # also checks that the batch is divisible
    recipe = Path(config[-1]).stem if config else ""
    computation = _computation(job, recipe, compute_ms, profile, local_batches[0])
    num_pairs = _num_pairs(configs[0], recipe) if num_pairs is None else num_pairs
    return replace(job, computation=computation, num_pairs=num_pairs), dropped_notes(dropped)


def _print(made: Plan, notes: list[str], as_json: bool) -> None:
    if as_json:
        print(dumps(as_dict(made, notes), indent=2))
        return
    from fastclip.terminal import console, say

    for table in tables(made):
        console().print(table)
        say()
    say("\n".join(notes))


def _node_counts(nodes: str) -> list[int]:
    numbers = [number.strip() for number in nodes.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise OptionError("nodes", nodes, "must be positive integers separated by commas", example="1,2,4")
    return list(dict.fromkeys(map(int, numbers)))


def _computation(
    job: Job, recipe: str, compute_ms: float | None, profile: Path | None, first_batch: int
) -> dict[str, Computation]:
    """The computation of each algorithm; empty if unknown."""
    names, model = [config.algorithm for config in job.configs], job.configs[0].model
    if compute_ms is not None:
        return {name: stated(compute_ms, first_batch) for name in names}
    if profile is not None:
        return {name: from_profile(profile, name) for name in names}
    split = isinstance(job.configs[0].batch.micro, int)
    if model.gradient_checkpointing or model.freeze != "none" or split:
        return {}  # the paper timed none of these
    rows = {name: from_paper(recipe, model.name, job.network, name) for name in names}
    return {algorithm: row for algorithm, row in rows.items() if row is not None}


def _num_pairs(config: Resolved, recipe: str) -> int | None:
    """Counted in data.train, or the paper's number for its own recipes."""
    if config.data.train is None:
        setting = SETTINGS.get(recipe)
        return None if setting is None else setting.num_pairs
    from fastclip.distributed.world import World
    from fastclip.training.training_pairs import open_manifest_of

    try:
        return len(open_manifest_of(config.data.train, config.data, World.alone()))
    except (OSError, ValueError):  # a job may be planned where its data is not available
        return None


def tables(plan: Plan) -> Iterator[Table]:
    """Memory, traffic and step time."""
    counted = ["weights", "gradients", "optimizer", "batch", "features", "loss", "state", "sum"]
    yield _table("Memory per rank, MiB", [*counted, "activations (estimate)"], plan, _memory_cells)
    sent = ["features", "feature gradients", "scalars", "weight gradients", "total", "exchange / weights"]
    yield _table("Traffic per rank and step, MB", sent, plan, _bytes_cells)
    if plan.job.computation:
        title = f"Step time on {plan.job.network}, ms"
        parts = ["step", "range", "communication", "hidden", "pure", "pairs/s"]
        yield _table(title, [*parts, "speed-up over 1 node"], plan, _time_cells)


def _table(title: str, headings: list[str], plan: Plan, cells: Callable[[Row], list[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False)
    table.padding = (0, 2, 0, 0)
    table.add_column("algorithm", no_wrap=True)
    for heading in ("nodes", "GPUs", "pairs/GPU", *headings):
        table.add_column(heading, justify="right")
    for row in plan.rows:
        table.add_row(row.algorithm, str(row.nodes), str(row.ranks), f"{row.local_batch:,}", *cells(row))
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


def as_dict(plan: Plan, notes: list[str]) -> dict:
    """The plan as data: bytes, ms, pairs/s."""
    job = plan.job
    options = {name: getattr(job, name) for name in ("nodes", "gpus_per_node", "network")}
    computation = {name: times._asdict() for name, times in job.computation.items()}
    return {
        "job": {
            "model": job.configs[0].model.name,
            **options,
            "pairs": job.num_pairs,
            "computation": computation,
        },
        "units": {"memory": "bytes", "sent": "bytes per step", "time": "ms"},
        "rows": [_row_dict(row) for row in plan.rows],
        "model": {
            "networks": {name: network._asdict() for name, network in CLUSTERS.items()},
            "hiding": HIDING._asdict(),
            "errors": {name: size._asdict() for name, size in ERRORS._asdict().items()},
        },
        "sentences": notes,
    }


def _row_dict(row: Row) -> dict:
    memory, sent = row.memory, row.traffic
    activations = memory.activations and memory.activations._asdict()
    counted = {
        "algorithm": row.algorithm,
        "nodes": row.nodes,
        "workers": row.ranks,
        "local_batch": row.local_batch,
        "memory": memory._asdict() | {"activations": activations, "counted": memory.counted},
        "sent": sent._asdict() | {"exchange": sent.exchange, "total": sent.total},
    }
    if row.time is None:
        return counted | {"time": None}
    step, own = row.time.step, row.time._asdict()
    return counted | {"time": step._asdict() | {"pure": step.pure} | own | {"step": step.total}}
