"""`fastclip train --from CHECKPOINT`: a new run from another run's checkpoint, with other values.

The options of the source are the defaults. Everything in the checkpoint is carried over as when resuming:
weights, moments, estimators, temperatures, step, counters and elapsed time, but not the best evaluation. So
with no option changed, the new run ends like the old one, bit for bit. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from xxhash import xxh3_128_hexdigest

from fastclip.config.options import StartConfig, TrainConfig, from_dict
from fastclip.config.parse import parse
from fastclip.config.resolved import Difference, differences, resolve, resolve_again
from fastclip.config.yaml_text import read_yaml
from fastclip.errors import OptionError, PathError
from fastclip.run.folder import CHECKPOINTS, CONFIG, MissingCheckpoint, check_schema, total_steps
from fastclip.run.state_file import STATE, Metadata, SavedState, read_state
from fastclip.run.suspect import newest_trusted

# Options that a new run may change, besides those that may change when a run resumes. All others determine
# the shape or the meaning of what is carried over, or the order of the samples.
_CHANGEABLE = ("epochs", "precision", "batch.reference", "data.augment", "data.decoder",
               "model.patch_dropout", "optim.lr", "optim.weight_decay", "optim.betas", "optim.eps",
               "optim.warmup", "optim.min_lr", "optim.clip", "optim.wire_dtype", "loss.tau_lr",
               "loss.tau_min", "loss.tau_betas", "loss.rho", "loss.rho_share", "loss.gamma",
               "loss.gamma_schedule", "loss.gamma_decay_epochs", "loss.epsilon", "loss.negatives",
               "loss.estimator", "loss.wire_dtype", "loss.tile_mib")  # fmt: skip


class CannotStart(PathError):
    """A checkpoint that a run with these options cannot start from.

    Args:
        differences: options that must be those of the source.
    """

    def __init__(self, path: Path | str, problem: str, differences: list[Difference]):
        super().__init__(path, problem)
        self.differences = differences


class _Source(NamedTuple):
    """Where a run starts."""

    start: StartConfig
    config: Mapping[str, Any]
    """The defaults."""
    metadata: Metadata | None
    """None if the checkpoint no longer exists: the run has started before, and resumes."""


def parse_from(words: list[str]) -> TrainConfig:
    """The config of a command line with `--from`: the options of that run are the defaults."""
    given, words = _take("--from", words)
    if given is None or {"-h", "--help"} & {*words}:
        return parse(words)
    out = _take("--out", words)[0]
    if out is None:
        raise OptionError("from", given, "needs a folder for the new run", advice="Pass --out.")
    source = _find_source(Path(given).expanduser(), Path(out).expanduser())
    config = parse(words, defaults=source.config)
    if source.metadata is not None:
        _require_startable(source, source.metadata, config)
    return replace(config, start=source.start)


def tensors_digest(state: SavedState) -> str:
    """A digest of all tensors of a checkpoint, from those of its files; metadata may still be amended."""
    return xxh3_128_hexdigest(json.dumps(state.digests, sort_keys=True).encode())


def _take(option: str, words: list[str]) -> tuple[str | None, list[str]]:
    """The last value of an option, and the words without it."""
    value, others, rest = None, [], iter(words)
    for word in rest:
        name, equals, after = word.partition("=")
        if name != option:
            others.append(word)
            continue
        value = after if equals else next(rest, "")
        if not value or value.startswith("--"):
            raise OptionError(option[2:], "", "needs a value: a path")
    return value, others


def _find_source(path: Path, out: Path) -> _Source:
    """The checkpoint; for a run that has started from it before, the same one as then."""
    before = _started_before(out)
    again = before is not None and path in (Path(before.start.checkpoint or ""), _run_of(before.start))
    if before is not None and again:
        try:
            found = _read(Path(before.start.checkpoint or ""))
        except PathError:
            return before  # it may be deleted once the new run has its own
        return found if found.start == before.start else before
    checkpoint = _find_checkpoint(path)
    if out.resolve() == checkpoint.resolve().parent.parent:
        raise OptionError("out", out, "is the folder of the run to start from", advice="Choose a new one.")
    return _read(checkpoint)


def _started_before(out: Path) -> _Source | None:
    """The start and the config of the run in this folder; None if there is none, or it did not use --from."""
    try:
        content = read_yaml((out / CONFIG).read_text(encoding="utf-8"))
        start = from_dict(content).start
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError):
        return None
    return None if start.checkpoint is None else _Source(start, _without_own(content), None)


def _run_of(start: StartConfig) -> Path:
    return Path(start.checkpoint or "").parent.parent


def _find_checkpoint(path: Path) -> Path:
    """A checkpoint's folder; of a run's folder, the newest trusted one; `step-120` is `step-00000120`."""
    number = path.name.removeprefix("step-")
    if not path.exists() and number.isdigit():
        path = path.with_name(f"step-{int(number):08d}")
    if (path / STATE).is_file():
        return path
    if not (path / CHECKPOINTS).is_dir():
        raise MissingCheckpoint(
            path, "is neither a checkpoint, such as runs/mine/checkpoints/step-00001200, nor a run's folder."
        )
    found = newest_trusted(path / CHECKPOINTS)
    if found is None:
        raise MissingCheckpoint(path, "has no checkpoint that is not suspect. Pass one of its checkpoints.")
    return found


def _read(checkpoint: Path) -> _Source:
    check_schema(checkpoint.parent.parent)
    state = read_state(checkpoint)
    start = StartConfig(str(checkpoint), state.metadata["step"], tensors_digest(state))
    return _Source(start, _without_own(state.metadata["config"]), state.metadata)


def _without_own(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what is the run's own."""
    return {name: value for name, value in config.items() if name not in ("out", "resume", "start")}


def _require_startable(source: _Source, metadata: Metadata, config: TrainConfig) -> None:
    """CannotStart if an option differs that the checkpoint determines, or if there is nothing to train."""
    path = source.start.checkpoint or ""
    try:
        saved = resolve_again(dict(source.config))
    except ValueError as error:
        raise PathError(path, f"has settings that cannot be read: {error}") from error
    wanted = resolve(config)
    differ = [
        difference
        for difference in differences(saved, wanted)
        if not _may_change(difference.option) or _other_dtype(difference)
    ]
    if differ:
        listed = "\n  ".join(map(str, differ))
        raise CannotStart(
            path,
            f"cannot be the start of a run with other values of these options:\n  {listed}\nOmit them: the "
            "values of that run are the defaults. To begin with its weights alone, export it and pass the "
            "folder as --model.pretrained.",
            differ,
        )
    steps = total_steps(metadata)
    if wanted.epochs != saved.epochs:
        steps = wanted.total_steps(metadata["num_samples"])
    if metadata["step"] >= steps:
        done = metadata["step"] * wanted.batch.size / metadata["num_samples"]
        rule = f"leaves nothing to train: the checkpoint is at the end of epoch {done:g}"
        raise OptionError("epochs", wanted.epochs, rule, advice="Pass a larger --epochs.")


def _may_change(option: str) -> bool:
    return any(option == name or option.startswith(name + ".") for name in _CHANGEABLE)


def _other_dtype(difference: Difference) -> bool:
    """Whether weights would have another dtype: float64 has no mixed precision."""
    return difference.option == "precision" and "float64" in (difference.saved, difference.now)
