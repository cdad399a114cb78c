"""How many bytes a worker sends in a step, by kind of collective: counted where torch issues them.

Formulas are those of rings, which both NCCL and gloo use for what is large. K is the number of workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Rule = tuple[str, int, Callable[[int], float]]
"""A c10d operator's kind, the position of what it sends, and the bytes sent for each byte of that, by K."""

_RULES: dict[str, _Rule] = {
    "allreduce_": ("all_reduce", 0, lambda K: 2 * (K - 1) / K),
    "allgather_": ("all_gather", 1, lambda K: K - 1),
    "_allgather_base_": ("all_gather", 1, lambda K: K - 1),
    "reduce_scatter_": ("reduce_scatter", 0, lambda K: K - 1),
    "_reduce_scatter_base_": ("reduce_scatter", 0, lambda K: K - 1),
    "broadcast_": ("broadcast", 0, lambda K: (K - 1) / K),  # all but the last hand it on: their mean
    "scatter_": ("scatter", 1, lambda K: (K - 1) / K),  # the root has one for each, the others none
    "alltoall_": ("all_to_all", 1, lambda K: (K - 1) / K),
    "alltoall_base_": ("all_to_all", 1, lambda K: (K - 1) / K),
    "send": ("send", 0, lambda K: 1),
}
_SENDS_NOTHING = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")


def bytes_sent(step: Callable[[], object]) -> dict[str, float]:
    """What this worker sends while it does `step`; nothing if it is alone."""
    if not dist.is_initialized():
        step()
        return {}
    with _Counter() as counter:
        step()
    return dict(sorted(counter.sent.items()))


class _Counter(TorchDispatchMode):
    """Sees every operator, those that DDP issues in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name not in _SENDS_NOTHING:
            kind, place, share = _RULES.get(name, (name, 0, lambda K: 1))  # an unknown one: its tensors, once
            self.sent[kind] += share(dist.get_world_size()) * _size(args[place])
        return func(*args, **(kwargs or {}))


def _size(tensors: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
