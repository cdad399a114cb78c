"""metrics.jsonl: one JSON object per line, written immediately, and truncated when a run resumes."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


class JsonLines:
    """Iterate over the lines of a file that are JSON objects, each with its line number.

    `skipped` has the numbers of lines that are something else; `torn` says whether the last line is
    incomplete, as when the process was killed while writing.
    """

    def __init__(self, path: Path):
        self.path = path
        self.raw: list[bytes] = []  # all lines, once iteration has started
        self.skipped: list[int] = []
        self.torn = False

    def __iter__(self) -> Iterator[tuple[int, dict]]:
        self.raw = lines = self.path.read_bytes().split(b"\n")
        for number, text in enumerate(lines, start=1):
            try:
                record = json.loads(text) if text.strip() else None
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield number, record
            elif text.strip() and number == len(lines):
                self.torn = True
            elif text.strip():
                self.skipped.append(number)


def read_metrics(path: Path) -> list[dict]:
    """All records; an incomplete last line, left by a killed run, is skipped."""
    lines = JsonLines(path)
    records = [record for _, record in lines]
    _warn_of_skipped(lines)
    return records


def _warn_of_skipped(lines: JsonLines) -> None:
    for number in lines.skipped:
        log.warning("%s: line %d is not a record and is skipped.", lines.path, number)


def last_record(path: Path) -> dict | None:
    """The last complete record with a step and an epoch, read from the end of the file."""
    with suppress(OSError):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 10_000))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                record = json.loads(line)
                return {"step": int(record["step"]), "epoch": float(record["epoch"])}
    return None


def truncate_metrics(path: Path, step: int, evaluated: int | None = None) -> None:
    """Drop the records after `step`: a run that resumes there writes them again.

    Args:
        evaluated: the last step whose evaluation is kept; None: `step`.
    """
    evaluated = step if evaluated is None else evaluated

    def stays(record: dict) -> bool:
        at = record.get("step", 0)
        return isinstance(at, int | float) and at <= (evaluated if "evaluation" in record else step)

    if not path.exists():
        return
    lines, kept = JsonLines(path), []
    for number, record in lines:
        if not _is_record(record):
            lines.skipped.append(number)
        elif stays(record):
            kept.append(lines.raw[number - 1])
    _warn_of_skipped(lines)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(b"".join(line + b"\n" for line in kept))
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk
        part.unlink(missing_ok=True)
        raise
    part.replace(path)


def _is_record(record: dict) -> bool:
    """Whether the step and the scores of a record, if it has them, are numbers."""
    scores = record.get("evaluation", {})
    values = [*scores.values(), record.get("step", 0)] if isinstance(scores, dict) else [None, "not scores"]
    return all(value is None or isinstance(value, int | float) for value in values)


class MetricsFile:
    """Write one JSON object per line, immediately; records that a full disk refuses are retried later."""

    def __init__(self, path: Path):
        self.path = path
        self._unwritten: list[bytes] = []
        self._warned = False

    def write(self, record: dict) -> None:
        self._unwritten.append(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        if not self._unwritten:
            return
        try:
            self._append(b"".join(self._unwritten))
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s cannot be written: %s. Free some space: training continues, and the records will be "
                    "retried.",
                    self.path,
                    error.strerror,
                )
            self._warned = True
        else:
            self._unwritten, self._warned = [], False

    def lost(self) -> str | None:
        """What to say about records that could not be written by the end of the run; None: all were."""
        if not self._unwritten:
            return None
        many = len(self._unwritten)
        return (
            f"{self.path} could not be written to the end: {many:,} record{'s are' if many > 1 else ' is'} "
            "missing. Checkpoints and the model are complete. Free some space before the next run."
        )

    def _append(self, data: bytes) -> None:
        """Append all or nothing: half a line would corrupt the next one too."""
        with open(self.path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise


def _finite(value):
    """Replace NaN and infinities, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
