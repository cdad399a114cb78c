"""Build the model, the loss, the optimizer and the training step from a resolved config.

The only files opened here are pretrained weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fastclip.config.options import ModelConfig, steps_of
from fastclip.config.resolved import Resolved
from fastclip.data.decode import Decoder
from fastclip.data.remote import RemoteError
from fastclip.distributed.agreement import require_same
from fastclip.distributed.world import World
from fastclip.errors import OptionError, PathError
from fastclip.layers import Layers
from fastclip.model import TwoTowers, build_model
from fastclip.objective.loss import GlobalContrastiveLoss
from fastclip.optim import Stepper, build_optimizer
from fastclip.precision import AUTOCAST, set_kernels, set_precision
from fastclip.rate_schedule import RateSchedule
from fastclip.run.checkpoint import tensor_names
from fastclip.towers.design import Parts
from fastclip.training.compiling import compile_as_asked
from fastclip.training.micro_batch import find_micro_batch
from fastclip.training.step import Loss, OpenClipLoss, TrainStep
from fastclip.weight_average import WeightAverage
from fastclip.weights import CONFIG_FILE

log = logging.getLogger(__name__)
MAX_DEFAULT_WARMUP = 10_000  # steps; the paper's value for its medium and large settings


def build_towers(config: Resolved, world: World, resumed: Path | None = None) -> TwoTowers:
    """Build the model, identical on every rank, and set how it computes.

    Args:
        resumed: the checkpoint from which the run resumes: the towers' sources may be gone.
    """
    row, model = config.loss.algorithm, config.model
    set_precision(config.precision, world.device)
    set_kernels(
        world.device, deterministic=config.deterministic, fastest_convolutions=config.model.channels_last
    )
    build = partial(
        build_model,
        freeze=model.freeze,
        lora=model.lora,
        gradient_checkpointing=model.gradient_checkpointing,
        channels_last=model.channels_last,
        batch_norm=model.batch_norm,
        text_padding=model.text_padding,
        patch_dropout=model.patch_dropout.share,
        logit_bias=row.logit_bias,
        tau=config.loss.tau,
        device=world.device,
        dtype=_dtype(config),
        seed=config.seed,
    )
    towers = None if resumed is None else _rebuilt(config, build, resumed)
    if towers is None:
        towers = _built_from_sources(model, build, world)
    if world.size > 1 and model.text is not None:
        require_same(world, towers.design.facts(towers.clip))  # DDP copies the weights, not the tokenizer
    if not row.peer:
        towers.freeze_logit_scale()  # τ is a parameter of the loss
    freeze_unused(towers)
    return towers


def _built_from_sources(model: ModelConfig, build: Callable[..., TwoTowers], world: World) -> TwoTowers:
    build = partial(build, model.name, pretrained=model.pretrained, parts=Parts.of(model))
    sources = (model.pretrained, model.image, model.text)
    return build() if sources == (None, None, None) else rank_0_first(world, build)


def _rebuilt(config: Resolved, build: Callable[..., TwoTowers], checkpoint: Path) -> TwoTowers | None:
    """The towers by the config that the run's folder keeps, if the checkpoint has all of their weights."""
    if config.model.image is None and config.model.text is None:
        return None
    towers, saved = build(str(Path(config.out) / CONFIG_FILE)), tensor_names(checkpoint)
    return towers if all(f"model.{name}" in saved for name in towers.state_dict()) else None


def rank_0_first(world: World, build: Callable[[], TwoTowers]) -> TwoTowers:
    """What `build` returns on each rank, on rank 0 first: it downloads what the others then find.

    If it fails there for a reason that a person can fix, all ranks raise that error.
    """
    if world.size == 1:
        return build()
    towers, error = None, None
    if world.is_main:
        try:
            towers = build()
        except (OptionError, PathError, RemoteError) as reason:
            error = reason
    shared = world.agree(error)
    if shared is not None:
        raise error or shared
    return build() if towers is None else towers


def freeze_unused(towers: TwoTowers) -> list[str]:
    """Freeze and name the parameters that no feature depends on, such as CoCa's decoder of captions.

    DDP would wait for their gradients forever. They are found by a pass over two pairs, in evaluation mode:
    it draws no random numbers and changes no statistics.
    """
    side, scale = towers.image_size, towers.clip.logit_scale
    images = torch.zeros(2, 3, side, side, device=scale.device)
    tokens = torch.ones(2, towers.context_length, dtype=torch.int64, device=scale.device)
    towers.eval()
    features = towers.clip.encode_image(images.to(scale.dtype)), towers.clip.encode_text(tokens)
    towers.train()
    torch.autograd.backward([some.sum() for some in features if some.requires_grad])
    named = [(name, p) for name, p in towers.named_parameters() if not name.startswith("clip.logit_")]
    unused = {name: p for name, p in named if p.requires_grad and p.grad is None}
    towers.zero_grad(set_to_none=True)
    for parameter in unused.values():
        parameter.requires_grad_(False)
    if unused:
        parts = ", ".join(sorted({".".join(name.split(".")[1:3]) for name in unused}))
        count = sum(parameter.numel() for parameter in unused.values())
        log.info("Not trained: %s parameters that no feature depends on (%s).", f"{count:,}", parts)
    return [*unused]


def build_step(
    config: Resolved,
    towers: TwoTowers,
    num_samples: int,
    world: World,
    decoder: Decoder | None = None,
    total: int | None = None,
    found: int | None = None,
) -> TrainStep:
    """Build the loss, the optimizer and the training step for these towers.

    Args:
        decoder: of the loader's images; None: they are as the model takes them.
        total: number of steps; None: those of a new run.
        found: the size that `batch.micro: auto` found earlier; None: find it.
    """
    loss = build_loss(config, towers, num_samples, world)
    optim, total = config.optim, total or config.total_steps(num_samples)
    optimizer = build_run_optimizer(config, towers, loss)
    scaler = torch.amp.GradScaler(world.device.type) if config.precision == "float16" else None
    slow_tau = loss.log_scale if config.loss.algorithm.slow_tau else None
    micro, until = config.batch.micro, config.model.patch_dropout.until
    decay = config.model.ema
    train_step = TrainStep(
        towers,
        towers,
        loss,
        Stepper(optimizer, slow_tau=slow_tau, clip=optim.clip, scaler=scaler),
        lr=rate_schedule(config, num_samples, total),
        average=None if decay is None else WeightAverage(towers.named_parameters(), decay),
        decoder=decoder,
        micro=found if micro == "auto" else micro,
        whole_images_from=total if until == 1 else round(until * planned_steps(config, num_samples, total)),
        autocast=AUTOCAST.get(config.precision),
        seed=config.seed,
        world=world,
    )
    compile_as_asked(train_step, config, world)
    if micro == "auto" and found is None:
        train_step.micro = find_micro_batch(train_step, config, world)
    train_step.model = _wrapped(
        towers, world, optim.wire_dtype
    )  # last: its buckets take the memory of the trial's gradients
    return train_step


def build_run_optimizer(config: Resolved, towers: TwoTowers, loss: Loss) -> Optimizer:
    """Build the optimizer of the model and of τ, with the rates of towers and layers."""
    optim, layers = config.optim, Layers(towers.clip)
    return build_optimizer(
        optim.name,
        towers.clip.named_parameters(),
        loss.parameter_groups(),
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        factor=partial(layers.rate_factor, tower_factors=optim.tower_factors, layer_decay=optim.layer_decay),
        **optim.options,
    )


def rate_schedule(config: Resolved, num_samples: int, total: int, *, warn: bool = True) -> RateSchedule:
    """The learning rates of a run of `total` steps. `warn`: if its warm-up is shortened."""
    optim = config.optim
    warmup = warmup_steps(optim.warmup, planned_steps(config, num_samples, total), warn=warn)
    return RateSchedule(optim.lr, warmup, total, optim.schedule, optim.decay_share, optim.min_lr)


def planned_steps(config: Resolved, num_samples: int, total: int) -> int:
    """The steps that default values are derived from: the run's, or those that were first planned."""
    if config.planned_epochs == config.epochs:
        return total
    return steps_of(config.planned_epochs, num_samples, config.batch.size)


def warmup_steps(given: int | None, steps: int, *, warn: bool = True) -> int:
    """Steps of warm-up; default: a tenth of the run, at most 10,000. Too long a warm-up becomes a tenth."""
    tenth = ceil(steps / 10)
    if given is None:
        return min(MAX_DEFAULT_WARMUP, tenth)
    if 2 * given > steps:
        if warn:
            log.warning(
                "optim.warmup=%s is more than half of this run's %s steps: using %s instead.",
                f"{given:,}",
                f"{steps:,}",
                f"{tenth:,}",
            )
        return tenth
    return given


def _wrapped(towers: TwoTowers, world: World, wire_dtype: str | None) -> nn.Module:
    """The towers, wrapped in DDP if there are several ranks."""
    if world.size == 1:
        return towers
    model = DistributedDataParallel(
        towers,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=towers.has_batch_norm_statistics,  # other buffers never change
    )
    if wire_dtype is not None:
        model.register_comm_hook(None, _COMPRESSION[wire_dtype])
    return model


_COMPRESSION = {"bfloat16": bf16_compress_hook}


def build_loss(config: Resolved, towers: TwoTowers, num_samples: int, world: World) -> Loss:
    """Build the loss, with the state of this many samples."""
    if config.loss.algorithm.peer:
        return OpenClipLoss(config.loss, towers, world.rank, world.size)
    with _default_dtype(_dtype(config)):
        return GlobalContrastiveLoss(config.loss, num_samples, device=world.device)


def _dtype(config: Resolved) -> torch.dtype:
    return torch.float64 if config.precision == "float64" else torch.float32


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
