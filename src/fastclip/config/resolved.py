"""A run with every value decided: what was left out is filled in, what has no effect is refused.

`resolve` is called once a run. What it returns is frozen and complete: nothing after it looks up a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from fastclip.config.optimizers import OPTIMIZERS
from fastclip.config.options import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    ModelConfig,
    OptimOptions,
    TrainConfig,
    as_dict,
    from_dict,
    whole_batches,
)
from fastclip.objective.algorithms import LossOptions, Settings, written_options
from fastclip.objective.algorithms import resolve as resolve_loss

Options = TypeVar("Options", LossOptions, OptimOptions)


@dataclass(frozen=True)
class OptimSettings:
    """An optimizer's row after the user's options."""

    name: str
    lr: float
    """Peak learning rate, scaled with the batch."""
    weight_decay: float
    options: dict[str, Any]
    """What its class takes besides: betas, eps, momentum."""
    warmup: int | None
    """Steps; None is a tenth of the run."""
    min_lr: float
    clip: float | None


@dataclass(frozen=True)
class Resolved:
    """Everything that a run needs."""

    out: str
    epochs: float
    seed: int
    precision: Literal["float32", "tf32", "bfloat16", "float16", "float64"]
    resume: Literal["auto", "never"]
    timeout: float
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    loss: Settings
    optim: OptimSettings
    evaluate: EvaluateConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    written: dict
    """What config.yaml holds: plain values, from which the same run is resolved again."""

    @property
    def algorithm(self) -> str:
        return self.loss.algorithm.name

    def total_steps(self, num_samples: int) -> int:
        """Whole batches in the run's epochs."""
        return whole_batches(self.epochs, num_samples, self.batch.size)


def resolve(config: TrainConfig) -> Resolved:
    """Lay options over the recipe's rows, and these over fastclip's own; refuse what would have no effect."""
    loss = _over(config.algorithms.get(config.algorithm), config.loss)
    try:
        settings = resolve_loss(
            config.algorithm, loss, batch=config.batch.size, epochs=config.epochs, rate=config.scale
        )
    except ValueError as error:
        raise ValueError(f"loss.{error}") from None
    optim = _over(_own_row(config.optimizer), config.optimizers.get(config.optimizer), config.optim)
    whole = replace(
        config,
        loss=LossOptions(),
        optim=OptimOptions(),
        algorithms={**config.algorithms, config.algorithm: written_options(settings, loss)},
        optimizers={**config.optimizers, config.optimizer: optim},
    )
    return Resolved(
        str(config.out),
        config.epochs,
        config.seed,
        config.precision,
        config.resume,
        config.timeout,
        config.model,
        config.data,
        config.batch,
        settings,
        _optim_settings(config.optimizer, optim, config.scale),
        config.evaluate,
        config.checkpoint,
        config.log,
        as_dict(whole),
    )


def resolve_again(written: dict) -> Resolved:
    """The run of a config.yaml or of a checkpoint, also one that an earlier version wrote."""
    try:
        return resolve(from_dict(written))
    except (AttributeError, TypeError) as error:  # something else than what was written
        raise ValueError(f"a value is of the wrong kind ({error}).") from error


# What may change when a run is resumed: it moves no number of the run. Data are compared by fingerprint.
_FREE = ("out", "resume", "timeout", "log", "checkpoint", "evaluate", "batch.micro", "algorithms",
         "optimizers", "data.train", "data.image_column", "data.caption_column", "data.keep_decoded",
         "data.workers", "data.max_bad", "data.timeout", "model.pretrained", "model.compile",
         "model.gradient_checkpointing")  # fmt: skip


def differences(saved: Resolved, config: Resolved) -> list[str]:
    """What keeps this config from going on with a run saved under another: "epochs: 30 there, 40 here".

    With another algorithm or optimizer that alone is named, and not all of its values.
    """
    there, here = _that_counts(saved), _that_counts(config)
    differ = [key for key in sorted(here.keys() | there.keys()) if here.get(key) != there.get(key)]
    for choice, values in (("algorithm", "loss."), ("optimizer", "optim.")):
        if choice in differ:
            differ = [key for key in differ if not key.startswith(values)]
    return [f"{key}: {_shown(there, key)} there, {_shown(here, key)} here" for key in differ]


def _that_counts(config: Resolved) -> dict[str, Any]:
    """What moves the numbers of a run, by dotted names; the chosen rows as loss.… and optim.…"""
    flat = _flat(config.written)
    free = [key for key in flat if any(key == name or key.startswith(name + ".") for name in _FREE)]
    rows = {
        f"algorithms.{config.algorithm}.": "loss.",
        f"optimizers.{config.optim.name}.": "optim.",
    }
    chosen = {
        section + key.removeprefix(row): value
        for row, section in rows.items()
        for key, value in flat.items()
        if key.startswith(row)
    }
    return {key: value for key, value in flat.items() if key not in free} | chosen


def _own_row(optimizer: str) -> OptimOptions:
    row = OPTIMIZERS[optimizer]
    return OptimOptions(lr=row.lr, weight_decay=row.weight_decay, **row.options)


def _optim_settings(name: str, optim: OptimOptions, scale: float) -> OptimSettings:
    """Refuses what belongs to other optimizers."""
    taken = {option for row in OPTIMIZERS.values() for option in row.options}
    for option in sorted(taken - OPTIMIZERS[name].options.keys()):
        value = getattr(optim, option)
        if value is not None:
            others = ", ".join(other for other, row in OPTIMIZERS.items() if option in row.options)
            raise ValueError(
                f"optim.{option}={value} has no effect with {name}, only with {others}. Leave it out."
            )
    assert optim.lr is not None  # each row has both
    assert optim.weight_decay is not None
    return OptimSettings(
        name,
        optim.lr * scale,
        optim.weight_decay,
        {option: getattr(optim, option) for option in OPTIMIZERS[name].options},
        optim.warmup,
        0.0 if optim.min_lr is None else optim.min_lr,
        optim.clip,
    )


def _over(*rows: Options | None) -> Options:
    """Rows of options laid over each other: a later one's values count, where it has any."""
    merged: dict[str, Any] = {}
    given = [row for row in rows if row is not None]
    for row in given:
        values = {name: value for name, value in vars(row).items() if value is not None}
        for name, other in (("rho", "rho_share"), ("rho_share", "rho")):  # two ways to say one thing
            if name in values:
                merged.pop(other, None)
        merged |= values
    return type(given[-1])(**merged)


def _shown(flat: dict[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "not set"


def _flat(nested: dict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
