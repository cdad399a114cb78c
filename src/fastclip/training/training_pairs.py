"""The training pairs of a run: opened, ordered, and decoded for the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastclip.config.collections import how_to_get
from fastclip.config.options import DataConfig, split_formats
from fastclip.config.resolved import Resolved
from fastclip.data.decode import Augment, Decoder, decoder
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.index_together import Crew
from fastclip.data.loader import PairLoader
from fastclip.data.machine import Share
from fastclip.data.manifest import Manifest, open_manifest
from fastclip.data.order import Order
from fastclip.data.pairs import Columns, SourceError
from fastclip.data.patches import PatchChoice
from fastclip.data.prefetch import loader_workers
from fastclip.data.tokenize import TextEnds, Tokenizer
from fastclip.distributed.agreement import require_same
from fastclip.distributed.together import together
from fastclip.distributed.world import World
from fastclip.errors import OptionError, UnknownOption
from fastclip.model import TwoTowers
from fastclip.terminal import progress
from fastclip.text import nearest

log = logging.getLogger(__name__)
Report = Callable[[int, int], None]
Value = TypeVar("Value")


@dataclass
class TrainingPairs:
    """Training pairs, their order, and how they are decoded."""

    manifest: Manifest
    order: Order
    decoder: Decoder
    tokenizer: Tokenizer
    ends: TextEnds | None
    patches: PatchChoice | None
    decoded: DecodedCache | None
    workers: int  # loader workers
    share: Share  # of the machine, for this rank

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
            workers=self.workers,
            device=world.device,
            shared_memory=self.share.shared_memory,
            decoded=self.decoded,
            max_bad=config.max_bad,
            timeout=config.timeout,
            ends=self.ends,
            patches=self.patches,
        )


def open_manifest_of(paths: list[str] | str, config: DataConfig, world: World) -> Manifest:
    """The manifest of a collection; all ranks that share a cache build it together if needed."""
    columns = Columns(config.image_column, config.caption_column, config.encoding)
    crew = Crew(Share.of(world).cores, world.rank, world.size)

    def work(report: Report) -> Manifest:
        return open_manifest(paths, columns, crew=crew, progress=report)

    return _with_progress(world, "indexing", "bytes", work)


def _with_progress(world: World, title: str, unit: str, work: Callable[[Report], Value]) -> Value:
    """Return work(report) when every rank has finished; rank 0 shows its progress, then how many have."""

    def run(beat: Callable[[], None]) -> Value:
        with progress(title, unit) as update:

            def report(done: int, total: int) -> None:
                beat()
                if world.is_main:
                    update(done, total)

            return work(report)

    with progress(f"{title} finished on", "ranks") as waiting:
        return together(world, run, waiting if world.is_main else None)


def require_same_pairs(option: str, manifest: Manifest, world: World) -> None:
    """Raise RanksDiffer on every rank if one has opened other pairs."""
    facts = {"number of pairs": len(manifest), "fingerprint": manifest.fingerprint}
    require_same(world, {f"{option} ({name})": value for name, value in facts.items()})


def open_training_pairs(config: Resolved, towers: TwoTowers, world: World) -> TrainingPairs:
    """Open the training pairs; OptionError if the batch size does not fit them or the number of ranks."""
    if config.data.train is None:
        advice = "Pass --data.train PATH, or a recipe with --config."
        raise OptionError("data.train", None, "must be set", advice=advice)
    batch, local = config.batch.size, config.batch.size // world.size
    if batch % world.size:
        near = max(1, local) * world.size
        raise OptionError("batch.size", batch, f"must be divisible by the {world.size} ranks", example=near)
    micro = config.batch.micro
    if isinstance(micro, int) and micro < local and towers.has_batch_norm_statistics:
        raise OptionError(
            "batch.micro",
            micro,
            "would change BatchNorm's statistics, and so the update",
            advice="Omit it, or freeze the statistics with --model.batch_norm frozen.",
        )
    try:
        manifest = open_manifest_of(config.data.train, config.data, world)
    except SourceError as error:
        raise SourceError(error.path, f"{error.problem}{how_to_get(config.data.train)}") from None
    require_same_pairs("data.train", manifest, world)
    if manifest.extra_captions.pairs and world.is_main:
        log.warning("%s.", manifest.extra_captions)
    if len(manifest) < batch:
        rule, fits = (
            f"must be at most {len(manifest):,} (the pairs in data.train)",
            max(2, len(manifest) // 4),
        )
        if len(manifest) < 2:
            raise OptionError("batch.size", batch, rule, advice="Training needs at least 2 pairs.")
        raise OptionError("batch.size", batch, rule, example=fits)
    order = Order(
        len(manifest), batch, config.seed, config.data.shuffle, manifest.block_ends(), config.data.window
    )
    augment = _augment(config, towers)
    decoded = None
    if config.data.keep_decoded:
        open_decoded = partial(DecodedCache.open, manifest, augment.max_pixels, augment.formats)
        decoded = _with_progress(world, "decoding", "images", lambda report: open_decoded(progress=report))
    share = Share.of(world)
    return TrainingPairs(
        manifest,
        order,
        decoder(config.data.decoder, augment),
        Tokenizer(towers.tokenizer()),
        None if towers.unpadded is None else towers.unpadded.ends,
        None if towers.keep_patches is None else towers.keep_patches.choice,
        decoded,
        loader_workers(config.data.workers, share),
        share,
    )


def _augment(config: Resolved, towers: TwoTowers) -> Augment:
    fixed: dict[str, Any] = {"image_size": towers.image_size, "mean": towers.mean, "std": towers.std}
    fixed["formats"] = split_formats("data.formats", config.data.formats)
    known = [name for name in Augment.__dataclass_fields__ if name not in fixed]
    for name in config.data.augment:
        if name not in known:
            near = nearest(name, known, cutoff=0.6)
            suggestions = [f"data.augment.{near}"] if near else []
            raise UnknownOption(f"data.augment.{name}", suggestions, f"Choose from: {', '.join(known)}.")
    options: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in config.data.augment.items()
    }
    return Augment(**fixed, **options)
