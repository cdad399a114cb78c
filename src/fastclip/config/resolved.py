"""A run with every value decided: defaults are filled in, and options without effect are refused.

`resolve` is called once per run. Its result is frozen and complete: nothing after it looks up a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

from fastclip.config.optimizers import OPTIMIZERS
from fastclip.config.options import (
    DECAY_SHARE,
    PROLONGED,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    ModelConfig,
    OptimOptions,
    Schedule,
    StartConfig,
    TrainConfig,
    as_dict,
    from_dict,
    steps_of,
)
from fastclip.errors import OptionError
from fastclip.objective.algorithms import LossOptions, Settings, written_options
from fastclip.objective.algorithms import resolve as resolve_loss

Options = TypeVar("Options", LossOptions, OptimOptions)


@dataclass(frozen=True)
class OptimSettings:
    """An optimizer's row with the user's options applied."""

    name: str
    lr: float
    """Peak learning rate, scaled with the batch size."""
    weight_decay: float
    tower_factors: dict[str, float]
    """Factors of the rate in the image and the text tower."""
    layer_decay: float
    """Factor of the rate from each block to the one before it."""
    options: dict[str, Any]
    """Further arguments of its class: betas, eps, momentum."""
    warmup: int | None
    """Steps; None means a tenth of the run."""
    schedule: Schedule
    decay_share: float
    """Share of the steps in which a wsd run lowers the rate."""
    min_lr: float
    clip: float | None
    wire_dtype: str | None


@dataclass(frozen=True)
class Resolved:
    """All settings of a run."""

    out: str
    epochs: float
    seed: int
    precision: Literal["float32", "tf32", "bfloat16", "float16", "float64"]
    deterministic: bool
    device: Literal["auto", "cuda", "cpu"]
    resume: Literal["auto", "previous", "never"]
    timeout: float
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    loss: Settings
    optim: OptimSettings
    evaluate: EvaluateConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    start: StartConfig
    written: dict
    """The content of config.yaml: plain values that resolve to the same run again."""
    asked: TrainConfig = field(compare=False, repr=False)
    """What was resolved; two of them may resolve to the same run."""

    @property
    def algorithm(self) -> str:
        return self.loss.algorithm.name

    def total_steps(self, num_samples: int) -> int:
        """The number of steps of a new run; a resumed one has the number in its checkpoint."""
        return steps_of(self.epochs, num_samples, self.batch.size)

    @property
    def planned_epochs(self) -> float:
        """The epochs that values are derived from; a prolonged run has more."""
        return self.asked.planned_epochs or self.epochs


def resolve(config: TrainConfig) -> Resolved:
    """Apply options over the recipe's rows, and these over fastclip's own; refuse options without effect."""
    loss = _over(config.algorithms.get(config.algorithm), config.loss)
    planned = config.planned_epochs or config.epochs
    try:
        settings = resolve_loss(
            config.algorithm, loss, batch=config.batch.size, epochs=planned, rate=config.scale
        )
    except OptionError as error:
        raise error.within("loss") from None
    optim = _over(_own_row(config.optimizer), config.optimizers.get(config.optimizer), config.optim)
    optim = _with_decay(optim)
    if config.planned_epochs is not None and optim.schedule not in PROLONGED:
        rule = f"has no effect with optim.schedule={optim.schedule}, only with {', '.join(PROLONGED)}"
        raise OptionError("planned_epochs", config.planned_epochs, rule, advice="Omit it.")
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
        config.deterministic,
        config.device,
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
        config.start,
        as_dict(whole),
        config,
    )


def resolve_again(written: dict) -> Resolved:
    """The settings in a config.yaml or checkpoint of this version or an earlier one."""
    try:
        return resolve(from_dict(written))
    except (AttributeError, TypeError) as error:  # not what `as_dict` wrote
        raise ValueError(f"a value has the wrong type ({error}).") from error


# Options that may change when a run resumes: they affect rounding at most, or (data.formats) make more of the
# images usable. Data are compared by fingerprint.
_FREE = ("out", "deterministic", "device", "resume", "timeout", "log", "checkpoint", "evaluate",
         "batch.micro", "algorithms", "optimizers", "data.train", "data.image_column", "data.caption_column",
         "data.formats", "data.keep_decoded", "data.workers", "data.max_bad", "data.timeout",
         "model.pretrained", "model.compile", "model.channels_last", "model.gradient_checkpointing",
         "model.text_padding", "start.checkpoint")  # fmt: skip
# The same for runs that may be prolonged. Whether the steps done so far stay the same is checked apart.
_FREE_IF_PROLONGED = ("epochs", "optim.schedule", "optim.decay_share", "optim.min_lr")


class Difference(NamedTuple):
    """An option that keeps a run from resuming: "epochs: 30 in the run, 40 now"."""

    option: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        saved, now = ("not set" if value is None else repr(value) for value in self[1:])
        return f"{self.option}: {saved} in the run, {now} now"


def as_continued(config: Resolved, saved: Resolved) -> Resolved:
    """The config with its values derived as those of the saved run were, if the run may be prolonged."""
    if not may_be_prolonged(saved, config) or config.asked.planned_epochs is not None:
        return config
    first = saved.planned_epochs
    if saved.asked.planned_epochs is None and first == config.epochs:
        return config  # nothing was prolonged
    return resolve(replace(config.asked, planned_epochs=first))


def may_be_prolonged(*configs: Resolved) -> bool:
    """Whether the epochs may change when the run resumes, by its schedule."""
    return all(config.optim.schedule in PROLONGED for config in configs)


def differences(saved: Resolved, config: Resolved) -> list[Difference]:
    """Why a run saved with one config cannot resume with another.

    A different algorithm or optimizer is named alone, without all of its values.
    """
    config = as_continued(config, saved)
    there, here = _relevant(saved), _relevant(config)
    if may_be_prolonged(saved, config):
        for option in _FREE_IF_PROLONGED:
            there.pop(option, None)
            here.pop(option, None)
        there["planned_epochs"], here["planned_epochs"] = saved.planned_epochs, config.planned_epochs
    differ = [key for key in sorted(here.keys() | there.keys()) if here.get(key) != there.get(key)]
    for choice, values in (("algorithm", "loss."), ("optimizer", "optim.")):
        if choice in differ:
            differ = [key for key in differ if not key.startswith(values)]
    return [Difference(key, there.get(key), here.get(key)) for key in differ]


def named_options(config: Resolved) -> dict[str, Any]:
    """Every option that is set, by its full name; the chosen rows are loss.… and optim.…"""
    rows = {
        f"algorithms.{config.algorithm}.": "loss.",
        f"optimizers.{config.optim.name}.": "optim.",
    }
    flat = _flat(config.written)
    chosen = {
        section + key.removeprefix(row): value
        for row, section in rows.items()
        for key, value in flat.items()
        if key.startswith(row)
    }
    return {key: value for key, value in flat.items() if not key.startswith(tuple(rows))} | chosen


def _relevant(config: Resolved) -> dict[str, Any]:
    """Options that affect a run's numbers."""
    options = named_options(config)
    free = {key for key in options if any(key == name or key.startswith(name + ".") for name in _FREE)}
    return {key: value for key, value in options.items() if key not in free}


def _own_row(optimizer: str) -> OptimOptions:
    row = OPTIMIZERS[optimizer]
    return OptimOptions(lr=row.lr, weight_decay=row.weight_decay, schedule="cosine", **row.options)


def _with_decay(optim: OptimOptions) -> OptimOptions:
    """Set the default of wsd, so that config.yaml has it; refuse options that the schedule ignores."""
    if optim.schedule == "wsd":
        return replace(optim, decay_share=optim.decay_share or DECAY_SHARE)
    useless = {"decay_share": "wsd"} | ({"min_lr": "cosine, wsd"} if optim.schedule == "constant" else {})
    for option, schedules in useless.items():
        if (value := getattr(optim, option)) is not None:
            rule = f"has no effect with optim.schedule={optim.schedule}, only with {schedules}"
            raise OptionError(f"optim.{option}", value, rule, advice="Omit it.")
    return optim


def _optim_settings(name: str, optim: OptimOptions, scale: float) -> OptimSettings:
    """Refuse options of other optimizers."""
    taken = {option for row in OPTIMIZERS.values() for option in row.options}
    for option in sorted(taken - OPTIMIZERS[name].options.keys()):
        value = getattr(optim, option)
        if value is not None:
            others = ", ".join(other for other, row in OPTIMIZERS.items() if option in row.options)
            rule = f"has no effect with {name}, only with {others}"
            raise OptionError(f"optim.{option}", value, rule, advice="Omit it.")
    assert optim.lr is not None  # each row has both
    assert optim.weight_decay is not None
    assert optim.schedule is not None
    return OptimSettings(
        name,
        optim.lr * scale,
        optim.weight_decay,
        _tower_factors(optim, optim.lr),
        1.0 if optim.layer_decay is None else optim.layer_decay,
        {option: getattr(optim, option) for option in OPTIMIZERS[name].options},
        optim.warmup,
        optim.schedule,
        optim.decay_share or DECAY_SHARE,
        0.0 if optim.min_lr is None else optim.min_lr,
        optim.clip,
        optim.wire_dtype,
    )


def _tower_factors(optim: OptimOptions, lr: float) -> dict[str, float]:
    factors = {}
    for tower, own in (("image", optim.image_lr), ("text", optim.text_lr)):
        if own is not None and lr == 0:
            raise OptionError(f"optim.{tower}_lr", own, "is relative to optim.lr, which must be above 0")
        factors[tower] = 1.0 if own is None else own / lr
    return factors


def _over(*rows: Options | None) -> Options:
    """Merge rows of options: values of later rows win."""
    merged: dict[str, Any] = {}
    given = [row for row in rows if row is not None]
    for row in given:
        values = {name: value for name, value in vars(row).items() if value is not None}
        for name, other in (("rho", "rho_share"), ("rho_share", "rho")):  # two forms of one quantity
            if name in values:
                merged.pop(other, None)
        if values.get("gamma") == "auto":  # it has a length of its own
            merged.pop("gamma_decay_epochs", None)
        merged |= values
    return type(given[-1])(**merged)


def _flat(nested: dict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
