"""The layout of a run's folder, and all code that reads or writes it. Nothing here needs torch.

    RUN/run.json                    the schema of the folder
        running.json                the process that trains, while it does; see `lock`
        config.yaml                 the resolved config; training from it reproduces the run
        metrics.jsonl               training records and evaluations
        checkpoints/                see `checkpoint`
        evaluation/results.jsonl    scores of `fastclip eval`
        open_clip_config.json       from which the model is built, with text_tower/ and image_tower/ if there
                                    are towers that it cannot describe; see `towers.design`
        model/                      the exported model

`read_run` never stops at a damaged or missing part: it is listed in `missing`, and the rest is read.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from fastclip import __version__
from fastclip.config.options import split_formats
from fastclip.config.parse import parse
from fastclip.config.resolved import Resolved, resolve
from fastclip.config.yaml_text import read_yaml
from fastclip.data.pairs import COMMON_COLUMNS, UTF_8, Columns
from fastclip.data.remote import is_remote
from fastclip.data.sources import find_files
from fastclip.errors import PathError
from fastclip.files import atomic_write
from fastclip.run.metrics_file import JsonLines
from fastclip.run.results import Result, read_all
from fastclip.run.state_file import STATE, STEP, DamagedCheckpoint, read_metadata

SCHEMA = 2
"""Version of the folder's layout, in run.json. A folder without run.json has schema 1 and works as well."""
ABOUT, CONFIG, METRICS, RESULTS = "run.json", "config.yaml", "metrics.jsonl", "evaluation/results.jsonl"
CHECKPOINTS, MODEL = "checkpoints", "model"
_SECRETS = re.compile(r"(?<=://)[^/@\s]+@|(?<=\w)\?[^\s'\",\]]+")  # credentials and tokens in URLs
_PATIENCE = 60.0  # seconds: a run counts as stopped after twice the longest pause between records plus this
Which = Literal["last", "best"]


class MissingCheckpoint(PathError, FileNotFoundError):
    """A folder without the checkpoint that was requested."""


class State(NamedTuple):
    """The state of a run, and a phrase that describes it."""

    kind: Literal["finished", "in progress", "stopped", "not started"]
    words: str


@dataclass
class Run:
    """The contents of a run's folder."""

    folder: Path
    config: Resolved | None = None
    config_text: str = ""
    records: list[dict] = field(default_factory=list)
    """Training records, as in metrics.jsonl."""
    evaluations: list[dict] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    """Of `fastclip eval`: the latest for each task."""
    metadata: dict = field(default_factory=dict)
    """Of the newest checkpoint."""
    changed: float | None = None
    """When metrics.jsonl last grew, in seconds since 1970."""
    missing: list[str] = field(default_factory=list)
    """Sentences about what could not be read or does not exist yet, for readers of a report."""

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self.folder)).name

    @property
    def num_samples(self) -> int | None:
        """Number of training pairs: from a checkpoint, or else from a record's samples and epoch."""
        if "num_samples" in self.metadata:
            return self.metadata["num_samples"]
        for record in self.records:
            samples, epoch = number(record.get("samples")), number(record["epoch"])
            if samples and epoch:
                return round(samples / epoch)
        return None

    @property
    def step(self) -> int:
        """The last known step."""
        seen = [record["step"] for record in (*self.records[-1:], *self.evaluations[-1:])]
        return max(self.metadata.get("step", 0), *seen, 0)

    @property
    def total_steps(self) -> int | None:
        if "config" in self.metadata:
            return total_steps(self.metadata)
        if self.config is None or self.num_samples is None:
            return None
        return self.config.total_steps(self.num_samples)

    def samples_at(self, record: dict) -> float | None:
        """Number of pairs trained on up to a record of any kind."""
        samples = number(record.get("samples"))
        if samples is None and self.num_samples is not None:
            return record["epoch"] * self.num_samples
        return samples

    def seconds_at(self, record: dict) -> float | None:
        """Seconds of training up to a record; if it has none, up to the next record that has."""
        own = 0.0 if record["step"] == 0 else timing(record, "elapsed")
        if own is not None:
            return own
        later = (timing(other, "elapsed") for other in self.records if other["step"] >= record["step"])
        return next((seconds for seconds in later if seconds is not None), None)

    def state(self, now: float | None = None) -> State:
        """Judged by the last checkpoint and the age of the last record."""
        total, saved = self.total_steps, self.metadata.get("step")
        if saved is not None and total is not None and saved >= total:
            return State("finished", f"finished after {saved:,} steps")
        if not self.step and not self.records and not self.evaluations:
            return State("not started", "no step has been recorded yet")
        of = "" if total is None else f" of {total:,}"
        age = (time.time() if now is None else now) - (self.changed or 0)
        if age < 2 * self._longest_pause() + _PATIENCE:
            return State("in progress", f"in progress: step {self.step:,}{of}")
        again = "restarts it" if saved is None else f"resumes from step {saved:,}"
        return State("stopped", f"stopped at step {self.step:,}{of}; the same command {again}")

    def _longest_pause(self) -> float:
        """Longest time between two records in seconds, evaluations included."""
        elapsed = [seconds for record in self.records if (seconds := timing(record, "elapsed")) is not None]
        return max((b - a for a, b in zip([0.0, *elapsed], elapsed, strict=False)), default=0.0)


def write_schema(folder: Path) -> None:
    """Write run.json: the schema of the folder and the version of fastclip."""
    atomic_write(folder / ABOUT, json.dumps({"schema": SCHEMA, "fastclip": __version__}) + "\n")


def check_schema(folder: Path) -> None:
    """Raise PathError if the folder was written by a newer version."""
    try:
        schema = json.loads((folder / ABOUT).read_bytes())["schema"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # schema 1; other damage is reported where it is read
    if isinstance(schema, int) and schema > SCHEMA:
        raise PathError(
            folder,
            f"was written by a newer fastclip (schema {schema}; this version reads up to {SCHEMA}). "
            "Update fastclip.",
        )


def remove_leftovers(folder: Path) -> None:
    """Delete unfinished files that a killed run left in its folder; checkpoints have their own."""
    for name in (ABOUT, CONFIG, METRICS):
        for part in folder.glob(f"{name}*.part"):
            part.unlink(missing_ok=True)


def write_config(config: Resolved, folder: Path) -> None:
    """Write config.yaml; training from it reproduces the run."""
    text = yaml.safe_dump(config.written, sort_keys=False, allow_unicode=True)
    atomic_write(folder / CONFIG, text)


def read_run(folder: Path, *, settings: bool = True) -> Run:
    """Read everything in the folder; PathError if it is not the folder of a run.

    Args:
        settings: parse config.yaml too; not needed for the many runs of a study, whose settings are known.
    """
    folder = folder.expanduser()
    check_is_run(folder)
    check_schema(folder)
    run = Run(folder)
    if settings:
        _read_config(run)
    _read_metrics(run)
    _read_results(run)
    _read_metadata(run)
    return run


def without_secrets(text: str) -> str:
    """Remove credentials and tokens of URLs: pages and cards are meant to be shared."""
    return _SECRETS.sub("", text)


def number(value: object) -> float | None:
    """The value as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def timing(record: dict, name: str) -> float | None:
    """A value under "time" in a record."""
    spent = record.get("time")
    return number(spent.get(name)) if isinstance(spent, dict) else None


def check_is_run(folder: Path) -> None:
    """Raise PathError if it is not the folder of a run; say where there is one."""
    if not folder.is_dir():
        raise PathError(folder, "is not a folder. Pass the folder of a run, e.g. runs/emoji-fastclip-v3.")
    if _looks_like_run(folder):
        return
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and _looks_like_run(path))
    above = folder.resolve().parent
    if inside:
        hint = f"It contains runs: {', '.join(str(path) for path in inside[:3])}."
    elif _looks_like_run(above):
        hint = f"It is part of one: pass {above}."
    else:
        hint = "Pass a folder that `fastclip train` wrote, e.g. runs/emoji-fastclip-v3."
    raise PathError(folder, f"is not the folder of a run: it has no {CONFIG} and no {METRICS}. {hint}")


def _looks_like_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / METRICS).is_file()


def _read_config(run: Run) -> None:
    path = run.folder / CONFIG
    try:
        run.config_text = without_secrets(path.read_text(encoding="utf-8", errors="replace"))
        run.config = resolve(parse(["--config", str(path)]))
    except OSError as error:
        run.missing.append(f"{CONFIG} cannot be read ({error.strerror}): the run's settings are not shown.")
    except (ValueError, TypeError) as error:
        run.missing.append(f"{CONFIG} is not a valid config, so its values are not used: {error}")


def _read_metrics(run: Run) -> None:
    lines = JsonLines(run.folder / METRICS)
    try:
        run.changed = lines.path.stat().st_mtime
        for line, record in lines:
            if number(record.get("step")) is None or number(record.get("epoch")) is None:
                lines.skipped.append(line)
                continue
            evaluated = isinstance(record.get("evaluation"), dict)
            (run.evaluations if evaluated else run.records).append(record | {"step": int(record["step"])})
    except OSError as error:
        run.missing.append(f"{METRICS} cannot be read ({error.strerror}).")
    run.missing += skipped_lines(lines, METRICS, "record")
    if not run.records:
        run.missing.append(f"{METRICS} has no training records yet, so there are no curves.")
    if not run.evaluations:
        run.missing.append("The model was not evaluated during training; --evaluate.pairs PATH does so.")


def _read_results(run: Run) -> None:
    lines = JsonLines(run.folder / RESULTS)
    if not lines.path.exists():
        return
    latest: dict[str, Result] = {}
    try:
        for result in read_all(lines):
            latest.pop(result.task, None)  # in the order of their last lines
            latest[result.task] = result
    except OSError as error:
        run.missing.append(f"{RESULTS} cannot be read ({error.strerror}).")
    run.missing += skipped_lines(lines, RESULTS, "result")
    run.results = list(latest.values())


def _read_metadata(run: Run) -> None:
    newest = newest_checkpoint(run.folder)
    if newest is None:
        run.missing.append("There is no checkpoint yet, so the model's search results cannot be shown.")
        return
    try:
        metadata = read_metadata(newest)
        if "config" not in metadata or total_steps(metadata):  # DamagedCheckpoint, if it cannot be told
            run.metadata = metadata
    except ValueError as error:
        run.missing.append(str(error))


def skipped_lines(lines: JsonLines, name: str, kind: str) -> list[str]:
    """Sentences about the lines of a file that could not be used."""
    sentences = [f"{name}: the last line is incomplete and was skipped."] if lines.torn else []
    if lines.skipped:
        first, more = ", ".join(map(str, lines.skipped[:5])), len(lines.skipped) - 5
        which = f"lines {first}{f' and {more:,} more' if more > 0 else ''} are not {kind}s and were"
        which = f"line {first} is not a {kind} and was" if len(lines.skipped) == 1 else which
        sentences.append(f"{name}: {which} skipped.")
    return sentences


# Checkpoints without their tensors; see `checkpoint`


def newest_checkpoint(run: Path) -> Path | None:
    """The complete checkpoint with the highest step."""
    return next(reversed(complete_checkpoints(run / CHECKPOINTS)), None)


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    steps = [path for path in checkpoints.glob("step-*") if STEP.fullmatch(path.name)]
    complete = [path for path in steps if (path / STATE).is_file()]
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))


def is_trained(run: Path) -> bool:
    """Whether a run's newest checkpoint is of its last step, and its model was exported.

    PathError if the checkpoint cannot be read.
    """
    newest = newest_checkpoint(run)
    if newest is None:
        return False
    metadata = read_metadata(newest)  # whose numbers are checked
    return metadata["step"] >= total_steps(metadata) and (run / MODEL).is_dir()


def total_steps(metadata: dict) -> int:
    """The number of steps of the run that a checkpoint is of."""
    if "total_steps" in metadata:
        return metadata["total_steps"]
    try:
        config = metadata["config"]  # written before the number was saved: complete batches only
        return max(1, int(config["epochs"] * metadata["num_samples"]) // int(config["batch"]["size"]))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"its number of steps is unknown ({error!r})"
        raise DamagedCheckpoint(getattr(metadata, "file", STATE), reason) from error


def is_run(folder: Path) -> bool:
    """Whether the folder is a run's, from which a model can be loaded."""
    return (folder / CHECKPOINTS).is_dir()


def find_checkpoint(run: Path, which: Which) -> Path:
    """The newest complete checkpoint, or the one that checkpoints/best points to.

    The link checkpoints/last is for other programs: a run killed at the wrong moment leaves it stale.
    """
    best = (run / CHECKPOINTS / "best").resolve()
    path = newest_checkpoint(run) if which == "last" else best if (best / STATE).is_file() else None
    if path is not None:
        check_schema(run)
        return path.resolve()
    if not is_run(run):
        advice = "Pass a folder that `fastclip train` wrote, e.g. runs/emoji-fastclip-v3."
        raise MissingCheckpoint(run, f"is not the folder of a run: it has no checkpoints/. {advice}")
    if which == "best":
        raise MissingCheckpoint(
            run, "has no best checkpoint: nothing has been evaluated. Use --checkpoint last."
        )
    raise MissingCheckpoint(run, "has no checkpoint yet. Try again when it has saved one.")


class EvaluationPairs(NamedTuple):
    """The pairs that a run was evaluated on, and the columns of its tables."""

    paths: list[str]
    columns: Columns = COMMON_COLUMNS


def evaluation_pairs(run: Path) -> EvaluationPairs:
    """The run's evaluate.pairs; no paths if there are none or the config cannot be read.

    Relative paths are resolved from here, or else from the folder in which the run was trained, which follows
    from the config's `out`.
    """
    try:
        config = read_yaml((run / CONFIG).read_text(encoding="utf-8"))
        pairs, out = config["evaluate"]["pairs"] or [], Path(config.get("out") or "")
        data = config.get("data") or {}
        encoding = data.get("encoding", UTF_8)  # runs before this option read UTF-8
        columns = Columns(data.get("image_column"), data.get("caption_column"), encoding)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError):
        return EvaluationPairs([])
    paths, here = [pairs] if isinstance(pairs, str) else pairs, Path(os.path.abspath(run)).parts
    if out.is_absolute() or here[-len(out.parts) :] != out.parts or _exist(paths):
        return EvaluationPairs(paths, columns)
    base = Path(*here[: -len(out.parts)])
    moved = [path if is_remote(path) else str(base / path) for path in paths]
    return EvaluationPairs(moved if _exist(moved) else paths, columns)


def formats_of(model: Path | str) -> tuple[str, ...]:
    """The data.formats of a run; none for another model."""
    try:
        config = read_yaml((Path(model).expanduser() / CONFIG).read_text(encoding="utf-8"))
        return split_formats("data.formats", config["data"].get("formats"))
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError):
        return ()


def _exist(paths: list[str]) -> bool:
    try:
        return bool(find_files(paths))
    except (OSError, ValueError):
        return False
