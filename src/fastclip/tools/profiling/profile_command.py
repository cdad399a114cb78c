"""The command `fastclip profile`."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from fastclip.errors import OptionError

if TYPE_CHECKING:
    from fastclip.config.resolved import Resolved
    from fastclip.tools.profiling.breakdown import AlgorithmProfile

DEFAULT_ALGORITHMS = "openclip,fastclip-v1,fastclip-v2,fastclip-v3"  # those of the paper's figure
PROFILE_FILE, CHART_FILE = "profile.json", "profile.png"


def profile(
    train_options: list[str],
    command: str,
    config: Sequence[str] = (),
    algorithm: str = DEFAULT_ALGORITHMS,
    steps: int = 20,
    warmup: int = 5,
    ranks: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Measure where the time of a training step goes: computation, communication (pure, and overlapped with
    computation) and others, as in the paper's tables; with bytes sent, peak memory and samples/s.

      fastclip profile --config emoji
      fastclip profile --config emoji --algorithm openclip,fastclip-v3 --batch.size 256 --steps 50
      torchrun --nproc-per-node 8 -m fastclip profile --config cc12m-large --data.train 'shards/*.tar'
      fastclip profile --config emoji --ranks 1,2,4     1, 2 and 4 ranks on this machine, and the speed-up

    The trainer's own steps run under torch.profiler, with a new model for each algorithm. All options of
    `fastclip train` are accepted. Nothing is evaluated or saved except the profile, in OUT: profile.json with
    every step of every rank, profile.png, and one trace per algorithm and rank, to be opened at
    https://ui.perfetto.dev or chrome://tracing. Recording slows steps down, small models most of all: compare
    the numbers of a profile only with each other.

    With --ranks, batch.size is the batch of ONE rank, as in the paper: the global batch grows with the ranks.
    Otherwise batch.size is the global batch, as in `fastclip train`. On a CPU each rank started by --ranks
    has OMP_NUM_THREADS threads, by default one.

    Args:
        config: name of a recipe, or a YAML file.
        algorithm: algorithms to profile, separated by commas.
        steps: steps to measure.
        warmup: steps to run first, not measured.
        ranks: numbers of ranks to start on this machine, one after another: 1,2,4.
        out: folder of the profile (default: profiles/RECIPE).
        json: print profile.json instead of the table.
    """
    from fastclip.config.parse import parse
    from fastclip.tools.profiling.configs import configs_for, dropped_notes

    options = [*(f"--config={name}" for name in config), *train_options]
    # before torch is imported: errors surface immediately
    configs, dropped = configs_for(algorithm.split(","), parse(options, prog="fastclip profile"))
    for name, value, example in (("steps", steps, 20), ("warmup", warmup, 5)):
        if value < 1:
            raise OptionError(name, value, "must be at least 1", example=example)
    out = out or Path("profiles") / (Path(config[-1]).stem if config else "train")
    # or the profiler's library complains at every start that there is no GPU
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if ranks is None:
        measured = _profile_here(configs, out, steps, warmup)
    else:
        options += [f"--steps={steps}", f"--warmup={warmup}"]
        measured = _profile_rank_counts(options, configs, ranks, out)
    if measured is not None:
        _save_and_show(measured | {"command": command, "left_out": dropped_notes(dropped)}, out, json)


def _profile_here(configs: list[Resolved], out: Path, steps: int, warmup: int) -> dict | None:
    """As one rank, alone or of several; rank 0 returns the profiles of all."""
    from fastclip.distributed.world import join_world, silence_other_ranks
    from fastclip.files import make_writable
    from fastclip.tools.profiling.breakdown import AlgorithmProfile
    from fastclip.tools.profiling.profiler import profile_steps

    with join_world(timeout=configs[0].timeout, device=configs[0].device) as world:
        silence_other_ranks(world)
        if world.is_main:
            make_writable(out)
        profiles = []
        for config in configs:
            trace = out / f"trace-{config.algorithm}-rank{world.rank}.json.gz"
            own = profile_steps(config, world, trace, steps=steps, warmup=warmup)
            profiles.append(AlgorithmProfile(config.algorithm, config.batch.size, world.gather(own)))
    if not world.is_main:
        return None
    facts = {"steps": steps, "warmup": warmup, "versions": _versions(), "machine": _machine()}
    return facts | {"profiles": [asdict(profile) for profile in profiles]}


def _profile_rank_counts(options: list[str], configs: list[Resolved], ranks: str, out: Path) -> dict:
    """As several processes for each number of ranks, one number after another."""
    counts = _rank_counts(ranks)
    import torch

    from fastclip.distributed.world import find_place
    from fastclip.tools.profiling.rank_counts import profile_rank_counts

    if find_place(os.environ) is not None:
        raise OptionError(
            "ranks", ranks, "starts its own processes", advice="Run it without torchrun or srun."
        )
    gpus = torch.cuda.device_count()
    if gpus and max(counts) > gpus:
        raise OptionError(
            "ranks", ranks, f"requires {max(counts)} GPUs, but there are {gpus}", example=f"1,{gpus}"
        )
    options = [*options, f"--algorithm={','.join(config.algorithm for config in configs)}"]
    measured = profile_rank_counts(options, counts, configs[0].batch.size, out, len(configs))
    return measured[0] | {"profiles": [profile for one in measured for profile in one["profiles"]]}


def _save_and_show(measured: dict, out: Path, as_json: bool) -> None:
    from fastclip.files import atomic_write
    from fastclip.tools.profiling.breakdown import AlgorithmProfile
    from fastclip.tools.profiling.profile_chart import draw
    from fastclip.tools.report.output import write

    profiles = [AlgorithmProfile.from_dict(saved) for saved in measured["profiles"]]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    units = {"times": "ms", "sent": "bytes per step", "peak_memory": "bytes"}
    measured = {"command": measured["command"], "date": now, "units": units} | measured
    text = dumps(measured, indent=1) + "\n"
    atomic_write(out / PROFILE_FILE, text)
    write(draw(profiles), out / CHART_FILE)
    if as_json:
        print(text, end="")
    else:
        _show(profiles, measured, out)


def _show(profiles: list[AlgorithmProfile], measured: dict, out: Path) -> None:
    from fastclip.terminal import console, say
    from fastclip.tools.profiling.breakdown import as_table, rank_counts

    console().print(as_table(profiles))
    local_batch, most = profiles[0].batch // profiles[0].num_ranks, max(rank_counts(profiles))
    lines = [
        f"Mean (sd) of {measured['steps']} steps after {measured['warmup']} warmup steps; "
        f"{local_batch:,} pairs per rank and step.",
        "Pure communication does not overlap with computation. Others is the rest of the total.",
        f"Peak memory is the {profiles[0].workers[0].memory}.",
    ]
    if most > 1:
        lines.append("The slowest rank is the one that others wait for: it has the least pure communication.")
    cores, threads = measured["machine"]["cores"], measured["machine"]["threads"]
    if not measured["machine"]["gpu"] and most * threads > cores:
        lines.append(f"! {most} ranks with {threads} threads each share {cores} cores.")
    lines += [f"! {note}" for note in measured["left_out"]]
    say("\n".join(["", *lines, f"All numbers, a chart, and traces for ui.perfetto.dev: {out}"]))


def _rank_counts(ranks: str) -> list[int]:
    numbers = ranks.split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise OptionError("ranks", ranks, "must be positive integers separated by commas", example="1,2")
    return sorted({int(number) for number in numbers})


def _versions() -> dict[str, str]:
    packages = ("fastclip", "torch", "open_clip_torch", "numpy")
    return {package: version(package) for package in packages} | {"python": platform.python_version()}


def _machine() -> dict:
    import torch

    from fastclip.files import cores

    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
