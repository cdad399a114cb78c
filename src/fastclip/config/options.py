"""What a user asks for: documented, checked dataclasses; a recipe is a YAML file of them.

An algorithm and an optimizer are chosen by name. Their values come from three places, the later over the
earlier: fastclip's own rows (the paper's), the recipe's tables `algorithms` and `optimizers`, and the options
`loss.…` and `optim.…`. So `--algorithm fastclip-v1` alone takes the right τ, γ and E of the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from math import inf, isfinite
from typing import Any, Literal, get_type_hints

from fastclip.config.optimizers import OPTIMIZERS
from fastclip.config.renamed import with_current_names
from fastclip.objective.algorithms import LossOptions, find_algorithm
from fastclip.text import did_you_mean


def whole_batches(epochs: float, num_samples: int, batch: int) -> int:
    """The steps of a run; at least one."""
    return max(1, int(epochs * num_samples) // batch)


def _check(name: str, value: object, good: bool, example: object) -> None:
    if not good:
        raise ValueError(f"{name}={value!r} is not possible; try {name}={example}.")


def _find_optimizer(name: str) -> None:
    if name not in OPTIMIZERS:
        hint = did_you_mean(name, OPTIMIZERS)
        raise ValueError(f"optimizer={name!r} is unknown.{hint} Choose one of: {', '.join(OPTIMIZERS)}.")


@dataclass(frozen=True)
class ModelConfig:
    """Who encodes."""

    name: str = "ViT-B-32"
    """An open_clip model (ViT-B-32, RN50, …), one of ours for CPUs (vit-scenes, vit-emoji, vit-icons), or the
    path of an open_clip JSON config."""
    pretrained: str | None = None
    """Weights to start from: an open_clip tag, a .safetensors or .pt file, or an exported folder."""
    freeze: Literal["none", "image", "text"] = "none"
    """A tower that stays as it is; `image` with pretrained weights is LiT."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, a third more time."""
    compile: bool = False
    """torch.compile the towers."""
    channels_last: bool = False
    """Keep images and convolutions in NHWC order, faster on GPUs in low precision."""
    batch_norm: Literal["local", "sync", "frozen"] = "local"
    """For models with BatchNorm: statistics of each worker's batch, of the global batch (GPUs), or none."""


@dataclass(frozen=True)
class DataConfig:
    """Where pairs come from."""

    train: list[str] | str | None = None
    """Tar shards (braces and globs too), a CSV, TSV or Parquet table, a folder, or a list of them."""
    image_column: str | None = None
    """A table's column with the image, if it has an unusual name."""
    caption_column: str | None = None
    """A table's column with the caption, if it has an unusual name."""
    shuffle: Literal["full", "blocks"] = "full"
    """A true permutation each epoch, or shards in random order mixed within windows (sequential reads)."""
    window: int = 20_000
    """How many consecutive samples `blocks` mixes."""
    decoder: Literal["fast", "exact"] = "fast"
    """`exact` is open_clip's transform bit for bit; `fast` draws the same crops in half the time."""
    augment: dict[str, Any] = field(default_factory=dict)
    """Options of the training transform, e.g. {scale: [0.9, 1.0]}; see fastclip.data.decode.Augment."""
    keep_decoded: bool = False
    """Decode all images once and keep them in shared memory: for small collections on CPUs."""
    workers: int = 2
    """Processes a worker uses to read and decode; 0 does it in the training process."""
    max_bad: float = 0.01
    """Share of the collection that may be unusable before the run stops."""
    timeout: float = 600
    """Seconds without a batch after which a stalled reader is an error that names its shard."""

    def __post_init__(self) -> None:
        _check("data.workers", self.workers, self.workers >= 0, 2)
        _check("data.window", self.window, self.window >= 1, 20_000)
        _check("data.max_bad", self.max_bad, 0 <= self.max_bad < 1, 0.01)
        _check("data.timeout", self.timeout, self.timeout >= 0 and isfinite(self.timeout), 600)


@dataclass(frozen=True)
class BatchConfig:
    """How many pairs a step sees."""

    size: int = 1024
    """Pairs a step over all workers; it does not depend on how many workers there are."""
    micro: int | None = None
    """Pairs that a worker encodes at a time. Less memory, a third more time, the very same update."""
    reference: int | None = None
    """The batch size for which lr and tau_lr are meant: at another size both are scaled in proportion, as in
    the paper. Left out, nothing is scaled."""

    def __post_init__(self) -> None:
        _check("batch.size", self.size, self.size >= 2, 1024)
        _check("batch.micro", self.micro, self.micro is None or self.micro >= 1, 64)
        _check("batch.reference", self.reference, self.reference is None or self.reference >= 1, self.size)


@dataclass(frozen=True)
class OptimOptions:
    """Values of the optimizer; what is left out comes from the recipe's row for it."""

    lr: float | None = None
    """Peak learning rate, at the batch size `batch.reference`."""
    weight_decay: float | None = None
    """Weight decay of matrices; norms, biases and τ have none."""
    betas: tuple[float, float] | None = None
    """β1, β2 of AdamW, LAMB and Lion."""
    eps: float | None = None
    """ε of AdamW and LAMB."""
    momentum: float | None = None
    """Momentum of SGD."""
    warmup: int | None = None
    """Steps in which the rate rises from 0; if left out a tenth of the run, at most 10,000."""
    min_lr: float | None = None
    """The rate at the end of the cosine; 0 if left out."""
    clip: float | None = None
    """Largest norm of the model's gradient, larger ones are scaled down; if left out nothing is."""

    def __post_init__(self) -> None:
        _check("optim.lr", self.lr, self.lr is None or 0 <= self.lr < inf, 1e-3)
        decay = self.weight_decay
        _check("optim.weight_decay", decay, decay is None or 0 <= decay < inf, 0.1)
        _check("optim.betas", self.betas, all(0 <= beta < 1 for beta in self.betas or ()), "[0.9, 0.98]")
        _check("optim.eps", self.eps, self.eps is None or 0 < self.eps < inf, 1e-6)
        _check("optim.momentum", self.momentum, self.momentum is None or 0 <= self.momentum < 1, 0.9)
        _check("optim.warmup", self.warmup, self.warmup is None or self.warmup >= 0, 1000)
        _check("optim.min_lr", self.min_lr, self.min_lr is None or self.min_lr >= 0, 0.0)
        _check("optim.clip", self.clip, self.clip is None or self.clip > 0, 1.0)


@dataclass(frozen=True)
class EvaluateConfig:
    """How good the model is, while it trains."""

    pairs: list[str] | str | None = None
    """Pairs that are not trained on, of any kind that data.train takes: retrieval among them is measured."""
    tasks: str | None = None
    """A folder of tasks, such as data/emoji/tasks: every one of them is scored; see docs/evaluation.md."""
    every_epochs: float = 1.0
    """Epochs between two evaluations; the end of the run is always evaluated."""
    best: str | None = None
    """The measure by which checkpoints/best is chosen, the highest wins: mean_recall@1 of the pairs, or else
    tasks_mean; any other, such as twemoji_words/acc1."""

    def __post_init__(self) -> None:
        _check("evaluate.every_epochs", self.every_epochs, self.every_epochs > 0, 1.0)
        if self.best is not None and self.pairs is None and self.tasks is None:
            raise ValueError(
                f"evaluate.best={self.best!r} has no effect: nothing is evaluated. Give evaluate.pairs or "
                "evaluate.tasks, or leave it out."
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved. SIGTERM, SIGINT and the end of the run save as well."""

    every_minutes: float = 10.0
    """Minutes between two checkpoints."""
    every_steps: int | None = None
    """Steps between two checkpoints, besides those by the clock."""
    keep: int = 2
    """How many of the newest are kept, besides the best."""

    def __post_init__(self) -> None:
        _check("checkpoint.every_minutes", self.every_minutes, self.every_minutes > 0, 10.0)
        steps = self.every_steps
        _check("checkpoint.every_steps", steps, steps is None or steps >= 1, 1000)
        _check("checkpoint.keep", self.keep, self.keep >= 1, 2)


@dataclass(frozen=True)
class LogConfig:
    """What a run tells. metrics.jsonl in its folder is always written."""

    every_steps: int = 50
    """Steps between two records; the device is waited for no more often."""
    tensorboard: bool = False
    """Write TensorBoard events into the run's folder."""
    wandb: str | None = None
    """Weights & Biases project to send the records to."""

    def __post_init__(self) -> None:
        _check("log.every_steps", self.every_steps, self.every_steps >= 1, 50)


@dataclass(frozen=True)
class TrainConfig:
    """The run."""

    out: str | None = None
    """The run's folder; runs/RECIPE-ALGORITHM if left out."""
    algorithm: str = "fastclip-v3"
    """openclip, siglip, mbcl, sogclr, isogclr, fastclip-v0, fastclip-v1, fastclip-v2 or fastclip-v3."""
    optimizer: str = "adamw"
    """adamw, lamb, lion or sgd (with momentum)."""
    epochs: float = 30
    """How often each pair is seen; may be a fraction."""
    seed: int = 0
    """Fixes the weights at the start, the order of samples and all augmentation."""
    precision: Literal["float32", "tf32", "bfloat16", "float16", "float64"] = "float32"
    """Of the towers. float16 scales gradients by itself; the loss never has less than float32."""
    resume: Literal["auto", "never"] = "auto"
    """Go on from the newest checkpoint of the folder, or refuse a folder that has one."""
    timeout: float = 1800
    """Seconds without a word from the other workers, at the start and in any exchange, that stop the run."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossOptions = field(default_factory=LossOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    algorithms: dict[str, LossOptions] = field(default_factory=dict)
    """The recipe's values for each algorithm."""
    optimizers: dict[str, OptimOptions] = field(default_factory=dict)
    """The recipe's values for each optimizer."""

    def __post_init__(self) -> None:
        _check("epochs", self.epochs, self.epochs > 0 and isfinite(self.epochs), 30)
        _check("seed", self.seed, 0 <= self.seed < 2**63, 0)
        _check("timeout", self.timeout, self.timeout > 0 and isfinite(self.timeout), 1800)
        find_algorithm(self.algorithm)
        _find_optimizer(self.optimizer)
        for name in self.algorithms:
            find_algorithm(name)
        for name in self.optimizers:
            _find_optimizer(name)

    @property
    def scale(self) -> float:
        """The paper's rule: rates grow in proportion to the global batch."""
        return self.batch.size / (self.batch.reference or self.batch.size)


TABLES = {"algorithms": LossOptions, "optimizers": OptimOptions}
SECTIONS = {name: kind for name, kind in get_type_hints(TrainConfig).items() if is_dataclass(kind)}


def as_dict(config: TrainConfig) -> dict:
    """A config as plain values, without what was left out: what config.yaml holds."""
    return _without_none(asdict(config))


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """The config that `as_dict` wrote, also one of an earlier version; ValueError names what does not fit."""
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
    if not isinstance(values, Mapping) or not values.keys() <= known:
        strange = sorted(values.keys() - known) if isinstance(values, Mapping) else [values]
        raise ValueError(f"{name} holds {strange[0]!r}, which this version does not know.")
    pairs = ("betas", "tau_betas")  # JSON and YAML have lists for them
    return kind(**{key: tuple(value) if key in pairs else value for key, value in values.items()})


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_none(inner) for key, inner in value.items() if inner is not None}
        return {key: inner for key, inner in kept.items() if inner != {}}
    return list(value) if isinstance(value, tuple) else value
