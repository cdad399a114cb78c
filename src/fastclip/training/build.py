"""From a config to the parts of a run: the pairs, the model, the loss, the optimizer, the step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastclip.config.collections import COLLECTIONS
from fastclip.config.options import DataConfig, TrainConfig, whole_batches
from fastclip.config.resolved import loss_row, loss_settings, optim_row
from fastclip.data.decode import Augment, Decoder, decoder
from fastclip.data.kept import KeptImages
from fastclip.data.loader import PairLoader
from fastclip.data.manifest import Manifest, open_manifest
from fastclip.data.order import Order
from fastclip.data.pairs import SourceError
from fastclip.data.tokenize import Tokenizer
from fastclip.distributed.world import World
from fastclip.model import TwoTowers, build_model
from fastclip.objective.loss import GlobalContrastiveLoss
from fastclip.optim import Stepper, build_optimizer
from fastclip.progress import progress
from fastclip.training.learner import Learner
from fastclip.training.step import Loss, PeerLoss, TrainStep, compile_towers

log = logging.getLogger(__name__)
MAX_DEFAULT_WARMUP = 10_000  # steps, the paper's for its medium and large settings
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Pairs:
    """The training pairs and their order."""

    manifest: Manifest
    order: Order
    decoder: Decoder
    tokenizer: Tokenizer
    kept: KeptImages | None

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


def open_pairs(paths: list[str] | str, config: DataConfig, world: World) -> Manifest:
    """The manifest of a collection; worker 0 makes it if it is new, the others wait for it."""
    columns = {"image_column": config.image_column, "caption_column": config.caption_column}
    with _worker_0_first(world), progress("indexing", "bytes") as update:
        return open_manifest(paths, **columns, progress=update if world.main else None)


def build_pairs(config: TrainConfig, towers: TwoTowers, world: World) -> Pairs:
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
        manifest = open_pairs(config.data.train, config.data, world)
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
        with _worker_0_first(world), progress("decoding", "images") as update:
            kept = KeptImages.open(manifest, augment.max_pixels, progress=update if world.main else None)
    return Pairs(manifest, order, decoder(config.data.decoder, augment), Tokenizer(towers.tokenizer()), kept)


def build_towers(config: TrainConfig, world: World) -> TwoTowers:
    """The model, the same on every worker."""
    ours = config.algorithm not in ("openclip", "siglip")
    towers = build_model(
        config.model.name,
        pretrained=config.model.pretrained,
        freeze=config.model.freeze,
        gradient_checkpointing=config.model.gradient_checkpointing,
        channels_last=config.model.channels_last,
        batch_norm=config.model.batch_norm,
        logit_bias=config.algorithm == "siglip",
        tau=loss_settings(config).tau,
        device=world.device,
        dtype=torch.float64 if config.precision == "float64" else torch.float32,
        seed=config.seed,
    )
    if ours:
        towers.freeze_logit_scale()  # τ lives in the loss
    if config.model.compile:
        compile_towers(towers)
    return towers


def build_learner(config: TrainConfig, towers: TwoTowers, num_samples: int, world: World) -> Learner:
    """The loss, the optimizer and the step for these towers."""
    _set_float32_precision(config.precision, world.device)
    loss = _build_loss(config, towers, num_samples, world)
    model: nn.Module = towers
    if world.size > 1:
        ids = [world.device.index] if world.device.type == "cuda" else None
        model = DistributedDataParallel(
            towers,
            device_ids=ids,
            gradient_as_bucket_view=True,
            broadcast_buffers=towers.has_batch_norm_statistics,  # other buffers never change
        )
    row = optim_row(config)
    assert row.lr is not None
    assert row.weight_decay is not None
    optimizer = build_optimizer(
        config.optimizer,
        towers.named_parameters(),
        loss.parameter_groups(),
        lr=row.lr * config.scale,
        weight_decay=row.weight_decay,
        betas=row.betas,
        eps=row.eps,
        momentum=row.momentum,
    )
    scaler = torch.amp.GradScaler(world.device.type) if config.precision == "float16" else None
    slow_tau = loss.log_scale if config.algorithm == "fastclip-v3" else None
    stepper = Stepper(optimizer, slow_tau=slow_tau, clip=row.clip, scaler=scaler)
    step = TrainStep(
        model,
        loss,
        stepper,
        micro=config.batch.micro,
        autocast=AUTOCAST.get(config.precision),
        seed=config.seed,
        rank=world.rank,
    )
    return Learner(towers, loss, stepper, step)


def total_steps(config: TrainConfig, num_samples: int) -> int:
    """Whole batches in the run's epochs."""
    return whole_batches(config.epochs, num_samples, config.batch.size)


def warmup_steps(config: TrainConfig, steps: int) -> int:
    """The recipe's; a tenth of the run, at most 10,000, if it says nothing or was meant for more data."""
    given, tenth = optim_row(config).warmup, ceil(steps / 10)
    if given is None:
        return min(MAX_DEFAULT_WARMUP, tenth)
    if 2 * given > steps:
        log.warning(
            "optim.warmup=%s is more than half of this run's %s steps: it warms up for %s instead.",
            f"{given:,}",
            f"{steps:,}",
            f"{tenth:,}",
        )
        return tenth
    return given


def _build_loss(config: TrainConfig, towers: TwoTowers, num_samples: int, world: World) -> Loss:
    if config.algorithm in ("openclip", "siglip"):
        return PeerLoss(config.algorithm, towers, world.rank, world.size)
    s, row = loss_settings(config), loss_row(config)
    options: dict = {"tile_bytes": row.tile_mib << 20} if row.tile_mib else {}
    if row.wire_dtype:
        options["wire_dtype"] = getattr(torch, row.wire_dtype)
    if s.algorithm.fcco:
        options |= {"gamma": s.gamma, "gamma_schedule": s.gamma_schedule, "epsilon": s.epsilon}
    if s.gamma_schedule == "cosine":
        options["gamma_decay_epochs"] = s.gamma_decay_epochs
    if s.algorithm.rho is not None:
        options["rho"] = s.rho
    if s.algorithm.temperature != "constant":
        options["tau_lr"] = s.tau_lr
    if s.algorithm.temperature == "individual":
        options["tau_betas"] = s.tau_betas
    with _default_dtype(torch.float64 if config.precision == "float64" else torch.float32):
        return GlobalContrastiveLoss(
            config.algorithm,
            num_samples,
            tau=s.tau,
            tau_min=s.tau_min,
            estimator=s.estimator,
            device=world.device,
            **options,
        )


def _augment(config: TrainConfig, towers: TwoTowers) -> Augment:
    fixed: dict[str, Any] = {"image_size": towers.image_size, "mean": towers.mean, "std": towers.std}
    known = [name for name in Augment.__dataclass_fields__ if name not in fixed]
    for name in config.data.augment:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Choose from: {', '.join(known)}."
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


def _set_float32_precision(precision: str, device: torch.device) -> None:
    if device.type != "cuda":
        if precision == "tf32":
            raise ValueError("precision=tf32 has no effect without an NVIDIA GPU; try float32 or bfloat16.")
        return
    mode = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]


@contextmanager
def _worker_0_first(world: World) -> Iterator[None]:
    """Worker 0 builds what is cached; the others then find it."""
    if not world.main:
        world.barrier()
    try:
        yield
    finally:
        if world.main:
            world.barrier()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
