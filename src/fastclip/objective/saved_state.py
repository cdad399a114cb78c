"""The sample state as it is saved and loaded: whole on rank 0, for any tool, or each rank's own rows.

Whole: plain tensors of n rows in host memory, on rank 0; tensors without rows on the other ranks. Any number
of ranks loads them, each its own rows. Sharded: DTensors (plain tensors on a single rank), not copied, for
torch.distributed.checkpoint. Rows of another rank, or of another data set, are refused, never taken.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from fastclip.objective.sample_state import Columns, SampleState

log = logging.getLogger(__name__)
CHUNK_BYTES = 64 << 20  # gathered at a time, over all ranks
LARGE_BYTES = 10**9  # from here on, saving a whole state is worth a warning
LOAD_TIMEOUT = 600.0  # seconds; ranks may take very different times to read a file


def sharded(state: SampleState) -> Columns:
    """Each rank's rows, without the spare one and not copied: plain tensors on one rank, DTensors on several.

    torch.distributed.checkpoint saves these at one world size and loads them at any other.
    """
    return {name: _as_sharded(state, column[: state.held]) for name, column in state.columns.items()}


def whole(state: SampleState, timeout: float) -> Columns:
    """All rows on rank 0, copied to host memory; no rows on the others. Every rank must call it.

    Args:
        timeout: seconds to wait for the other ranks; then MissingRanks.
    """
    state.exchange.meet("state_dict()", _layout(state), timeout)
    size = sum(state.num_samples * c.shape[1] * c.element_size() for c in state.columns.values())
    if size > LARGE_BYTES and state.exchange.rank == 0:
        log.warning(
            "state_dict() collects %.1f GB of estimators in the memory of rank 0. Save sharded_state_dict() "
            "with torch.distributed.checkpoint instead: every rank then writes its own part.",
            size / 1e9,
        )
    return {name: _whole_column(state, column) for name, column in state.columns.items()}


def load(state: SampleState, saved: dict[str, object]) -> str | None:
    """Load this rank's rows of whole tensors, or DTensors of this world. Every rank must call it.

    Ranks load all or nothing: returns None, or what is wrong with the columns, here or on another rank.
    """
    problem = next(filter(None, (_problem(state, name, saved[name]) for name in state.columns)), None)
    state.exchange.meet("load_state_dict()", _layout(state), LOAD_TIMEOUT)
    flags = state.exchange.gather_numbers(problem is not None, device=state.device)
    refusing = [str(rank) for rank, (refused,) in enumerate(flags) if refused]
    if refusing:
        return (
            problem or f"rank {', '.join(refusing)} cannot load its part of the saved state: see its error."
        )
    for name, column in state.columns.items():
        column[: state.held].copy_(_own_rows(state, saved[name]))
    count = (state.columns["log_u"][: state.held, 0] > -torch.inf).sum()
    state.visited = state.exchange.sum(count).wait()
    return None


def _layout(state: SampleState) -> str:
    return f"{state.num_samples} {' '.join(state.columns)}"


def _whole_column(state: SampleState, column: Tensor) -> Tensor:
    host = "meta" if column.is_meta else "cpu"
    n, width, K = state.num_samples, column.shape[1], state.exchange.world_size
    if K == 1:
        return column[:n].to(host, copy=True)
    out = torch.empty((n if state.exchange.rank == 0 else 0, width), dtype=column.dtype, device=host)
    most = max(1, CHUNK_BYTES // (K * width * column.element_size()))
    for first in range(0, state.block, most):
        rows = min(most, state.block - first)
        part = column.new_zeros((rows, width))  # the last ranks may hold fewer
        mine = column[: state.held][first : first + rows]
        part[: len(mine)] = mine
        for rank, received in enumerate(state.exchange.gather_to_first(part)):
            place = out[rank * state.block + first :][:rows]
            place.copy_(received[: len(place)])
    return out


def _problem(state: SampleState, name: str, saved: object) -> str | None:
    """Why a saved column cannot be loaded."""
    if not isinstance(saved, Tensor):
        return f"{name} is {'missing' if saved is None else f'of type {type(saved).__name__}'}."
    wanted, n = (state.num_samples, state.columns[name].shape[1]), state.num_samples
    if hasattr(saved, "device_mesh"):
        if tuple(saved.shape) == wanted and _is_own_shard(state, saved):
            return None
        return (
            f"{name} is a DTensor of another rank or another set of ranks. Save state_dict() from all ranks, "
            "or load through torch.distributed.checkpoint."
        )
    if tuple(saved.shape) == wanted:
        return None
    if saved.ndim != 2 or saved.shape[1] != wanted[1]:
        return f"{name} has shape {tuple(saved.shape)}, but this loss needs {wanted}."
    if len(saved) == 0:
        return f"{name} has no rows: only rank 0's state_dict() holds the state. Load that one on every rank."
    return f"{name}: the saved state has {len(saved):,} samples, but this loss has {n:,}."


def _is_own_shard(state: SampleState, saved: Tensor) -> bool:
    """Whether a DTensor holds exactly this rank's rows; one that another rank pickled has its coordinate."""
    if state.exchange.world_size == 1:
        return False
    own = _as_sharded(state, state.columns["log_u"][: state.held])
    mesh, own_mesh = saved.device_mesh, own.device_mesh  # type: ignore[attr-defined]
    return (
        mesh == own_mesh
        and mesh.get_coordinate() == own_mesh.get_coordinate()
        and saved.placements == own.placements  # type: ignore[attr-defined]
        and len(saved.to_local()) == state.held  # type: ignore[attr-defined]
    )


def _own_rows(state: SampleState, saved: Any) -> Tensor:
    if hasattr(saved, "to_local"):
        return saved.to_local()
    return saved[state.start : state.start + state.held]


def _as_sharded(state: SampleState, rows: Tensor) -> Tensor:
    if state.exchange.world_size == 1:
        return rows
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard

    group = state.exchange.group or torch.distributed.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, rows.device.type)
    shape = torch.Size((state.num_samples, rows.shape[1]))
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
