"""Speed of the data layer's lookups: finding a batch among 300 million pairs, and indexing shards."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest.mock import patch

import numpy as np
from xxhash import xxh3_64_intdigest

from benchmarks.record import save
from fastclip.checked_files import CHUNK, digests_of, write_checked
from fastclip.data.index_together import Crew
from fastclip.data.manifest import _Building, open_manifest
from fastclip.data.order import Order
from fastclip.data.rows import ROW
from fastclip.datasets.resumable_build import write_tar

ROWS, SHARDS, BATCH, SEED = 300_000_000, 30_000, 5120, 0


def _fake_write(building: _Building, part: Path, indexes: list) -> None:
    """Write the manifest of 30,000 shards with 10,000 pairs each."""
    paths, columns, stamps = [file.path for file in building.files], building.columns, building.stamps
    listed = [{"path": path, "kind": "tar", "rows": ROWS // SHARDS, "captions": ""} for path in paths]
    about = {"pairs": ROWS, "fingerprint": "", "fingerprint_1": "", "images_sampled": True, "problems": {}}
    about |= {"extra_captions": [0, 0], "columns": columns, "stamps": stamps, "files": listed}
    write_checked(part / "manifest.json", json.dumps(about))
    for name in ("strings.bin", "problems.jsonl"):
        write_checked(part / name, "")
    size = ROWS * ROW.itemsize
    with (part / "rows.bin").open("wb") as rows:
        rows.truncate(size)
    chunks = [xxh3_64_intdigest(bytes(CHUNK))] * (size // CHUNK) + [xxh3_64_intdigest(bytes(size % CHUNK))]
    digests = np.array([*chunks, xxh3_64_intdigest(size.to_bytes(8, "little"))], dtype="<u8")
    digests_of(part / "rows.bin").write_bytes(digests.tobytes())


def lookup(folder: Path) -> dict:
    """Time the order and manifest rows of global batches; the rows are a sparse file in the page cache."""
    for i in range(SHARDS):
        (folder / f"{i:05d}.tar").touch()
    with (
        patch("fastclip.data.manifest.index_together"),
        patch("fastclip.data.manifest._Building._write", _fake_write),
    ):
        open_manifest(str(folder))
    start = perf_counter()
    manifest = open_manifest(str(folder))
    orders = {
        shuffle: Order(ROWS, BATCH, SEED, shuffle, manifest.block_ends()) for shuffle in ("full", "blocks")
    }
    for order in orders.values():
        order.global_batch(0)
    figures = {"start_seconds": round(perf_counter() - start, 3)}
    for shuffle, order in orders.items():
        times, first = [], []
        for step in range(40):
            ids = order.global_batch(step).ids
            start = perf_counter()
            manifest.find(ids)  # reads the pages, and checks those that were not yet read
            first.append(perf_counter() - start)
            start = perf_counter()
            manifest.find(order.global_batch(step).ids)
            times.append(perf_counter() - start)
        figures[f"{shuffle}_milliseconds"] = round(1e3 * median(times), 3)
        figures[f"{shuffle}_first_milliseconds"] = round(1e3 * first[0], 3)
    own = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    figures["memory_besides_mapped_files_mib"] = round(int(own[1]) / 1024)
    return figures


def indexing(folder: Path, members: int = 60_000) -> dict:
    """Tar members per minute on one core: small images, captions and the JSON that img2dataset adds."""
    for shard in range(3):
        files = (
            (f"{shard:05d}{i:05d}.{extension}", bytes(size))
            for i in range(members // 9)
            for extension, size in (("jpg", 4000), ("txt", 60), ("json", 500))
        )
        write_tar(folder / f"{shard}.tar", files)
    start = perf_counter()
    manifest = open_manifest(str(folder), crew=Crew(jobs=1))
    seconds = perf_counter() - start
    return {"pairs": len(manifest), "members_per_minute": round(members / seconds * 60)}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FASTCLIP_CACHE"] = temporary + "/cache"
        folders = [Path(temporary, name) for name in ("rows", "shards")]
        for folder in folders:
            folder.mkdir()
        figures = {"lookup": lookup(folders[0]), "index": indexing(folders[1])}
    for name, figure in figures.items():
        print(name, figure)
    save("data_lookup", SEED, {"rows": ROWS, "batch": BATCH, **figures})


if __name__ == "__main__":
    main()
