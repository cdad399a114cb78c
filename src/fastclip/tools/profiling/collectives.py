"""Bytes that a rank sends in a step, by kind of collective, counted where torch issues them.

The formulas are those of rings, which both NCCL and gloo use for large tensors. K is the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Rule = tuple[str, int, Callable[[int], float]]
"""A c10d operator's kind, the position of the argument it sends, and bytes sent per byte of it, by K."""

_RULES: dict[str, _Rule] = {
    "allreduce_": ("all_reduce", 0, lambda K: 2 * (K - 1) / K),
    "allgather_": ("all_gather", 1, lambda K: K - 1),
    "_allgather_base_": ("all_gather", 1, lambda K: K - 1),
    "reduce_scatter_": ("reduce_scatter", 0, lambda K: K - 1),
    "_reduce_scatter_base_": ("reduce_scatter", 0, lambda K: K - 1),
    "broadcast_": ("broadcast", 0, lambda K: (K - 1) / K),  # all ranks except the last forward it: the mean
    "scatter_": ("scatter", 1, lambda K: (K - 1) / K),  # the root sends one to each, the others none
    "alltoall_": ("all_to_all", 1, lambda K: (K - 1) / K),
    "alltoall_base_": ("all_to_all", 1, lambda K: (K - 1) / K),
    "send": ("send", 0, lambda K: 1),
}
_SENDS_NOTHING = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")


def bytes_sent(step: Callable[[], object]) -> dict[str, float]:
    """Run `step` and count what this rank sends; nothing if it is the only one."""
    if not dist.is_initialized():
        step()
        return {}
    with _Counter() as counter:
        step()
    return dict(sorted(counter.sent.items()))


class _Counter(TorchDispatchMode):
    """Sees every operator, including those that DDP issues in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name not in _SENDS_NOTHING:
            kind, place, share = _RULES.get(name, (name, 0, lambda K: 1))  # unknown: its tensors, once
            self.sent[kind] += share(dist.get_world_size()) * _size(args[place])
        return func(*args, **(kwargs or {}))


def _size(tensors: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
