"""The training pairs of a run: opened, put in order, and decoded as the model wants them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastclip.config.collections import COLLECTIONS
from fastclip.config.options import DataConfig
from fastclip.config.resolved import Resolved
from fastclip.data.decode import Augment, Decoder, decoder
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.loader import PairLoader
from fastclip.data.manifest import Manifest, open_manifest
from fastclip.data.order import Order
from fastclip.data.pairs import SourceError
from fastclip.data.tokenize import Tokenizer
from fastclip.distributed.world import World
from fastclip.model import TwoTowers
from fastclip.terminal import progress
from fastclip.text import did_you_mean


@dataclass
class Pairs:
    """The training pairs and their order."""

    manifest: Manifest
    order: Order
    decoder: Decoder
    tokenizer: Tokenizer
    kept: DecodedCache | None

    def loader(self, config: DataConfig, world: World, start_step: int, stop_step: int) -> PairLoader:
        return PairLoader(
            self.manifest,
            self.order,
            self.decoder,
            self.tokenizer,
            start_step=start_step,
            stop_step=stop_step,
            rank=world.rank,
            world_size=world.size,
            workers=config.workers,
            kept=self.kept,
            max_bad=config.max_bad,
            timeout=config.timeout,
        )


def open_manifest_of(paths: list[str] | str, config: DataConfig, world: World) -> Manifest:
    """The manifest of a collection; worker 0 makes it if it is new, the others wait for it."""
    columns = {"image_column": config.image_column, "caption_column": config.caption_column}
    with world.main_first(), progress("indexing", "bytes") as update:
        return open_manifest(paths, **columns, progress=update if world.is_main else None)


def open_pairs(config: Resolved, towers: TwoTowers, world: World) -> Pairs:
    """Open the training pairs, and refuse a batch that does not fit them or the workers."""
    if config.data.train is None:
        raise ValueError("data.train is missing: give --data.train PATH, or a recipe with --config.")
    batch, local = config.batch.size, config.batch.size // world.size
    if batch % world.size:
        near = max(1, local) * world.size
        raise ValueError(f"batch.size={batch} cannot be divided by {world.size} workers; try {near}.")
    if config.batch.micro is not None and config.batch.micro < local and towers.has_batch_norm_statistics:
        raise ValueError(
            f"batch.micro={config.batch.micro} would change BatchNorm's statistics, and so the update. Leave "
            "it out, or freeze the statistics with --model.batch_norm frozen."
        )
    try:
        manifest = open_manifest_of(config.data.train, config.data, world)
    except SourceError as error:
        raise SourceError(f"{error}{_how_to_get(config.data.train)}") from None
    if len(manifest) < batch:
        raise ValueError(
            f"The collection has {len(manifest):,} pairs, less than a batch of {batch:,}. "
            f"Try --batch.size {max(2, len(manifest) // 4)}."
        )
    order = Order(
        len(manifest), batch, config.seed, config.data.shuffle, manifest.block_ends(), config.data.window
    )
    augment = _augment(config, towers)
    kept = None
    if config.data.keep_decoded:
        with world.main_first(), progress("decoding", "images") as update:
            kept = DecodedCache.open(manifest, augment.max_pixels, progress=update if world.is_main else None)
    return Pairs(manifest, order, decoder(config.data.decoder, augment), Tokenizer(towers.tokenizer()), kept)


def _augment(config: Resolved, towers: TwoTowers) -> Augment:
    fixed: dict[str, Any] = {"image_size": towers.image_size, "mean": towers.mean, "std": towers.std}
    known = [name for name in Augment.__dataclass_fields__ if name not in fixed]
    for name in config.data.augment:
        if name not in known:
            hint = did_you_mean(name, known, cutoff=0.6) or f" Choose from: {', '.join(known)}."
            raise ValueError(f"data.augment.{name} is unknown.{hint}")
    options: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in config.data.augment.items()
    }
    return Augment(**fixed, **options)


def _how_to_get(paths: list[str] | str) -> str:
    """How to get a recipe's data that is not there yet; empty for other data."""
    for path in [paths] if isinstance(paths, str) else paths:
        folder, name = [*path.split("/"), ""][:2]
        if folder == "data" and name in COLLECTIONS and not Path(path).exists():
            return f" Get it with `fastclip data get {name}`."
    return ""
