"""Memory of what loader workers keep ready, and how often a shuffled epoch opens its shards.

Memory: the loader of cc12m-large on one rank (2,048 pairs a step, 6 loader workers, 224 x 224) reads
generated JPEGs. After each batch the loader workers prefetch until they stop, and the growth of /dev/shm is
measured. What would be pinned for a GPU is computed: torch rounds each part up to a power of two.

Opens: one shuffled epoch over 1,000 small shards, with every open and read of the loader workers counted, and
the same order of reads with the 64 open files of earlier versions.
"""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from time import monotonic, sleep
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch.utils.data import get_worker_info

from benchmarks.record import save
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.data import readers
from fastclip.data.decode import Augment, FastDecoder
from fastclip.data.loader import PairLoader
from fastclip.data.machine import SHARED_MEMORY
from fastclip.data.manifest import Manifest, open_manifest
from fastclip.data.order import Order
from fastclip.data.prefetch import BUDGET, pinned_bytes, plan_prefetch
from fastclip.data.readers import OpenFiles
from fastclip.datasets.resumable_build import write_tar

SEED, STEPS, FORMER_FACTOR, FORMER_OPEN = 0, 3, 4, 64
SHARDS, PER_SHARD, OPENING_WORKERS = 1000, 30, 2


def jpeg(rng: np.random.Generator, side: int) -> bytes:
    pixels, file = rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(pixels).resize((side, side)).save(file, "JPEG")
    return file.getvalue()


def collection(folder: Path, shards: int, per_shard: int, side: int) -> Manifest:
    """Shards of generated pairs; a few images are repeated."""
    folder.mkdir()
    images = [jpeg(np.random.default_rng(SEED + i), side) for i in range(16)]
    for shard in range(shards):
        members = []
        for i in range(per_shard):
            members += [(f"{i:05d}.jpg", images[i % 16]), (f"{i:05d}.txt", f"pair {shard} {i}".encode())]
        write_tar(folder / f"{shard:05d}.tar", members)
    return open_manifest(str(folder))


def tokens(captions: list[str]) -> torch.Tensor:
    return torch.zeros(len(captions), 77, dtype=torch.int64)


def used() -> int:
    space = os.statvfs(SHARED_MEMORY)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def settled(before: int) -> int:
    """The bytes in /dev/shm once they have not grown for five seconds."""
    most, grown = used(), monotonic()
    while monotonic() < grown + 5:
        sleep(0.1)
        if (now := used()) > most:
            most, grown = now, monotonic()
    return most - before


def memory(folder: Path) -> dict:
    config = resolve(parse(["--config", "cc12m-large"]))
    batch, workers, decoder = config.batch.size, int(config.data.workers), FastDecoder(Augment())
    manifest, before = collection(folder, 4, batch, side=256), used()
    loader = PairLoader(
        manifest, Order(len(manifest), batch), decoder, tokens, stop_step=100, workers=workers
    )
    batches, shared = iter(loader), []
    for _ in range(STEPS):
        next(batches)
        shared.append(settled(before))
        print(f"/dev/shm: {shared[-1] / 1e9:.2f} GB in flight")
    return {"recipe": "cc12m-large, one rank", "shared_gb_measured": round(max(shared) / 1e9, 3)} | computed(
        batch, workers, decoder.form.nbytes
    )


def computed(batch: int, workers: int, image_bytes: int) -> dict:
    plan = plan_prefetch(batch, image_bytes, workers, None)
    part, parts = plan.pairs * image_bytes, plan.in_memory(workers)
    return {
        "local_batch": batch,
        "loader_workers": workers,
        "pairs_per_part": plan.pairs,
        "parts_in_flight": plan.per_worker * workers,
        "batches_in_flight": round(plan.per_worker * workers * plan.pairs / batch, 2),
        "shared_gb_computed": round(parts * part / 1e9, 3),
        "pinned_gb_computed": round(parts * pinned_bytes(part) / 1e9, 3),
        "formerly_shared_gb_computed": round(FORMER_FACTOR * workers * batch * image_bytes / 1e9, 2),
    }


def opens(folder: Path) -> dict:
    manifest = collection(folder, SHARDS, PER_SHARD, side=32)
    samples, batch = len(manifest), 500
    counts = torch.zeros(2, OPENING_WORKERS, dtype=torch.int64).share_memory_()

    def counting(row: int, original):
        def call(*args, **options):
            counts[row, 0 if (worker := get_worker_info()) is None else worker.id] += 1
            return original(*args, **options)

        return call

    opened, pread = counting(0, os.open), counting(1, os.pread)
    order = Order(samples, batch, SEED, "full")
    with patch.object(readers.os, "open", opened), patch.object(readers.os, "pread", pread):
        decoder = FastDecoder(Augment(image_size=16))
        steps = samples // batch
        loader = PairLoader(manifest, order, decoder, tokens, stop_step=steps, workers=OPENING_WORKERS)
        seen = sum(len(one.index) for one in loader)
        now = counts.sum(dim=1).tolist()
        counts.zero_()
        manifest._tars = OpenFiles(manifest._tars.versions, FORMER_OPEN)
        for step in range(steps):
            for sample in order.global_batch(step).ids.tolist():
                manifest.pair_at(manifest.place(sample))
        formerly = int(counts[0].sum())
    return {
        "shards": SHARDS,
        "samples": seen,
        "loader_workers": OPENING_WORKERS,
        "opens_per_sample": round(now[0] / seen, 4),
        "reads_per_sample": round(now[1] / seen, 4),
        "opens_per_sample_with_64_open_files": round(formerly / seen, 4),
    }


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FASTCLIP_CACHE"] = temporary + "/cache"
        figures = {
            "budget_gb": BUDGET / 1e9,
            "memory": memory(Path(temporary, "pairs")),
            "laion-xlarge, one rank": computed(5120, 8, FastDecoder(Augment()).form.nbytes),
            "opens": opens(Path(temporary, "shards")),
        }
    for name, figure in figures.items():
        print(name, figure)
    save("loader_memory", SEED, figures)


if __name__ == "__main__":
    main()
