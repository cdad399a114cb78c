"""Which device a rank computes on, and what the log says about it: never silently the CPU beside a GPU."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from fastclip.distributed.agreement import first_difference
from fastclip.errors import OptionError

if TYPE_CHECKING:
    from fastclip.distributed.world import World

log = logging.getLogger(__name__)
DeviceChoice = Literal["auto", "cuda", "cpu"]


def find_device(local_rank: int, asked: DeviceChoice = "auto") -> torch.device:
    """The device of the rank of this number on its machine; `auto` is a GPU if torch can use one."""
    if asked == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return _own_gpu(local_rank)
    if asked == "cuda":
        advice = f"{_why_not()} --device cpu runs on the CPU."
        raise OptionError("device", asked, "requires a GPU that torch can use", advice=advice)
    if has_gpu():
        message = "Running on the CPU, although this machine has an NVIDIA GPU. %s --device cpu is the CPU."
        log.warning(message, _why_not())
    return torch.device("cpu")


def has_gpu(dev: Path = Path("/dev")) -> bool:
    """Whether the machine has an NVIDIA GPU that is not hidden from this process by CUDA_VISIBLE_DEVICES."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "none")
    return not hidden and any(dev.glob("nvidia[0-9]*"))


def report_devices(world: World) -> None:
    """Log the devices of all ranks and how they communicate; warn if their GPUs differ. All ranks call it."""
    names = world.gather(_name(world.device))
    backend = f", over {dist.get_backend()}" if world.size > 1 else ""
    log.info("Device: %s%s.", ", ".join(f"{n} × {name}" for name, n in Counter(names).items()), backend)
    if differ := first_difference([{"device": name} for name in names]):
        others = f"rank {differ.rank} has {differ.value}, rank 0 {differ.first}"
        log.warning("The GPUs differ (%s): every step takes as long as on the slowest.", others)


def _own_gpu(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if count == 1 and "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        local_rank = 0  # with srun --gpus-per-task each rank sees only its own GPU
    if local_rank >= count:
        raise OptionError(
            "LOCAL_RANK" if "RANK" in os.environ else "SLURM_LOCALID",
            local_rank,
            f"must be less than {count}, the number of GPUs that this rank sees",
            advice=f"Start at most {count} per machine.",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _why_not() -> str:
    """Why torch cannot use a GPU, and what to do."""
    if torch.version.cuda is None:
        return "This torch was built without CUDA: install a build with it (pytorch.org/get-started)."
    if not has_gpu():
        return "There is none here, or CUDA_VISIBLE_DEVICES hides it."
    return (
        f"torch was built for CUDA {torch.version.cuda}, perhaps too new for the driver: see nvidia-smi; "
        "update the driver, or install torch for an older CUDA (pytorch.org/get-started)."
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
