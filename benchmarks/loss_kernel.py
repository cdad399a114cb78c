"""Time and memory of the loss, forward and backward, compared with open_clip's ClipLoss.

Two cases: one process with the whole batch (b = B), and one rank of a larger job (b < B), where the features
are gathered before the clock starts: only computation is measured. ClipLoss runs with `local_loss` and
`gather_with_grad`, without which its gradients are not those of the global batch.

Times are medians of interleaved rounds. Memory is the rise of the process's high-water mark during one step,
read in a subprocess per case.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss
from torch import Tensor

from benchmarks.record import interleaved, save
from fastclip import GlobalContrastiveLoss
from fastclip.objective.exchange import Exchange, Pending

D, SEED = 512, 0
KEPT, RECOMPUTED = 1024, 2  # MiB


class OneOfMany(Exchange):
    """Rank 0 of K, without the others: gathered features are given, other gathers repeat its own rows."""

    def __init__(self, K: int, gathered: dict[int, Tensor]):
        self.group, self.world_size, self.rank = None, K, 0
        self.gathered = gathered  # by the address of the local features

    def check_unchanged(self) -> None:
        pass

    def gather(self, tensor: Tensor) -> Pending:
        if tensor.data_ptr() in self.gathered:
            return Pending(self.gathered[tensor.data_ptr()])
        return Pending(tensor.repeat(self.world_size, *[1] * (tensor.ndim - 1)))

    def sum(self, tensor: Tensor) -> Pending:
        return Pending(tensor)


def make_step(case: str, b: int, B: int) -> Callable[[], None]:
    """Return a function that runs one forward and backward of this case."""
    torch.manual_seed(SEED)
    image_Bd, text_Bd = (F.normalize(torch.randn(B, D), dim=-1) for _ in range(2))
    image, text = (x[:b].clone().requires_grad_() for x in (image_Bd, text_Bd))
    if case == "ClipLoss":
        return _clip_step(image, text, image_Bd.requires_grad_(), text_Bd.requires_grad_())
    exchange = OneOfMany(B // b, {image.data_ptr(): image_Bd, text.data_ptr(): text_Bd})
    with patch("fastclip.objective.loss.Exchange", lambda group: exchange):
        tiles, _, negatives = case.partition(", ")
        tile_mib = {"kept": KEPT, "recomputed": RECOMPUTED}[tiles]
        loss = GlobalContrastiveLoss("fastclip-v3", B, tile_mib=tile_mib, negatives=negatives or "all")
    index = torch.arange(b)
    group = index // 2 if negatives else None  # each caption twice

    def step() -> None:
        image.grad = text.grad = loss.log_scale.grad = None
        loss(image, text, index, group).value.backward()

    return step


def _clip_step(image: Tensor, text: Tensor, image_Bd: Tensor, text_Bd: Tensor) -> Callable[[], None]:
    K = len(image_Bd) // len(image)
    loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=0, world_size=K)
    scale = torch.tensor(1 / 0.07, requires_grad=True)

    def step() -> None:
        for x in (image, text, image_Bd, text_Bd, scale):
            x.grad = None
        with patch("open_clip.loss.gather_features", lambda *args, **kwargs: (image_Bd, text_Bd)):
            loss(image, text, scale).backward()

    return step


def peak_memory(case: str, b: int, B: int) -> dict[str, float]:
    """Extra memory and time of one step, in its own process."""
    command = [sys.executable, "-m", "benchmarks.loss_kernel", "--memory", case, str(b), str(B)]
    # glibc must return freed memory immediately, or memory freed by the set-up would hide that of the step
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def _measure_memory(case: str, b: int, B: int) -> None:
    make_step(case, 64, 64 * (B // b))()  # libraries load and allocate their own memory
    step = make_step(case, b, B)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = _status("VmRSS")
    start = perf_counter()
    step()
    seconds = perf_counter() - start
    print(json.dumps({"extra_mib": (_status("VmHWM") - before) / 1024, "seconds": seconds}))


def _status(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", action="store_true", help="also run B = 65,536 (about 5 minutes)")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.memory:
        _measure_memory(options.memory[0], int(options.memory[1]), int(options.memory[2]))
        return
    figures = {}
    for b, B in ((256, 8192), (2048, 2048)):
        cases = ("ClipLoss", "kept", "kept, distinct", "recomputed", "recomputed, distinct")
        seconds = interleaved({case: make_step(case, b, B) for case in cases}, options.rounds)
        memory = {case: peak_memory(case, b, B)["extra_mib"] for case in cases}
        for case in cases:
            figures[f"b={b}, B={B}, {case}"] = figure = {
                "milliseconds": round(1e3 * seconds[case], 2),
                "time_ratio": round(seconds[case] / seconds["ClipLoss"], 3),
                "extra_mib": round(memory[case], 1),
                "memory_ratio": round(memory[case] / memory["ClipLoss"], 3),
            }
            if case.endswith(", distinct"):
                plain = case.removesuffix(", distinct")
                figure["time_ratio_to_all"] = round(seconds[case] / seconds[plain], 3)
                figure["memory_ratio_to_all"] = round(memory[case] / memory[plain], 3)
            print(f"b={b} B={B} {case:12s}", figure, flush=True)
    memory = {case: peak_memory(case, 16384, 16384) for case in ("ClipLoss", "recomputed")}
    for case, measured in memory.items():
        figures[f"b=B=16384, {case}"] = figure = {
            "extra_mib": round(measured["extra_mib"], 1),
            "memory_ratio": round(measured["extra_mib"] / memory["ClipLoss"]["extra_mib"], 4),
        }
        print(f"b=B=16384 {case:12s}", figure, flush=True)
    if options.largest:
        measured = peak_memory("recomputed", 65536, 65536)
        figures["b=B=65536, recomputed"] = figure = {key: round(value, 1) for key, value in measured.items()}
        print("b=B=65536 recomputed  ", figure)
    save("loss_kernel", SEED, figures)


if __name__ == "__main__":
    main()
