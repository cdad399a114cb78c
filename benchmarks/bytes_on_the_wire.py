"""Bytes that each worker sends in a step besides the weights' gradients, against open_clip's ClipLoss.

Counted at the c10d calls, with the formulas of ring collectives; the process group is torch's fake one, so
any number of workers fits into one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_clip.loss import ClipLoss
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.record import save
from fastclip import GlobalContrastiveLoss


class _Counter(TorchDispatchMode):
    """Adds up what a ring would send for each c10d operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.bytes += _ring_bytes(func.__name__.split(".")[0], args, dist.get_world_size())
        return func(*args, **(kwargs or {}))


def _ring_bytes(name: str, args: tuple, K: int) -> float:
    """What one of K workers sends. Arguments are (outputs, inputs, …), those of all-reduce (tensors, …)."""
    sizes = [
        sum(x.numel() * x.element_size() for x in tree_leaves(arg) if isinstance(x, torch.Tensor))
        for arg in args
    ]
    if name == "allreduce_":
        return 2 * (K - 1) / K * sizes[0]
    if name in ("allgather_", "_allgather_base_"):
        return (K - 1) * sizes[1]
    if name in ("reduce_scatter_", "_reduce_scatter_base_", "alltoall_", "alltoall_base_"):
        return (K - 1) / K * sizes[1]
    raise NotImplementedError(f"no ring formula for c10d.{name}")


def count_bytes(step: Callable[[], object]) -> float:
    """Bytes that this worker sends during `step`."""
    with _Counter() as counter:
        step()
    return counter.bytes


def main() -> None:
    b, d, seed = 128, 512, 0
    torch.manual_seed(seed)
    figures = {}
    for K in (4, 8):
        dist.init_process_group("fake", rank=0, world_size=K, store=FakeStore())
        image, text = (F.normalize(torch.randn(b, d), dim=-1).requires_grad_() for _ in range(2))
        index, scale = torch.arange(b), torch.tensor(10.0)
        theirs = ClipLoss(local_loss=True, gather_with_grad=True, rank=0, world_size=K)
        steps = {"ClipLoss": lambda loss=theirs, i=image, t=text, s=scale: loss(i, t, s).backward()}
        for label, name, wire in (
            ("fastclip-v3", "fastclip-v3", None),
            ("fastclip-v2", "fastclip-v2", None),
            ("fastclip-v3, float16 wire", "fastclip-v3", torch.float16),
        ):
            loss = GlobalContrastiveLoss(name, 10_000, wire_dtype=wire)
            loss(image, text, index)  # the first step also agrees on the batch
            steps[label] = lambda loss=loss, i=image, t=text, x=index: loss(i, t, x).value.backward()
        sent = {label: count_bytes(step) for label, step in steps.items()}
        for label, count in sent.items():
            ratio = count / sent["ClipLoss"]
            figures[f"K={K}, {label}"] = {"bytes_sent": count, "ratio": round(ratio, 4)}
            print(f"K={K}  {label:28s} {count / 2**20:8.3f} MiB  {ratio:.4f}x")
        dist.destroy_process_group()
    save("bytes_on_the_wire", seed, {"local_batch": b, "features": d, "cases": figures})


if __name__ == "__main__":
    main()
