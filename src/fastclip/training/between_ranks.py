"""What ranks must agree on: their settings, the means of a record, BatchNorm statistics, and τ."""

from __future__ import annotations

from platform import python_version_tuple

import open_clip
import torch
import torch.distributed as dist
from torch import Tensor

from fastclip import __version__
from fastclip.config.resolved import Resolved, named_options
from fastclip.distributed.world import World
from fastclip.model import TwoTowers
from fastclip.optim import Stepper


def shared_settings(config: Resolved) -> dict[str, object]:
    """What must be the same on every rank, except the data; `out` is last, as it follows the algorithm."""
    options = named_options(config)
    versions = {
        "fastclip version": __version__,
        "torch version": str(torch.__version__),
        "open_clip version": open_clip.__version__,
        "python version": ".".join(python_version_tuple()[:2]),
    }
    return versions | {name: value for name, value in options.items() if name != "out"} | {"out": config.out}


def means_over_ranks(world: World, stats: dict[str, Tensor]) -> dict[str, float]:
    """Means of scalars. Most are equal on all ranks; losses of open_clip's algorithms are not."""
    values = torch.stack([value.detach().double() for value in stats.values()])
    if world.size > 1:
        dist.all_reduce(values)
        values /= world.size
    return dict(zip(stats, values.tolist(), strict=True))


def agree_on_buffers(world: World, towers: TwoTowers) -> None:
    """Copy rank 0's BatchNorm statistics to all ranks, as DDP would in the next step."""
    if world.size > 1:
        for buffer in towers.buffers():
            dist.broadcast(buffer, src=0)


def agree_on_tau(world: World, stepper: Stepper) -> None:
    """Copy rank 0's τ and its moments to all ranks: they are outside DDP, and only rank 0's are saved."""
    if world.size > 1:
        for tau in stepper.tau:
            for tensor in (tau.detach(), *stepper.optimizer.state[tau].values()):
                dist.broadcast(tensor, src=0)
