"""metrics.jsonl: one JSON object a line, on disk at once, read again, and cut back when a run resumes."""

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


def read_metrics(path: Path) -> list[dict]:
    """All records; a line that was torn when a run was killed is left out."""
    return [record for _, record in _lines(path)]


def truncate_metrics(path: Path, step: int) -> None:
    """Forget what came after `step`: a run that resumes there will tell it again."""
    if not path.exists():
        return
    kept = b"".join(line for line, record in _lines(path) if record.get("step", 0) <= step)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _lines(path: Path) -> Iterator[tuple[bytes, dict]]:
    """Each whole line, with its end, and its record."""
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield line + b"\n", record
        elif number < len(lines):
            log.warning("%s: line %d is no record and is left out.", path, number)


class MetricsFile:
    """One JSON object a line, on disk at once. What a full disk refuses is kept and tried again."""

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
                    "%s cannot be written: %s. The run goes on, and its records are tried again.",
                    self.path,
                    error.strerror,
                )
            self._warned = True
        else:
            self._unwritten, self._warned = [], False

    def _append(self, data: bytes) -> None:
        """All or nothing: half a line would spoil the next one too."""
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
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
