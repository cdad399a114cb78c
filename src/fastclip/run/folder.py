"""A run's folder: who writes it and who reads it does so here. Nothing here needs torch.

    RUN/run.json                    the schema of the folder
        config.yaml                 the resolved config; training from it repeats the run
        metrics.jsonl               records of training, evaluations
        checkpoints/                see `checkpoint`
        evaluation/results.jsonl    of `fastclip eval`
        model/                      the export

Nothing that is broken or not there yet stops `read_run`; it is listed in `missing`, and the rest is shown.
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
from fastclip.config.options import whole_batches
from fastclip.config.parse import parse
from fastclip.config.resolved import Resolved, resolve
from fastclip.data.remote import is_remote
from fastclip.data.sources import find_files
from fastclip.files import atomic_write
from fastclip.run.metrics_file import JsonLines
from fastclip.run.results import Result, read_all

SCHEMA = 2
"""Of the folder, in run.json; 1 is a folder without it, which is read and resumed as well."""
ABOUT, CONFIG, METRICS, RESULTS = "run.json", "config.yaml", "metrics.jsonl", "evaluation/results.jsonl"
CHECKPOINTS, STATE, MODEL = "checkpoints", "state.json", "model"
_STEP = re.compile(r"step-\d{8,}")
_SECRETS = re.compile(r"(?<=://)[^/@\s]+@|(?<=\w)\?[^\s'\",\]]+")  # who logs in, and tokens, in addresses
_PATIENCE = 60.0  # seconds beyond twice the longest pause between two records: then a run is called stopped
Which = Literal["last", "best"]


class State(NamedTuple):
    """How far a run is."""

    kind: Literal["finished", "in progress", "stopped", "not started"]
    words: str


@dataclass
class Run:
    """What a run's folder holds."""

    folder: Path
    config: Resolved | None = None
    config_text: str = ""
    records: list[dict] = field(default_factory=list)
    """Of training, as metrics.jsonl has them."""
    evaluations: list[dict] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    """Of `fastclip eval`: for each task the last one."""
    metadata: dict = field(default_factory=dict)
    """Of the newest checkpoint."""
    changed: float | None = None
    """When metrics.jsonl last grew, in seconds since 1970."""
    missing: list[str] = field(default_factory=list)
    """What a reader of the page should know is not there, as sentences."""

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self.folder)).name

    @property
    def num_samples(self) -> int | None:
        """Pairs that are trained on: from a checkpoint, or else from a record's samples and epoch."""
        if "num_samples" in self.metadata:
            return self.metadata["num_samples"]
        for record in self.records:
            samples, epoch = number(record.get("samples")), number(record["epoch"])
            if samples and epoch:
                return round(samples / epoch)
        return None

    @property
    def step(self) -> int:
        """The last step that is known of."""
        seen = [record["step"] for record in (*self.records[-1:], *self.evaluations[-1:])]
        return max(self.metadata.get("step", 0), *seen, 0)

    @property
    def total_steps(self) -> int | None:
        if self.config is None or self.num_samples is None:
            return None
        return self.config.total_steps(self.num_samples)

    def samples_at(self, record: dict) -> float | None:
        """Pairs that a model had seen at a record of any kind."""
        samples = number(record.get("samples"))
        if samples is None and self.num_samples is not None:
            return record["epoch"] * self.num_samples
        return samples

    def seconds_at(self, record: dict) -> float | None:
        """By the first clock at or after a record: evaluations have none of their own."""
        own = 0.0 if record["step"] == 0 else timing(record, "elapsed")
        if own is not None:
            return own
        later = (timing(known, "elapsed") for known in self.records if known["step"] >= record["step"])
        return next((seconds for seconds in later if seconds is not None), None)

    def state(self, now: float | None = None) -> State:
        """By the last checkpoint, and by how long ago the last record was written."""
        total, saved = self.total_steps, self.metadata.get("step")
        if saved is not None and total is not None and saved >= total:
            return State("finished", f"finished after {saved:,} steps")
        if not self.step and not self.records and not self.evaluations:
            return State("not started", "no step has been recorded yet")
        of = "" if total is None else f" of {total:,}"
        age = (time.time() if now is None else now) - (self.changed or 0)
        if age < 2 * self._longest_pause() + _PATIENCE:
            return State("in progress", f"in progress: step {self.step:,}{of}")
        again = "starts it again" if saved is None else f"goes on from step {saved:,}"
        return State("stopped", f"stopped at step {self.step:,}{of}; the same command {again}")

    def _longest_pause(self) -> float:
        """Seconds between two records, an evaluation between them included."""
        elapsed = [seconds for record in self.records if (seconds := timing(record, "elapsed")) is not None]
        return max((b - a for a, b in zip([0.0, *elapsed], elapsed, strict=False)), default=0.0)


def write_schema(folder: Path) -> None:
    """run.json: in which form the folder is, and who wrote it."""
    atomic_write(folder / ABOUT, json.dumps({"schema": SCHEMA, "fastclip": __version__}) + "\n")


def check_schema(folder: Path) -> None:
    """Refuse the folder of a version that is newer than this one."""
    try:
        schema = json.loads((folder / ABOUT).read_bytes())["schema"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # of the first schema; what else is broken there says so itself
    if isinstance(schema, int) and schema > SCHEMA:
        raise ValueError(
            f"{folder} was written by a newer fastclip (schema {schema}; this one knows {SCHEMA}): update it."
        )


def write_config(config: Resolved, folder: Path) -> None:
    """config.yaml, from which the same run can be trained."""
    text = yaml.safe_dump(config.written, sort_keys=False, allow_unicode=True)
    atomic_write(folder / CONFIG, text)


def read_run(folder: Path, *, settings: bool = True) -> Run:
    """Read all that is there; ValueError if the folder is no run's.

    Args:
        settings: parse config.yaml too; who reads the many runs of a study knows their settings already.
    """
    folder = folder.expanduser()
    _check_is_run(folder)
    check_schema(folder)
    run = Run(folder)
    if settings:
        _read_config(run)
    _read_metrics(run)
    _read_results(run)
    _read_metadata(run)
    return run


def without_secrets(text: str) -> str:
    """Pages are made to be sent: who logs in where stays out of them."""
    return _SECRETS.sub("", text)


def number(value: object) -> float | None:
    """A finite number, or None for whatever else a line may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def timing(record: dict, name: str) -> float | None:
    """A value that is under "time" in a record."""
    spent = record.get("time")
    return number(spent.get(name)) if isinstance(spent, dict) else None


def _check_is_run(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Give the folder of a run, e.g. runs/emoji-fastclip-v3.")
    if _looks_like_run(folder):
        return
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and _looks_like_run(path))
    above = folder.resolve().parent
    if inside:
        hint = f"There are runs in it: {', '.join(str(path) for path in inside[:3])}."
    elif _looks_like_run(above):
        hint = f"It is a part of one: give {above}."
    else:
        hint = "Give the folder that `fastclip train` wrote, e.g. runs/emoji-fastclip-v3."
    raise ValueError(f"{folder} is not the folder of a run: it has no {CONFIG} and no {METRICS}. {hint}")


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
        run.missing.append(f"{CONFIG} is not the config of a run, so its values are not used: {error}")


def _read_metrics(run: Run) -> None:
    lines = JsonLines(run.folder / METRICS)
    try:
        run.changed = lines.path.stat().st_mtime
        for line, record in lines:
            if number(record.get("step")) is None or number(record.get("epoch")) is None:
                lines.left_out.append(line)
                continue
            evaluated = isinstance(record.get("evaluation"), dict)
            (run.evaluations if evaluated else run.records).append(record | {"step": int(record["step"])})
    except OSError as error:
        run.missing.append(f"{METRICS} cannot be read ({error.strerror}).")
    run.missing += _left_out(lines, METRICS, "record")
    if not run.records:
        run.missing.append(f"{METRICS} holds no record of training yet: there are no curves of it.")
    if not run.evaluations:
        run.missing.append("Nothing was evaluated while the model trained; --evaluate.pairs names what to.")


def _read_results(run: Run) -> None:
    lines = JsonLines(run.folder / RESULTS)
    if not lines.path.exists():
        return
    found: dict[str, Result] = {}
    try:
        for result in read_all(lines):
            found.pop(result.task, None)  # the order is that of the last lines
            found[result.task] = result
    except OSError as error:
        run.missing.append(f"{RESULTS} cannot be read ({error.strerror}).")
    run.missing += _left_out(lines, RESULTS, "result")
    run.results = list(found.values())


def _read_metadata(run: Run) -> None:
    newest = newest_checkpoint(run.folder)
    if newest is None:
        run.missing.append("There is no checkpoint yet: what the model finds cannot be shown.")
        return
    try:
        run.metadata = read_metadata(newest)
    except ValueError as error:
        run.missing.append(str(error))


def _left_out(lines: JsonLines, name: str, what: str) -> list[str]:
    """What was left out of a file, as sentences."""
    said = [f"{name}: the last line is torn and was left out."] if lines.torn else []
    if lines.left_out:
        first, more = ", ".join(map(str, lines.left_out[:5])), len(lines.left_out) - 5
        some = f"lines {first}{f' and {more:,} more' if more > 0 else ''} are no {what}s and were"
        some = f"line {first} is no {what} and was" if len(lines.left_out) == 1 else some
        said.append(f"{name}: {some} left out.")
    return said


# Checkpoints, without their tensors: see `checkpoint`


def newest_checkpoint(run: Path) -> Path | None:
    """The complete checkpoint of the highest step."""
    return next(reversed(complete_checkpoints(run / CHECKPOINTS)), None)


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in checkpoints.glob("step-*") if _STEP.fullmatch(path.name)]
    whole = [path for path in found if (path / STATE).is_file()]
    return sorted(whole, key=lambda path: int(path.name.removeprefix("step-")))


def read_metadata(checkpoint: Path) -> dict:
    """What a checkpoint holds besides tensors."""
    return read_state(checkpoint)["facts"]


def read_state(checkpoint: Path) -> dict:
    """A checkpoint's metadata, and the files it is made of; ValueError if it is not whole."""
    file = Path(checkpoint) / STATE
    try:
        state = json.loads(file.read_bytes())
        if not isinstance(state["facts"], dict) or not isinstance(state["files"], dict):
            raise ValueError("facts or files are not a dict")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is missing or broken ({error}): this is not a whole checkpoint. "
            "Copy it again, or delete its folder and resume from an earlier step."
        ) from error
    return state


def is_trained(run: Path) -> bool:
    """Whether a run's newest checkpoint is of its last step, and its model was exported.

    ValueError if the checkpoint cannot be read.
    """
    newest = newest_checkpoint(run)
    if newest is None:
        return False
    try:
        metadata = read_metadata(newest)
        config = metadata["config"]
        last = whole_batches(config["epochs"], metadata["num_samples"], config["batch"]["size"])
        return metadata["step"] >= last and (run / MODEL).is_dir()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{newest / STATE} cannot be read ({error!r}): remove {newest}.") from error


def is_run(folder: Path) -> bool:
    """Whether a model can be loaded from it as from a run."""
    return (folder / CHECKPOINTS).is_dir()


def find_checkpoint(run: Path, which: Which) -> Path:
    """The folder that checkpoints/last or checkpoints/best points to."""
    path = run / CHECKPOINTS / which
    if path.exists():
        check_schema(run)
        return path.resolve()
    if not is_run(run):
        raise FileNotFoundError(f"{run} is not the folder of a run: it has no checkpoints.")
    if which == "best":
        raise FileNotFoundError(
            f"{run} has no best checkpoint: it was trained without evaluate.pairs. Take the last one."
        )
    raise FileNotFoundError(f"{run} has no checkpoint yet.")


class EvaluationPairs(NamedTuple):
    """Pairs that a run was evaluated on, with the columns in which its tables have them."""

    paths: list[str]
    columns: tuple[str | None, str | None] = (None, None)


def evaluation_pairs(run: Path) -> EvaluationPairs:
    """What the run's config names as evaluate.pairs; no paths if it names none, or cannot be read.

    Relative paths are seen from here, or else from where the run was trained, by what it calls its folder.
    """
    try:
        config = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
        named, out = config["evaluate"]["pairs"] or [], Path(config.get("out") or "")
        data = config.get("data") or {}
        columns = data.get("image_column"), data.get("caption_column")
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError):
        return EvaluationPairs([])
    paths, here = [named] if isinstance(named, str) else named, Path(os.path.abspath(run)).parts
    if out.is_absolute() or here[-len(out.parts) :] != out.parts or _are_there(paths):
        return EvaluationPairs(paths, columns)
    base = Path(*here[: -len(out.parts)])
    moved = [path if is_remote(path) else str(base / path) for path in paths]
    return EvaluationPairs(moved if _are_there(moved) else paths, columns)


def _are_there(paths: list[str]) -> bool:
    try:
        return bool(find_files(paths))
    except (OSError, ValueError):
        return False
