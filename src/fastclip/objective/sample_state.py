"""The state of each sample between its visits: log u, and individual temperatures and their moments.

The state is one array of n rows, split into equal blocks of consecutive ids, one block per rank. A step reads
and writes only the rows of its batch: only creating, saving and loading the state (`saved_state.py`) takes
time proportional to n.

Letters: B global batch, n samples. Columns: log_u n×2 (image side, text side), and with individual
temperatures tau n×2, its Adam moments tau_m and tau_v n×2, and tau_visits n×1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastclip.objective.exchange import Exchange, Pending

Columns = dict[str, Tensor]


class Fetch:
    """The state of a batch, on its way to every rank: first the ids are gathered, then the owners' rows.

    `advance` starts the second part; both overlap with the encoders if it is called while they run.
    """

    def __init__(self, state: SampleState, index_b: Tensor, ids: Pending):
        self.index_b = index_b
        """The original tensor: forward must be called with the same one."""
        self._state, self._ids = state, ids
        self._rows: Pending | None = None
        self.group_B: Tensor | None = None

    def advance(self) -> None:
        """Owners fill in their rows, and a sum combines them; does nothing the second time."""
        if self._rows is not None:
            return
        state = self._state
        sent_B = self._ids.wait()
        self.id_B = sent_B if sent_B.ndim == 1 else sent_B[:, 0]
        self.group_B = None if sent_B.ndim == 1 else sent_B[:, 1].contiguous()
        row_B = self.id_B - state.start
        mine_B = (row_B >= 0) & (row_B < state.held)
        self.row_B = torch.where(mine_B, row_B, state.held)
        """This rank's row of each sample; the spare row for samples of other ranks."""
        self._rows = state.exchange.sum(state.values(self.row_B).masked_fill_(~mine_B[:, None], 0.0))

    @property
    def values_Bc(self) -> Tensor:
        """log u, and τ if it is individual, before this step."""
        self.advance()
        assert self._rows is not None
        return self._rows.wait()

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """log u (B×2), and τ (B×2) or None; NaN for an id that does not exist, which the loss then shows."""
        values_Bc = self.values_Bc
        known_B = (self.id_B >= 0) & (self.id_B < self._state.num_samples)
        values_Bc = values_Bc.masked_fill(~known_B[:, None], torch.nan)
        return values_Bc[:, :2], values_Bc[:, 2:] if values_Bc.shape[1] > 2 else None


class Written(NamedTuple):
    """The values that a write replaced."""

    row_B: Tensor
    old: Columns
    visited: Tensor


class SampleState:
    """n rows over K ranks; this one holds `held` of them, and a spare row for writes of other ranks."""

    def __init__(
        self,
        num_samples: int,
        exchange: Exchange,
        tau: float | None,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.num_samples, self.exchange = num_samples, exchange
        self.block = -(-num_samples // exchange.world_size)
        self.start = exchange.rank * self.block
        self.held = max(0, min(self.block, num_samples - self.start))
        log_u = torch.full((self.held + 1, 2), -torch.inf, device=device, dtype=dtype)
        self.columns: Columns = {"log_u": log_u}
        if tau is not None:
            self.columns["tau"] = torch.full_like(log_u, tau)
            self.columns["tau_m"], self.columns["tau_v"] = torch.zeros_like(log_u), torch.zeros_like(log_u)
            self.columns["tau_visits"] = torch.zeros_like(log_u[:, :1])
        self._fetched = [name for name in ("log_u", "tau") if name in self.columns]
        self.visited = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self.visited.device

    def fetch(self, index_b: Tensor, group_b: Tensor | None = None) -> Fetch:
        """Start to fetch the global batch's rows, on every rank; groups travel with the ids."""
        sent_b = on_device(index_b, self.device)
        if group_b is not None:
            sent_b = torch.stack([sent_b, on_device(group_b, self.device)], dim=1)
        return Fetch(self, index_b, self.exchange.gather(sent_b))

    def values(self, row_B: Tensor) -> Tensor:
        """The columns that forward uses: log u, and τ if it is individual."""
        return torch.cat([self.columns[name].index_select(0, row_B) for name in self._fetched], dim=1)

    def write(self, fetch: Fetch, new: Callable[[Columns], Columns], finite: Tensor) -> Written:
        """Update the batch's rows: `new` maps the old columns of the batch to those that change.

        Of equal ids the first in the global batch writes. Where `finite` is false, nothing is written. Pass
        the result to `undo` to revert the write, before the next one.
        """
        fetch.advance()
        writes_B = first_of_equals(fetch.id_B) & finite
        target_B = torch.where(writes_B, fetch.row_B, self.held)
        old = dict(zip(self._fetched, fetch.values_Bc.split(2, dim=1), strict=True))
        for name in self.columns.keys() - old.keys():
            old[name] = self.columns[name].index_select(0, target_B)
        written = Written(target_B, old, self.visited.clone())
        for name, values in new(old).items():
            self.columns[name].index_copy_(0, target_B, values.to(self.columns[name].dtype))
        unvisited_B = fetch.values_Bc[:, 0] == -torch.inf
        self.visited += (writes_B & unvisited_B).sum()
        return written

    def undo(self, written: Written, skipped: Tensor) -> None:
        """Where `skipped` is true, revert the last write."""
        target_B, old, visited = written
        skipped = skipped.to(self.device).bool()
        target_B = torch.where(skipped, target_B, self.held)
        for name, values in old.items():
            self.columns[name].index_copy_(0, target_B, values)
        self.visited = torch.where(skipped, visited, self.visited)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow a module's `.to(…)` to another device, and to float64 or float32, never lower."""
        self.columns = {name: keep_precise(fn, column) for name, column in self.columns.items()}
        self.visited = self.visited.to(self.columns["log_u"].device)


def first_of_equals(id_B: Tensor) -> Tensor:
    """Whether each position holds the first occurrence of its id."""
    sorted_B, order_B = torch.sort(id_B, stable=True)
    first_B = torch.ones_like(sorted_B, dtype=torch.bool)
    first_B[1:] = sorted_B[1:] != sorted_B[:-1]
    return torch.empty_like(first_B).scatter_(0, order_B, first_B)


def on_device(number_b: Tensor, device: torch.device) -> Tensor:
    """Integers as int64 on the device, without waiting for it."""
    if number_b.device.type == "cpu" and device.type == "cuda":
        number_b = number_b.pin_memory()  # a copy from unpinned memory would wait
    return number_b.to(device, torch.int64, non_blocking=True)


def keep_precise(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply a module's conversion, but never go below float32."""
    moved = fn(tensor)
    return moved if moved.dtype in (torch.float32, torch.float64) else tensor.to(moved.device)
