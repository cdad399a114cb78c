"""The options of `fastclip train`: documented, validated dataclasses. A recipe is a YAML file of them.

An algorithm and an optimizer are chosen by name. Their values come from three places, later ones win:
fastclip's own rows (the paper's values), the recipe's tables `algorithms` and `optimizers`, and the options
`loss.…` and `optim.…`. So `--algorithm fastclip-v1` alone switches to the recipe's τ, γ and E for it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from encodings.aliases import aliases
from math import ceil, inf
from typing import Any, Literal, get_args, get_type_hints

from fastclip.config.model_options import LoraOptions, ModelConfig, PatchDropout
from fastclip.config.model_options import check as _check
from fastclip.config.optimizers import OPTIMIZERS
from fastclip.config.renamed import with_current_names
from fastclip.errors import OptionError
from fastclip.objective.algorithms import LossOptions, find_algorithm
from fastclip.text import did_you_mean

Schedule = Literal["cosine", "constant", "wsd"]
PROLONGED: tuple[Schedule, ...] = ("constant", "wsd")  # schedules of runs that may be prolonged
DECAY_SHARE = 0.2  # of a wsd run's steps: see `fastclip.rate_schedule`


def steps_of(epochs: float, num_samples: int, batch: int) -> int:
    """The number of steps in a run: it sees every pair; the last batch may extend into the next epoch."""
    pairs = ceil(round(epochs * num_samples, 6))  # 0.1 · 30 is 3, not 3.0000000000000004
    return max(1, -(-pairs // batch))


def check_encoding(option: str, name: str) -> None:
    """OptionError if Python has no text encoding of this name."""
    try:
        codecs.lookup(name)
        "a".encode(name)  # fails for base64 and others that do not encode text
    except (LookupError, ValueError):
        hint = did_you_mean(name, ["utf-8", "latin-1", *sorted(set(aliases.values()))]).strip()
        rule = "must be a text encoding that Python knows"
        raise OptionError(option, name, rule, example="latin-1", advice=hint) from None


MORE_FORMATS = ("avif", "jpeg2000", "ppm")


def split_formats(option: str, names: list[str] | str | None) -> tuple[str, ...]:
    """Image formats of a list, or separated by commas; OptionError if one is not of MORE_FORMATS."""
    listed = names.split(",") if isinstance(names, str) else names or ()
    formats = tuple(dict.fromkeys(str(name).strip().lower() for name in listed))
    for name in formats:
        if name not in MORE_FORMATS:
            raise OptionError.unknown(option, name, MORE_FORMATS)
    return formats


def _check_optimizer(name: str) -> None:
    if name not in OPTIMIZERS:
        raise OptionError.unknown("optimizer", name, OPTIMIZERS)


@dataclass(frozen=True)
class DataConfig:
    """The training pairs."""

    train: list[str] | str | None = None
    """Tar shards (with {00000..00099} or *), a CSV, TSV or Parquet table, a folder, or a list of these."""
    image_column: str | None = None
    """Name of a table's image column, if it is not a common one."""
    caption_column: str | None = None
    """Name of a table's caption column, if it is not a common one."""
    encoding: str = "utf-8"
    """Encoding of tables and captions, e.g. cp1252 or latin-1; text that is not in it is never guessed."""
    shuffle: Literal["full", "blocks"] = "full"
    """`full`: a true permutation each epoch; `blocks`: shards in random order, samples mixed within a
    window, for storage that needs sequential reads."""
    window: int = 20_000
    """Number of consecutive samples that `blocks` mixes."""
    decoder: Literal["fast", "exact"] = "fast"
    """`exact`: open_clip's transform, bit for bit; `fast`: the same crops in half the time."""
    augment: dict[str, Any] = field(default_factory=dict)
    """Options of the training transform, e.g. {scale: [0.9, 1.0]}; docs/data.md lists them."""
    formats: list[str] | str | None = None
    """Image formats to decode besides JPEG, PNG, WebP, GIF, BMP and TIFF: avif, jpeg2000, ppm."""
    keep_decoded: bool = False
    """Decode all images once and cache them in shared memory: for small collections on CPUs."""
    workers: int | Literal["auto"] = "auto"
    """Loader workers per rank; 0 decodes in the training process. `auto`: one less than the rank's cores."""
    max_bad: float = 0.01
    """Fraction of the pairs that may be unusable before the run stops."""
    timeout: float = 600
    """Seconds to wait for a batch; then the run stops and names the shard that stalled. 0 waits forever."""

    def __post_init__(self) -> None:
        check_encoding("data.encoding", self.encoding)
        split_formats("data.formats", self.formats)
        workers = self.workers
        counts = isinstance(workers, int) and workers >= 0
        _check("data.workers", workers, workers == "auto" or counts, "0 or more, or auto", 2)
        _check("data.window", self.window, self.window >= 1, "at least 1", 20_000)
        _check("data.max_bad", self.max_bad, 0 <= self.max_bad < 1, "in [0, 1)", 0.01)
        _check("data.timeout", self.timeout, 0 <= self.timeout < inf, "finite and at least 0", 600)


@dataclass(frozen=True)
class BatchConfig:
    """The number of pairs per step."""

    size: int = 1024
    """Global batch size: pairs per step over all ranks, whatever their number."""
    micro: int | Literal["auto"] | None = None
    """Pairs that a rank encodes at a time: less memory, about a third more time, exactly the same update.
    `auto`: as many as fit on the device, found by trial steps before training. By default all of them."""
    reference: int | None = None
    """Batch size that optim.lr and loss.tau_lr are meant for: at another size both scale in proportion, as in
    the paper. By default nothing is scaled."""

    def __post_init__(self) -> None:
        micro, reference = self.micro, self.reference
        _check("batch.size", self.size, self.size >= 2, "at least 2", 1024)
        counts = isinstance(micro, int) and micro >= 1
        _check("batch.micro", micro, micro in (None, "auto") or counts, "at least 1, or auto", 64)
        _check("batch.reference", reference, reference is None or reference >= 1, "at least 1", self.size)


@dataclass(frozen=True)
class OptimOptions:
    """The optimizer. Defaults come from the recipe's row for it."""

    lr: float | None = None
    """Peak learning rate at batch size `batch.reference`."""
    weight_decay: float | None = None
    """Weight decay of matrices; norms, biases and τ are not decayed."""
    betas: tuple[float, float] | None = None
    """β1, β2 of AdamW, LAMB and Lion."""
    eps: float | None = None
    """ε of AdamW and LAMB."""
    momentum: float | None = None
    """Momentum of SGD."""
    image_lr: float | None = None
    """Peak learning rate of the image tower, if it is not optim.lr."""
    text_lr: float | None = None
    """Peak learning rate of the text tower, if it is not optim.lr."""
    layer_decay: float | None = None
    """Factor of the learning rate from each block to the one before it, e.g. 0.75: early layers change less.
    Default: 1."""
    warmup: int | None = None
    """Steps in which the learning rate rises from 0. Default: a tenth of the run, at most 10,000."""
    schedule: Schedule | None = None
    """Learning rate after the warm-up: `cosine` down to optim.min_lr; `constant`; or `wsd` (warm-up, stable,
    decay), which is constant and falls to optim.min_lr at the end. A constant or wsd run may be resumed with
    other epochs, and a constant one as wsd. Default: cosine."""
    decay_share: float | None = None
    """Share of the steps in which `wsd` lowers the learning rate, at the end of the run. Default: 0.2."""
    min_lr: float | None = None
    """Learning rate at the end of the cosine, or of the decay of `wsd`. Default: 0."""
    clip: float | None = None
    """Clip the model's gradient to this norm. Default: no clipping."""
    wire_dtype: Literal["bfloat16"] | None = None
    """Average gradients over ranks in bfloat16, which halves their traffic. Default: in float32."""

    def __post_init__(self) -> None:
        def check(name: str, good: Callable[[float], bool], rule: str, example: object) -> None:
            value = getattr(self, name)
            _check(f"optim.{name}", value, value is None or good(value), rule, example)

        check("lr", lambda lr: 0 <= lr < inf, "finite and at least 0", 1e-3)
        check("image_lr", lambda lr: 0 <= lr < inf, "finite and at least 0", 1e-4)
        check("text_lr", lambda lr: 0 <= lr < inf, "finite and at least 0", 1e-4)
        check("layer_decay", lambda factor: 0 < factor <= 1, "in (0, 1]", 0.75)
        check("weight_decay", lambda decay: 0 <= decay < inf, "finite and at least 0", 0.1)
        in_range = all(0 <= beta < 1 for beta in self.betas or ())
        _check("optim.betas", self.betas, in_range, "two numbers in [0, 1)", "[0.9, 0.98]")
        check("eps", lambda eps: 0 < eps < inf, "finite and above 0", 1e-6)
        check("momentum", lambda momentum: 0 <= momentum < 1, "in [0, 1)", 0.9)
        check("warmup", lambda steps: steps >= 0, "0 or more", 1000)
        if self.schedule not in (None, *get_args(Schedule)):
            raise OptionError.unknown("optim.schedule", self.schedule, get_args(Schedule))
        check("decay_share", lambda share: 0 < share < 1, "in (0, 1)", DECAY_SHARE)
        check("min_lr", lambda lr: lr >= 0, "0 or more", 0.0)
        check("clip", lambda norm: norm > 0, "above 0", 1.0)


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation during training."""

    pairs: list[str] | str | None = None
    """Held-out pairs, in any form that data.train takes, for retrieval recall."""
    tasks: str | None = None
    """Folder of tasks to score, such as data/emoji/tasks; see docs/evaluation.md."""
    every_epochs: float = 1.0
    """Epochs between evaluations; the end of the run is always evaluated."""
    best: str | None = None
    """Metric that selects checkpoints/best (highest wins), such as twemoji_words/acc1. Default: mean_recall@1
    of the pairs, or else tasks_mean."""

    def __post_init__(self) -> None:
        _check("evaluate.every_epochs", self.every_epochs, self.every_epochs > 0, "above 0", 1.0)
        if self.best is not None and self.pairs is None and self.tasks is None:
            advice = "Pass --evaluate.pairs or --evaluate.tasks, or omit it."
            raise OptionError(
                "evaluate.best", self.best, "has no effect: nothing is evaluated", advice=advice
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save. SIGTERM, Ctrl-C and the end of the run save as well."""

    every_minutes: float = 10.0
    """Minutes between checkpoints."""
    every_steps: int | None = None
    """Steps between checkpoints, in addition to checkpoint.every_minutes."""
    keep: int = 2
    """Number of newest checkpoints to keep, besides the best."""

    def __post_init__(self) -> None:
        minutes, steps = self.every_minutes, self.every_steps
        _check("checkpoint.every_minutes", minutes, minutes > 0, "above 0", 10.0)
        _check("checkpoint.every_steps", steps, steps is None or steps >= 1, "at least 1", 1000)
        _check("checkpoint.keep", self.keep, self.keep >= 1, "at least 1", 2)


@dataclass(frozen=True)
class LogConfig:
    """Logging. metrics.jsonl in the run's folder is always written."""

    every_steps: int = 50
    """Steps between records; only then does the host wait for the device."""
    tensorboard: bool = False
    """Write TensorBoard events to the run's folder."""
    wandb: str | None = None
    """Weights & Biases project to log to."""

    def __post_init__(self) -> None:
        _check("log.every_steps", self.every_steps, self.every_steps >= 1, "at least 1", 50)


@dataclass(frozen=True)
class StartConfig:
    """The checkpoint of another run that this one started from: `--from` sets it, and config.yaml has it."""

    checkpoint: str | None = None
    """Its path."""
    step: int | None = None
    """Its step."""
    digest: str | None = None
    """Of its tensors."""

    def __post_init__(self) -> None:
        given = [self.checkpoint, self.step, self.digest]
        if any(value is None for value in given) and given != [None] * 3:
            raise OptionError("start", given, "is written by --from", advice="Pass --from CHECKPOINT.")


@dataclass(frozen=True)
class TrainConfig:
    """The run."""

    out: str | None = None
    """Folder of the run. Default: runs/RECIPE-ALGORITHM."""
    algorithm: str = "fastclip-v3"
    """fastclip-v0, fastclip-v1, fastclip-v2, fastclip-v3, scent, sogclr, isogclr, mbcl, openclip, siglip."""
    optimizer: str = "adamw"
    """adamw, lamb, lion or sgd (with momentum)."""
    epochs: float = 30
    """Passes over the pairs; may be a fraction."""
    planned_epochs: float | None = None
    """For constant and wsd schedules: epochs that the default warm-up, E, `gamma: auto` and
    patch_dropout.until are derived from. Default: epochs. A prolonged run keeps its first value."""
    seed: int = 0
    """Determines initial weights, sample order and augmentation."""
    precision: Literal["float32", "tf32", "bfloat16", "float16", "float64"] = "float32"
    """Precision of the towers. float16 uses gradient scaling; the loss is always float32 or better."""
    deterministic: bool = False
    """Use only kernels that give the same bits at every run; with it, model.compile=auto is false."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: a GPU per rank if torch can use one, else the CPU."""
    resume: Literal["auto", "previous", "never"] = "auto"
    """`auto`: resume from the newest checkpoint in the folder, and stop if it is damaged; `previous`: the
    same, but set damaged ones aside and use the newest undamaged one; `never`: refuse a folder with one."""
    timeout: float = 1800
    """Seconds to wait for other ranks, at start-up and in any collective."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossOptions = field(default_factory=LossOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    start: StartConfig = field(default_factory=StartConfig)
    algorithms: dict[str, LossOptions] = field(default_factory=dict)
    """Values per algorithm (in recipes)."""
    optimizers: dict[str, OptimOptions] = field(default_factory=dict)
    """Values per optimizer (in recipes)."""

    def __post_init__(self) -> None:
        _check("epochs", self.epochs, 0 < self.epochs < inf, "finite and above 0", 30)
        planned = self.planned_epochs
        _check("planned_epochs", planned, planned is None or 0 < planned < inf, "finite and above 0", 30)
        _check("seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2⁶³)", 0)
        _check("timeout", self.timeout, 0 < self.timeout < inf, "finite and above 0", 1800)
        find_algorithm(self.algorithm)
        _check_optimizer(self.optimizer)
        for name in self.algorithms:
            find_algorithm(name)
        for name in self.optimizers:
            _check_optimizer(name)

    @property
    def scale(self) -> float:
        """Factor of the learning rates: the paper scales them in proportion to the global batch."""
        return self.batch.size / (self.batch.reference or self.batch.size)


TABLES = {"algorithms": LossOptions, "optimizers": OptimOptions}
SECTIONS = {name: kind for name, kind in get_type_hints(TrainConfig).items() if is_dataclass(kind)}
INNER_SECTIONS: dict[str, Any] = {"model.patch_dropout": PatchDropout, "model.lora": LoraOptions}
"""Sections inside sections; the first option of each may be given alone: `--model.lora 8`."""


def as_dict(config: TrainConfig) -> dict:
    """A config as plain values without unset ones: the content of config.yaml."""
    return _without_none(asdict(config))


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """The config that `as_dict` wrote, in this version or an earlier one."""
    built: dict[str, Any] = {}
    for name, value in with_current_names(values).items():
        if name in SECTIONS:
            built[name] = _section(SECTIONS[name], value, name)
        elif name in TABLES:
            built[name] = {key: _section(TABLES[name], row, f"{name}.{key}") for key, row in value.items()}
        else:
            built[name] = value
    return _section(TrainConfig, built, "config")


def _section(kind: Any, values: Any, name: str) -> Any:
    known = {one.name for one in fields(kind)}
    if not isinstance(values, Mapping):
        raise OptionError(name, values, "must be a section")
    for unknown in sorted(values.keys() - known):
        option = unknown if name == "config" else f"{name}.{unknown}"
        raise OptionError(option, values[unknown], "is not an option of this version of fastclip")
    return kind(**{key: _value(f"{name}.{key}", value) for key, value in values.items()})


def _value(option: str, value: Any) -> Any:
    """An option's value from JSON or YAML, which have lists for tuples and mappings for sections."""
    if option in INNER_SECTIONS:
        return _section(INNER_SECTIONS[option], value, option)
    return tuple(value) if option.endswith((".betas", ".tau_betas")) else value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_none(inner) for key, inner in value.items() if inner is not None}
        return {key: inner for key, inner in kept.items() if inner != {}}
    return list(value) if isinstance(value, tuple) else value
