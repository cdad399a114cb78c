"""A config's rows become a run's values: what was left out is filled in, what has no effect is refused."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

from fastclip.config.options import LossOptions, OptimOptions, TrainConfig, as_dict
from fastclip.objective.algorithms import Settings, find_algorithm
from fastclip.objective.algorithms import resolve as resolve_loss

# The paper's values for its large setting (ViT-B/32 on CC12M); the momentum and Lion's betas are ours.
DEFAULT_OPTIMIZERS = {
    "adamw": OptimOptions(lr=4e-4, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-6),
    "lamb": OptimOptions(lr=2e-3, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-6),
    "lion": OptimOptions(lr=1e-4, weight_decay=0.3, betas=(0.9, 0.99)),
    "sgd": OptimOptions(lr=2.0, weight_decay=3e-6, momentum=0.9),
}


def resolve(config: TrainConfig) -> TrainConfig:
    """The same run with every value written down: the chosen rows are whole, and `loss` and `optim` empty.

    Options that would have no effect with this algorithm or optimizer are refused.
    """
    loss = _over(config.algorithms.get(config.algorithm), config.loss)
    optim = _over(DEFAULT_OPTIMIZERS[config.optimizer], config.optimizers.get(config.optimizer), config.optim)
    _refuse_foreign(config.optimizer, optim)
    settings = _settings(config, loss)
    row = find_algorithm(config.algorithm)
    if row.peer:
        loss = replace(loss, tau=settings.tau)
    else:
        written = {name: getattr(settings, name) for name in _values_of(settings)}
        written["tau_lr"] = row.tau_lr  # before it is scaled with the batch
        if loss.rho_share is not None:
            del written["rho"]
        loss = replace(loss, **{name: v for name, v in written.items() if getattr(loss, name) is None})
    return replace(
        config,
        loss=LossOptions(),
        optim=OptimOptions(),
        algorithms={**config.algorithms, config.algorithm: loss},
        optimizers={**config.optimizers, config.optimizer: optim},
    )


def loss_settings(config: TrainConfig) -> Settings:
    """The algorithm's values for this run, scaled with its batch."""
    return _settings(config, _over(config.algorithms.get(config.algorithm), config.loss))


def loss_row(config: TrainConfig) -> LossOptions:
    """The algorithm's row of a resolved config."""
    return config.algorithms[config.algorithm]


def optim_row(config: TrainConfig) -> OptimOptions:
    """The optimizer's row of a resolved config."""
    return config.optimizers[config.optimizer]


# What may change when a run is resumed: it moves no number of the run. Data are compared by fingerprint.
_FREE = ("out", "resume", "timeout", "log", "checkpoint", "evaluate", "batch.micro", "algorithms",
         "optimizers", "data.train", "data.image_column", "data.caption_column", "data.keep_decoded",
         "data.workers", "data.max_bad", "data.timeout", "model.pretrained", "model.compile",
         "model.gradient_checkpointing")  # fmt: skip


def differences(saved: dict, config: TrainConfig) -> list[str]:
    """What keeps this config from going on with a run saved under another: "epochs: 30 there, 40 here".

    With another algorithm or optimizer that alone is named, and not all of its values.
    """
    here = _flat(as_dict(config))
    there = _flat(saved)
    for flat, name, optimizer in (
        (here, config.algorithm, config.optimizer),
        (there, saved.get("algorithm"), saved.get("optimizer")),
    ):
        chosen = {key: value for key, value in flat.items()
                  if key.startswith((f"algorithms.{name}.", f"optimizers.{optimizer}."))}  # fmt: skip
        for key in [key for key in flat if any(key == free or key.startswith(free + ".") for free in _FREE)]:
            del flat[key]
        for key, value in chosen.items():
            flat[("loss." if key.startswith("algorithms.") else "optim.") + key.rsplit(".", 1)[1]] = value
    differ = [key for key in sorted(here.keys() | there.keys()) if here.get(key) != there.get(key)]
    for choice, values in (("algorithm", "loss."), ("optimizer", "optim.")):
        if choice in differ:
            differ = [key for key in differ if not key.startswith(values)]
    return [f"{key}: {_shown(there, key)} there, {_shown(here, key)} here" for key in differ]


def _settings(config: TrainConfig, loss: LossOptions) -> Settings:
    row = find_algorithm(config.algorithm)
    given = {name: value for name, value in vars(loss).items() if value is not None}
    wire = {name: given.pop(name) for name in ("wire_dtype", "tile_mib") if name in given}
    if row.peer:
        useless = sorted((given.keys() | wire.keys()) - {"tau"})
        if useless:
            raise ValueError(
                f"loss.{useless[0]}={getattr(loss, useless[0])!r} has no effect with {row.name}: it is "
                "open_clip's own loss and takes only tau, which learns at the model's rate. Leave it out."
            )
    if "epsilon" in given and not row.fcco and not row.peer:
        raise ValueError(
            f"loss.epsilon={loss.epsilon} has no effect with {row.name}: its ε is 1/(B−1). Leave it out."
        )
    share = given.pop("rho_share", None)
    if share is not None:
        if row.rho is None:
            raise ValueError(
                f"loss.rho_share={share} has no effect with {row.name}: its loss has no ρ. Leave it out."
            )
        given["rho"] = share * log(config.batch.size - 1)
    schedule = given.get("gamma_schedule") or row.inner_schedule
    if schedule == "cosine":
        given.setdefault("gamma_decay_epochs", max(1, round(config.epochs / 2)))
    if row.temperature != "constant" and not row.peer:
        given["tau_lr"] = given.get("tau_lr", row.tau_lr or 0.0) * config.scale
    try:
        return resolve_loss(config.algorithm, **given)
    except ValueError as error:
        raise ValueError(f"loss.{error}") from None


def _values_of(settings: Settings) -> list[str]:
    """The options that mean something for this algorithm, but for tau_lr, which is kept unscaled."""
    row = settings.algorithm
    names = ["tau", "tau_min", "estimator"]
    names += ["gamma", "gamma_schedule", "epsilon"] if row.fcco else []
    names += ["gamma_decay_epochs"] if settings.gamma_schedule == "cosine" else []
    names += ["rho"] if row.rho is not None else []
    names += ["tau_betas"] if row.temperature == "individual" else []
    return names


def _refuse_foreign(optimizer: str, optim: OptimOptions) -> None:
    """Options of another optimizer than the chosen one."""
    for name, optimizers in (
        ("betas", ("adamw", "lamb", "lion")),
        ("eps", ("adamw", "lamb")),
        ("momentum", ("sgd",)),
    ):
        value = getattr(optim, name)
        if value is not None and optimizer not in optimizers:
            raise ValueError(
                f"optim.{name}={value} has no effect with {optimizer}, only with {', '.join(optimizers)}. "
                "Leave it out."
            )


def _over(*rows: Any) -> Any:
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
