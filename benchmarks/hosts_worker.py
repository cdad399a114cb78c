"""The program of one host of the test bed: profile the trainer's steps, case after case.

torchrun … -m benchmarks.hosts_worker OUT STEPS WARM_UP FIRST --config=emoji …    # as hosts.py calls it

FIRST is the number of the first case, which runs on a cold machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional

from fastclip.config.options import TrainConfig
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import join_world, silence_other_ranks
from fastclip.tools.profiling.breakdown import AlgorithmProfile
from fastclip.tools.profiling.profiler import profile_steps


class Case(NamedTuple):
    """An algorithm and how it communicates."""

    algorithm: str
    options: tuple[str, ...] = ()
    at_once: bool = False
    """Whether gradients of features are sent in one collective, as with NCCL."""

    def config(self, options: list[str]) -> TrainConfig:
        return resolve(parse([*options, f"--algorithm={self.algorithm}", *self.options]))


TIMEOUT = 120  # seconds to wait for the other hosts
CASES = {
    "openclip": Case("openclip"),
    "openclip at once": Case("openclip", at_once=True),
    "fastclip-v3": Case("fastclip-v3"),
    "fastclip-v3 float16": Case("fastclip-v3", ("--loss.wire_dtype=float16",)),
}


def main() -> None:
    folder, steps, warm_up, first, *options = sys.argv[1:]
    out, profiles, names = Path(folder), [], list(CASES)
    start = int(first) % len(names)
    with join_world(timeout=TIMEOUT) as world:
        silence_other_ranks(world)
        for name in names[start:] + names[:start]:
            case = CASES[name]
            config, trace = case.config(options), out / f"trace-{world.rank}.json.gz"
            with gradients_at_once() if case.at_once else nullcontext():
                rank = profile_steps(config, world, trace, steps=int(steps), warmup=int(warm_up))
            profiles.append(AlgorithmProfile(name, config.batch.size, world.gather(rank)))
        if world.is_main:
            (out / "profiles.json").write_text(json.dumps([asdict(profile) for profile in profiles]))


@contextmanager
def gradients_at_once() -> Iterator[None]:
    """Inside, all hosts send the gradients of gathered features at the same time.

    With NCCL torch sends them in one reduce-scatter. With gloo one host after another scatters its own while
    the others wait: as many bytes, up to K times as long. That is gloo's cost and not OpenCLIP's.
    """

    def forward(ctx, group, out: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        sent = torch.stack(tensors)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.unbind()

    one_by_one = functional._AlltoAll.forward
    functional._AlltoAll.forward = staticmethod(forward)
    try:
        yield
    finally:
        functional._AlltoAll.forward = staticmethod(one_by_one)


if __name__ == "__main__":
    main()
