"""What `fastclip eval` found, one JSON object a line in results.jsonl: written as it comes, read again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fastclip.run.metrics_file import JsonLines


@dataclass
class Result:
    """A task's scores, or why there are none."""

    task: str
    key: str = ""
    """Of the model and the task: equal keys mean equal scores."""
    kind: str = ""
    measure: str = ""
    """The one that counts for the suite's means."""
    scores: dict[str, float] = field(default_factory=dict)
    images: int = 0
    unusable: int = 0
    """Of the images; they were left out."""
    error: str = ""
    model: str = ""
    """`kept.model_key` of the model that was scored."""

    @property
    def value(self) -> float | None:
        """By which the task is judged."""
        return self.scores.get(self.measure)


def read_all(lines: JsonLines) -> list[Result]:
    """Every result in the order of the file; what is none is added to the lines' `left_out`."""
    found = []
    for number, values in lines:
        try:
            result = Result(**values)
        except TypeError:
            result = None
        if result is None or not isinstance(result.task, str) or not isinstance(result.scores, dict):
            lines.left_out.append(number)
        else:
            found.append(result)
    return found


def read_results(path: Path) -> dict[str, Result]:
    """Earlier results by key; those that failed are tried again, and a torn last line is left out."""
    results = read_all(JsonLines(path)) if path.exists() else []
    return {result.key: result for result in results if result.key and not result.error}


def append_result(path: Path, result: Result) -> None:
    """One more line; after one that was torn, on a line of its own."""
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        torn = file.read() not in (b"", b"\n")
        file.write((b"\n" if torn else b"") + json.dumps(asdict(result)).encode() + b"\n")
