"""The verb `fastclip plan`."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastclip.options import VerbParser
from fastclip.tools.profiling.job import SETTINGS, Computation, Job, from_paper, from_profile, stated
from fastclip.tools.profiling.network import CLUSTERS, ERRORS, HIDING, NETWORKS, check_network

if TYPE_CHECKING:
    from rich.table import Table

    from fastclip.config.options import TrainConfig
    from fastclip.tools.profiling.configs import Configs
    from fastclip.tools.profiling.plan import Plan, Row

_DESCRIPTION = f"""\
Foretell memory, bytes and time of a training step, before machines are rented. Nothing is trained.

  fastclip plan --config cc12m-large --network 25gbe --nodes 1,2,4,8,16 --batch-per-gpu 256 --compute-ms 300
  fastclip plan --config cc3m-medium --network ib --batch-per-gpu 128      the paper's own cluster
  fastclip plan --config laion-xlarge --network 100gbe --gpus-per-node 8 --compute-ms 410
  fastclip plan --config mine.yaml --network 10gbe --profile profiles/mine --loss.wire_dtype float16

Any option of `fastclip train` may be given. Networks: {", ".join(NETWORKS)};
the last three are the clusters of the paper, on whose tables the model of the network is fitted at each call.
It prints its own error there, and a range where the tables cannot tell.

batch.size is the global batch, as in `fastclip train`: more nodes make the local batch smaller. The paper
keeps the batch of each GPU; so does --batch-per-gpu. How long a step computes is yours to say: --compute-ms
is what it takes one GPU alone at the local batch of the first of --nodes; --profile reads what
`fastclip profile` measured, and tells computation from what nothing can hide behind. If both are left out it
is the paper's, for its recipes (cc3m-medium, cc12m-large, laion-xlarge) on the clusters that timed them."""


def plan(words: list[str]) -> None:
    """Read the options, make the plan, print it."""
    given, rest = _parser().parse_known_args(words)
    nodes = _checked(given)
    configs = _configs(given, rest)  # before torch is imported: a mistake is told at once
    job = _job(given, configs.resolved, nodes)
    from fastclip.tools.profiling.advice import sentences
    from fastclip.tools.profiling.plan import make_plan

    made = make_plan(job)
    told = [*configs.left_out, *sentences(made)]
    if given.json:
        print(json.dumps(as_dict(made, told), indent=2))
        return
    from fastclip.terminal import console

    for table in tables(made):
        console().print(table)
        print()
    print("\n".join(told))


def _parser() -> ArgumentParser:
    parser = VerbParser(
        "plan", "--config RECIPE --network NAME [--nodes 1,2,4,8] [--OPTION VALUE …]", _DESCRIPTION
    )
    add = parser.add_argument
    add("--config", action="append", default=[], help="a recipe's name, or a YAML file")
    add("--network", metavar="NAME", help=f"between the nodes: {', '.join(NETWORKS)}")
    add("--nodes", metavar="1,2,4", default="1,2,4,8", help="numbers of machines (default: 1,2,4,8)")
    add("--gpus-per-node", type=int, default=4, metavar="N", help="workers on each (default: 4)")
    add(
        "--batch-per-gpu",
        type=int,
        metavar="N",
        help="pairs a GPU at any number of nodes, and not batch.size",
    )
    add("--algorithm", metavar="A,B", help="to compare (default: openclip and the recipe's)")
    add(
        "--compute-ms",
        type=float,
        metavar="MS",
        help="what a step takes one GPU alone, without communication",
    )
    add("--profile", type=Path, metavar="FILE", help="the same, from a profile.json of `fastclip profile`")
    add(
        "--pairs", type=int, metavar="N", help="in the data set (default: those of data.train, if it is here)"
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _checked(given: Namespace) -> list[int]:
    """The numbers of nodes, after all that can be told without reading anything."""
    if given.network is None:
        raise ValueError(f"--network is missing. Choose one of: {', '.join(NETWORKS)}.")
    check_network(given.network)
    numbers = [number.strip() for number in given.nodes.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(
            f"--nodes {given.nodes} must be whole numbers above 0, with commas between; try --nodes 1,2,4."
        )
    for name, value, example in (
        ("gpus-per-node", given.gpus_per_node, 4),
        ("batch-per-gpu", given.batch_per_gpu, 128),
        ("pairs", given.pairs, 2_700_000),
    ):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1; try --{name} {example}.")
    if given.compute_ms is not None and given.profile is not None:
        raise ValueError("--compute-ms and --profile say the same thing in two ways: give one of them.")
    return list(dict.fromkeys(map(int, numbers)))


def _configs(given: Namespace, rest: list[str]) -> Configs:
    """A resolved config for each algorithm."""
    from fastclip.config.parse import parse
    from fastclip.tools.profiling.configs import configs_for

    config = parse([*(f"--config={name}" for name in given.config), *rest], prog="fastclip plan")
    names = given.algorithm.split(",") if given.algorithm else ["openclip", config.algorithm]
    return configs_for(names, config)


def _job(given: Namespace, configs: list[TrainConfig], nodes: list[int]) -> Job:
    job = Job(configs, nodes, given.gpus_per_node, given.network, given.batch_per_gpu, None, {})
    local_batches = [job.local_batch(count) for count in nodes]  # which checks that it can be divided
    computation = _computation(given, configs, local_batches[0])
    return replace(job, computation=computation, pairs=_pairs(given, configs[0]))


def _computation(given: Namespace, configs: list[TrainConfig], first_batch: int) -> dict[str, Computation]:
    """Of each algorithm, or nothing."""
    if given.compute_ms is not None:
        return {config.algorithm: stated(given.compute_ms, first_batch) for config in configs}
    if given.profile is not None:
        return {config.algorithm: from_profile(given.profile, config.algorithm) for config in configs}
    model = configs[0].model
    if model.gradient_checkpointing or model.freeze != "none" or configs[0].batch.micro is not None:
        return {}  # the paper timed none of these
    rows = {c.algorithm: from_paper(_recipe(given), model.name, given.network, c.algorithm) for c in configs}
    return {algorithm: row for algorithm, row in rows.items() if row is not None}


def _pairs(given: Namespace, config: TrainConfig) -> int | None:
    """As given, as counted, or as the paper says of its own recipes."""
    if given.pairs is not None:
        return given.pairs
    if config.data.train is None:
        setting = SETTINGS.get(_recipe(given))
        return None if setting is None else setting.pairs
    from fastclip.data.manifest import open_manifest
    from fastclip.terminal import progress

    columns = {"image_column": config.data.image_column, "caption_column": config.data.caption_column}
    try:
        with progress("indexing", "bytes") as update:
            return len(open_manifest(config.data.train, **columns, progress=update))
    except (OSError, ValueError):  # a job may be planned where its data are not
        return None


def _recipe(given: Namespace) -> str:
    return Path(given.config[-1]).stem if given.config else ""


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
    (step, low, high), rate, speed_up = row.time
    parts = [step.communication, step.hidden, step.pure, rate]
    cells = [f"{step.total:,.0f}", f"{low:,.0f}–{high:,.0f}", *(f"{part:,.0f}" for part in parts)]
    return [*cells, f"{speed_up:.2f} ×"]


def _mib(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count / 2**20:,.1f}" if count < 100 << 20 else f"{count / 2**20:,.0f}"


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
    (step, low, high), rate, speed_up = row.time
    ends = {"pure": step.pure, "step": step.total, "low": low, "high": high}
    return found | {"time": step._asdict() | ends | {"pairs_per_second": rate, "speed_up": speed_up}}
