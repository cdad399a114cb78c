"""Bytes that each rank sends per step besides the weights' gradients, compared with open_clip's ClipLoss.

Counted at the c10d calls, with the formulas of ring collectives. The process group is torch's fake one, so
any number of ranks fits into one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_clip.loss import ClipLoss
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.record import save
from fastclip import GlobalContrastiveLoss
from fastclip.tools.profiling.collectives import bytes_sent


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
        for label, name, options in (
            ("fastclip-v3", "fastclip-v3", {}),
            ("fastclip-v2", "fastclip-v2", {}),
            ("fastclip-v3, float16 wire", "fastclip-v3", {"wire_dtype": torch.float16}),
            ("fastclip-v3, distinct negatives", "fastclip-v3", {"negatives": "distinct"}),
        ):
            loss = GlobalContrastiveLoss(name, 10_000, **options)
            batch = (image, text, index, *([index] if "negatives" in options else []))
            loss(*batch)  # the first step also agrees on the batch
            steps[label] = lambda loss=loss, batch=batch: loss(*batch).value.backward()
        sent = {label: sum(bytes_sent(step).values()) for label, step in steps.items()}
        for label, count in sent.items():
            ratio = count / sent["ClipLoss"]
            figures[f"K={K}, {label}"] = {"bytes_sent": count, "ratio": round(ratio, 4)}
            print(f"K={K}  {label:28s} {count / 2**20:8.3f} MiB  {ratio:.4f}x")
        dist.destroy_process_group()
    save("bytes_on_the_wire", seed, {"local_batch": b, "features": d, "cases": figures})


if __name__ == "__main__":
    main()
