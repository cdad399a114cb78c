"""A checkpoint's files compared with their digests: the ranks of a machine share the work."""

from __future__ import annotations

from pathlib import Path
from socket import gethostname

import torch.distributed as dist

from fastclip.distributed.world import gather_objects
from fastclip.run.state_file import DamagedCheckpoint, check_digest, read_state, tensor_files


def check(path: Path) -> None:
    """Compare every file of a checkpoint with its digest; DamagedCheckpoint on every rank if one differs.

    Every machine reads every file once: its ranks share the work.
    """
    raise_first(gather_objects(find_damage(Path(path), share_of_files())))


def find_damage(path: Path, share: tuple[int, int]) -> DamagedCheckpoint | None:
    """Check state.json and this rank's share of the files."""
    place, ranks = share
    try:
        state = read_state(path)
        for name in tensor_files(path, state)[place::ranks]:
            check_digest(path, name, state)
    except DamagedCheckpoint as error:
        return error
    return None


def share_of_files() -> tuple[int, int]:
    """This rank's place among the ranks on its machine, and their number."""
    machines = gather_objects(gethostname())
    rank = dist.get_rank() if dist.is_initialized() else 0
    return machines[:rank].count(machines[rank]), machines.count(machines[rank])


def raise_first(errors: list[DamagedCheckpoint | None]) -> None:
    """Raise the error of the first rank that has one."""
    for error in errors:
        if error is not None:
            raise error
