"""The verb `fastclip profile`."""

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

if TYPE_CHECKING:
    from fastclip.config.resolved import Resolved
    from fastclip.tools.profiling.breakdown import AlgorithmProfile

DEFAULT_ALGORITHMS = "openclip,fastclip-v1,fastclip-v2,fastclip-v3"  # those of the paper's Figure
PROFILE_FILE, PICTURE_FILE = "profile.json", "profile.png"


def profile(
    train_options: list[str],
    command: str,
    config: Sequence[str] = (),
    algorithm: str = DEFAULT_ALGORITHMS,
    steps: int = 20,
    warmup: int = 5,
    sizes: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Where the time of a training step goes: computation, communication (pure, and hidden under computation)
    and others, as in the paper's tables; with bytes sent, peak memory and pairs a second.

      fastclip profile --config emoji
      fastclip profile --config emoji --algorithm openclip,fastclip-v3 --batch.size 256 --steps 50
      torchrun --nproc-per-node 8 -m fastclip profile --config cc12m-large --data.train 'shards/*.tar'
      fastclip profile --config emoji --sizes 1,2,4     with 1, 2, 4 workers on this machine, and the speed-up

    The trainer's own steps run under torch.profiler, for each algorithm from a new model. Any option of
    `fastclip train` may be given. Nothing is evaluated, nothing is saved but the profile, in OUT:
    profile.json with every step of every worker, profile.png, and a trace of each algorithm and worker, to be
    opened at https://ui.perfetto.dev or chrome://tracing. Recording has its price, most of all with small
    models: compare the algorithms and sizes of a profile with each other.

    With --sizes batch.size is that of ONE worker, as in the paper: the global batch grows with the workers.
    Without it batch.size is the global batch, as in `fastclip train`. On a CPU each of the workers that
    --sizes starts has OMP_NUM_THREADS threads, one if that is not set.

    Args:
        config: a recipe's name, or a YAML file.
        algorithm: one, or several with commas between.
        steps: steps that are measured.
        warmup: steps before them.
        sizes: start so many workers on this machine, one number after another: 1,2,4.
        out: where all is kept; profiles/RECIPE if left out.
        json: print profile.json instead of the table.
    """
    from fastclip.config.parse import parse
    from fastclip.tools.profiling.configs import configs_for

    words = [*(f"--config={name}" for name in config), *train_options]
    # before torch is imported: a mistake is told at once
    configs, left_out = configs_for(algorithm.split(","), parse(words, prog="fastclip profile"))
    for name, value, example in (("--steps", steps, 20), ("--warmup", warmup, 5)):
        if value < 1:
            raise ValueError(f"{name} {value} must be at least 1; try {example}.")
    out = out or Path("profiles") / (Path(config[-1]).stem if config else "train")
    # or the profiler's library complains at every start that there is no GPU
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if sizes is None:
        found = _profile_here(configs, out, steps, warmup)
    else:
        words += [f"--steps={steps}", f"--warmup={warmup}"]
        found = _profile_sizes(words, configs, _sizes(sizes), out)
    if found is not None:
        _keep_and_show(found | {"command": command, "left_out": left_out}, out, json)


def _profile_here(configs: list[Resolved], out: Path, steps: int, warmup: int) -> dict | None:
    """As one rank, alone or of several; rank 0 returns what all of them found."""
    from fastclip.distributed.world import join_world, silence_other_ranks
    from fastclip.files import make_writable
    from fastclip.tools.profiling.breakdown import AlgorithmProfile
    from fastclip.tools.profiling.profiler import profile_steps

    with join_world(timeout=configs[0].timeout) as world:
        silence_other_ranks(world)
        if world.is_main:
            make_writable(out)
        profiles = []
        for config in configs:
            trace = out / f"trace-{config.algorithm}-rank{world.rank}.json.gz"
            worker = profile_steps(config, world, trace, steps=steps, warmup=warmup)
            profiles.append(AlgorithmProfile(config.algorithm, config.batch.size, world.gather(worker)))
    if not world.is_main:
        return None
    facts = {"steps": steps, "warmup": warmup, "versions": _versions(), "machine": _machine()}
    return facts | {"profiles": [asdict(profile) for profile in profiles]}


def _profile_sizes(words: list[str], configs: list[Resolved], sizes: list[int], out: Path) -> dict:
    """As several processes for each number of workers, one number after another."""
    import torch

    from fastclip.distributed.world import find_place
    from fastclip.tools.profiling.sizes import profile_sizes

    if find_place(os.environ) is not None:
        raise ValueError("--sizes starts workers by itself; call it without torchrun or srun.")
    gpus = torch.cuda.device_count()
    if gpus and max(sizes) > gpus:
        raise ValueError(
            f"--sizes asks for {max(sizes)} workers, and there are {gpus} GPUs; try --sizes 1,{gpus}."
        )
    words = [*words, f"--algorithm={','.join(config.algorithm for config in configs)}"]
    found = profile_sizes(words, sizes, configs[0].batch.size, out, len(configs))
    return found[0] | {"profiles": [profile for one in found for profile in one["profiles"]]}


def _keep_and_show(found: dict, out: Path, as_json: bool) -> None:
    from fastclip.files import atomic_write
    from fastclip.tools.profiling.breakdown import AlgorithmProfile
    from fastclip.tools.profiling.profile_chart import draw
    from fastclip.tools.report.output import write

    profiles = [AlgorithmProfile.from_dict(saved) for saved in found["profiles"]]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    units = {"times": "ms", "sent": "bytes a step", "peak_memory": "bytes"}
    found = {"command": found["command"], "date": now, "units": units} | found
    text = dumps(found, indent=1) + "\n"
    atomic_write(out / PROFILE_FILE, text)
    write(draw(profiles), out / PICTURE_FILE)
    if as_json:
        print(text, end="")
    else:
        _show(profiles, found, out)


def _show(profiles: list[AlgorithmProfile], found: dict, out: Path) -> None:
    from fastclip.terminal import console
    from fastclip.tools.profiling.breakdown import as_table, sizes

    console().print(as_table(profiles))
    local = f"{profiles[0].batch // profiles[0].size:,} pairs a step on each worker"
    most = max(sizes(profiles))
    any_size = ", however many there are" if len(sizes(profiles)) > 1 else ""
    lines = [
        f"Mean (sd) of {found['steps']} steps after {found['warmup']} to warm up; {local}{any_size}.",
        "Pure communication is what no computation hides. Others is the rest of the total.",
        f"Peak memory is the {profiles[0].workers[0].memory}.",
    ]
    if most > 1:
        lines.append("The slowest worker is the one that the others wait for: the least pure communication.")
    cores, threads = found["machine"]["cores"], found["machine"]["threads"]
    if not found["machine"]["gpu"] and most * threads > cores:
        lines.append(f"! {most} workers of {threads} threads share {cores} cores.")
    lines += [f"! {sentence}" for sentence in found["left_out"]]
    print("\n".join(["", *lines, f"Figures, a picture and traces for ui.perfetto.dev: {out}"]))


def _sizes(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise ValueError(f"--sizes {text} must be numbers of workers with commas between; try --sizes 1,2.")
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
