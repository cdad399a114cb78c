"""Check a collection before a long run: its contents, its damaged pairs, and how fast it is decoded."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from PIL import Image

from fastclip.data.caption_groups import caption_group
from fastclip.data.contact_sheet import draw_contact_sheet
from fastclip.data.decode import Augment, decoder
from fastclip.data.images import open_image, upright_rgb
from fastclip.data.manifest import Manifest
from fastclip.data.pairs import printable
from fastclip.data.readers import UNUSABLE
from fastclip.files import parallel_map
from fastclip.objective.algorithms import ALGORITHMS

SHOWN = 20  # bad pairs that a command lists
_CHUNK = 512


@dataclass
class Report:
    """The results of `fastclip data check`; images and captions are those of the inspected pairs."""

    pairs: int
    looked_at: int
    left_out: dict[str, int]
    """Pairs that indexing skipped, by reason."""
    unreadable: dict[str, int]
    """Pairs whose image or caption cannot be used, by reason."""
    worst_files: dict[str, int]
    same_image: int
    """Pairs whose image equals an earlier pair's, byte for byte."""
    same_pair: int
    """Pairs whose image and caption both equal an earlier pair's."""
    same_caption: int
    """Pairs whose caption equals an earlier pair's: in one batch they would be false negatives, unless
    `loss.negatives` is `distinct`. What counts as equal is in caption_groups.py."""
    extra_captions: dict[str, int]
    """All pairs with several captions, and the captions beyond the first of each."""
    caption_words: dict[str, float]
    caption_tokens: dict[str, float]
    """With the first and the last, after truncation; empty if the tokenizer has no `encode` to count them."""
    padding: float | None
    """Share of the text tower's positions that are padding; None if tokens cannot be counted."""
    truncated_captions: int | None
    """Captions that the tokenizer truncates; None if tokens cannot be counted."""
    context_length: int
    width: dict[str, float]
    height: dict[str, float]
    formats: dict[str, int]
    images_per_second_per_core: float
    hours_per_epoch_per_core: float | None
    state_mib: dict[str, float] = field(default_factory=dict)
    """Memory of the sample state over all ranks, by algorithm."""
    first_bad: list[str] = field(default_factory=list)
    """The first pairs that cannot be used: file, place and reason."""


def check(
    manifest: Manifest,
    tokenizer,
    *,
    limit: int | None = None,
    jobs: int | None = None,
    augment: Augment | None = None,
    progress: Callable[[int, int], None] | None = None,
    chunk: int = _CHUNK,
) -> Report:
    """Read, decode and tokenise every pair, or `limit` of them evenly spread.

    Args:
        chunk: pairs that a process inspects at a time.
    """
    n = len(manifest)
    samples = np.unique(np.linspace(0, n - 1, min(n, limit or n)).astype(np.int64)).tolist()
    chunks = [samples[i : i + chunk] for i in range(0, len(samples), chunk)]
    counts: dict[str, Counter] = defaultdict(Counter)
    bad = [str(problem) for problem in islice(manifest.problems(), SHOWN)]
    augment = augment or Augment()
    inspect = partial(_inspect, manifest, tokenizer, augment.formats)
    for done, inspected in enumerate(parallel_map(inspect, chunks, jobs or os.cpu_count() or 1), start=1):
        bad += [pair.pop("bad") for pair in inspected if "bad" in pair][: SHOWN - len(bad)]
        for name, value in (item for pair in inspected for item in pair.items()):
            counts[name][value] += 1
        if progress:
            progress(min(done * chunk, len(samples)), len(samples))
    files = counts["file"]
    for problem in manifest.problems():
        files[problem.file] += problem.pairs
    tokens = counts["tokens"] if hasattr(tokenizer, "encode") else Counter()
    repeated = {name: counts[name].total() - len(counts[name]) for name in ("image", "pair", "caption")}
    speed = decode_speed(manifest, augment)
    return Report(
        pairs=n,
        looked_at=len(samples),
        left_out=manifest.problem_counts,
        unreadable=dict(counts["unusable"].most_common()),
        worst_files=dict(files.most_common(5)),
        same_image=repeated["image"],
        same_pair=repeated["pair"],
        same_caption=repeated["caption"],
        extra_captions=manifest.extra_captions._asdict(),
        caption_words=_quantiles(counts["words"]),
        caption_tokens=_quantiles(tokens),
        padding=1 - fmean(tokens.elements()) / tokenizer.context_length if tokens else None,
        truncated_captions=counts["truncated"][True] if hasattr(tokenizer, "encode") else None,
        context_length=tokenizer.context_length,
        width=_quantiles(counts["width"]),
        height=_quantiles(counts["height"]),
        formats=dict(counts["format"].most_common()),
        images_per_second_per_core=round(speed, 1),
        hours_per_epoch_per_core=round(n / speed / 3600, 4) if speed else None,
        state_mib=state_memory(n),
        first_bad=bad,
    )


def _inspect(
    manifest: Manifest, tokenizer, formats: Sequence[str], samples: list[int]
) -> list[dict[str, Any]]:
    """Return the values to count for each pair."""
    inspected: list[dict[str, Any]] = []
    encode: Callable[[str], list[int]] = getattr(tokenizer, "encode", lambda caption: [])
    for sample in samples:
        try:
            image, caption = manifest.read(sample)
            width, height = upright_rgb(image, formats=formats).size
            values: dict[str, Any] = {
                "width": width,
                "height": height,
                "format": open_image(image, formats=formats).format or "?",
            }
            values["words"] = len(caption.split())
            tokens = len(encode(caption)) + 2  # with both end tokens
            values["truncated"] = tokens > tokenizer.context_length
            values["tokens"] = min(tokens, tokenizer.context_length)
            values["image"], values["caption"] = _hash(image), caption_group(caption)
            inspected.append(values | {"pair": (values["image"], values["caption"])})
        except UNUSABLE as error:
            where = ", ".join(part for part in (manifest.where(sample), manifest.position(sample)) if part)
            values = {"unusable": str(error), "file": manifest.files[manifest.place(sample).file]}
            inspected.append(values | {"bad": printable(f"{where}: {error}")})
    return inspected


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


def _quantiles(counts: Counter[int]) -> dict[str, float]:
    numbers, names = list(counts.elements()), {"min": 0, "5%": 5, "median": 50, "95%": 95, "max": 100}
    return {name: float(np.percentile(numbers, q)) for name, q in names.items()} if numbers else {}


def decode_speed(manifest: Manifest, augment: Augment, seconds: float = 2.0) -> float:
    """Images/s that one core reads from disk, decodes and augments with the exact decoder."""
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
    """MiB that the loss stores for n samples, over all ranks together."""
    columns = {"constant": 2, "learnable": 2, "individual": 9}
    return {
        name: round((4 * columns[row.temperature] if row.fcco else 0) * n / 2**20, 2)
        for name, row in ALGORITHMS.items()
    }


def contact_sheet(
    manifest: Manifest,
    path: Path,
    *,
    seed: int = 0,
    columns: int = 6,
    rows: int = 4,
    formats: Sequence[str] = (),
) -> None:
    """Write a PNG of random pairs, with the reason in place of an unusable one."""
    n = len(manifest)
    chosen = np.random.default_rng(seed).choice(n, min(n, columns * rows), replace=False)
    cells: list[tuple[Image.Image | None, str]] = []
    for sample in np.sort(chosen).tolist():
        try:
            image, caption = manifest.read(sample)
            cells.append((upright_rgb(image, formats=formats), caption))
        except UNUSABLE as error:
            cells.append((None, f"[{error}]"))
    draw_contact_sheet(cells, path, columns)
