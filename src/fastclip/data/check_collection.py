"""A doctor's look at a collection before a long run: what is in it, what is broken, how fast it is read."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastclip.data.contact_sheet import draw_contact_sheet
from fastclip.data.decode import Augment, decoder
from fastclip.data.images import open_image, upright_rgb
from fastclip.data.manifest import Manifest
from fastclip.data.readers import UNUSABLE
from fastclip.files import in_order
from fastclip.objective.algorithms import ALGORITHMS

_CHUNK = 512


@dataclass
class Report:
    """Everything that `fastclip data check` shows; images and captions are those of the pairs looked at."""

    pairs: int
    looked_at: int
    left_out: dict[str, int]
    """Pairs that indexing left out, by reason."""
    unreadable: dict[str, int]
    """Pairs whose image or caption cannot be used, by reason."""
    worst_files: dict[str, int]
    same_image: int
    """Pairs whose image is byte for byte that of an earlier pair."""
    same_pair: int
    """Those whose caption is the same as well."""
    same_caption: int
    """Pairs whose caption stands at an earlier pair: in one batch they would be false negatives."""
    caption_words: dict[str, float]
    truncated_captions: int | None
    """Captions that the tokenizer cuts; None if it cannot tell."""
    context_length: int
    width: dict[str, float]
    height: dict[str, float]
    formats: dict[str, int]
    images_per_second_per_core: float
    hours_per_epoch_per_core: float | None
    state_mib: dict[str, float] = field(default_factory=dict)
    """Memory of the sample state over all workers, by algorithm."""


def check(
    manifest: Manifest,
    tokenizer,
    *,
    most: int | None = None,
    jobs: int | None = None,
    augment: Augment | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read, decode and tokenise every pair, or `most` of them evenly spread."""
    n = len(manifest)
    samples = np.unique(np.linspace(0, n - 1, min(n, most or n)).astype(np.int64)).tolist()
    chunks = [samples[i : i + _CHUNK] for i in range(0, len(samples), _CHUNK)]
    found: dict[str, Counter] = defaultdict(Counter)
    look_at = partial(_look_at, manifest, tokenizer)
    for done, looks in enumerate(in_order(look_at, chunks, jobs or os.cpu_count() or 1), start=1):
        for what, value in (item for look in looks for item in look.items()):
            found[what][value] += 1
        if progress:
            progress(min(done * _CHUNK, len(samples)), len(samples))
    files = found["file"]
    for problem in manifest.problems():
        files[problem.file] += problem.pairs
    same = {what: found[what].total() - len(found[what]) for what in ("image", "pair", "caption")}
    speed = decode_speed(manifest, augment or Augment())
    return Report(
        pairs=n,
        looked_at=len(samples),
        left_out=manifest.problem_counts,
        unreadable=dict(found["unusable"].most_common()),
        worst_files=dict(files.most_common(5)),
        same_image=same["image"],
        same_pair=same["pair"],
        same_caption=same["caption"],
        caption_words=_quantiles(found["words"]),
        truncated_captions=found["truncated"][True] if hasattr(tokenizer, "encode") else None,
        context_length=tokenizer.context_length,
        width=_quantiles(found["width"]),
        height=_quantiles(found["height"]),
        formats=dict(found["format"].most_common()),
        images_per_second_per_core=round(speed, 1),
        hours_per_epoch_per_core=round(n / speed / 3600, 4) if speed else None,
        state_mib=state_memory(n),
    )


def _look_at(manifest: Manifest, tokenizer, samples: list[int]) -> list[dict[str, Any]]:
    """What is to be counted of each pair."""
    looks: list[dict[str, Any]] = []
    encode: Callable[[str], list[int]] = getattr(tokenizer, "encode", lambda caption: [])
    for sample in samples:
        try:
            image, caption = manifest.read(sample)
            width, height = upright_rgb(image).size
            look: dict[str, Any] = {
                "width": width,
                "height": height,
                "format": open_image(image).format or "?",
            }
            look["words"] = len(caption.split())
            look["truncated"] = len(encode(caption)) + 2 > tokenizer.context_length  # with both ends
            look["image"], look["caption"] = _hash(image), _hash(caption.encode())
            looks.append(look | {"pair": look["image"] + look["caption"]})
        except UNUSABLE as error:
            looks.append({"unusable": str(error), "file": manifest.files[manifest.place(sample).file]})
    return looks


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


def _quantiles(counts: Counter[int]) -> dict[str, float]:
    numbers, names = list(counts.elements()), {"min": 0, "5%": 5, "median": 50, "95%": 95, "max": 100}
    return {name: float(np.percentile(numbers, q)) for name, q in names.items()} if numbers else {}


def decode_speed(manifest: Manifest, augment: Augment, seconds: float = 2.0) -> float:
    """Images a second of one core, read from the disk, decoded and augmented by the exact decoder."""
    exact, done = decoder("exact", augment), 0
    some = np.linspace(0, len(manifest) - 1, min(len(manifest), 2000)).astype(int).tolist()
    start = time.perf_counter()
    for sample in some:
        try:
            exact.train(manifest.image_at(manifest.place(sample)), seed=sample)
            done += 1
        except UNUSABLE:
            continue
        if time.perf_counter() - start > seconds:
            break
    return done / (time.perf_counter() - start)


def state_memory(n: int) -> dict[str, float]:
    """MiB that the loss remembers of n samples, over all workers together."""
    columns = {"constant": 2, "learnable": 2, "individual": 9}
    return {
        name: round((4 * columns[row.temperature] if row.fcco else 0) * n / 2**20, 2)
        for name, row in ALGORITHMS.items()
    }


def contact_sheet(manifest: Manifest, path: Path, *, seed: int = 0, columns: int = 6, rows: int = 4) -> None:
    """A PNG of random pairs: what a person would look at first."""
    n = len(manifest)
    chosen = np.random.default_rng(seed).choice(n, min(n, columns * rows), replace=False)
    cells: list[tuple[Image.Image | None, str]] = []
    for sample in np.sort(chosen).tolist():
        try:
            image, caption = manifest.read(sample)
            cells.append((upright_rgb(image), caption))
        except UNUSABLE as error:
            cells.append((None, f"[{error}]"))
    draw_contact_sheet(cells, path, columns)
