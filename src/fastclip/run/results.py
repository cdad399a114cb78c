"""Results of `fastclip eval` in results.jsonl, one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fastclip.run.metrics_file import JsonLines


@dataclass
class Result:
    """The scores of a task, or the error that prevented them."""

    task: str
    key: str = ""
    """Hash of the model and the task: equal keys mean equal scores."""
    kind: str = ""
    measure: str = ""
    """Name of the score that enters the suite's means."""
    scores: dict[str, float] = field(default_factory=dict)
    images: int = 0
    unusable: int = 0
    """Images that could not be used and were skipped."""
    error: str = ""
    model: str = ""
    """`feature_cache.model_key` of the model that was scored."""

    @property
    def value(self) -> float | None:
        """The score that enters the suite's means."""
        return self.scores.get(self.measure)


def read_all(lines: JsonLines) -> list[Result]:
    """All results in file order; lines that are not results are added to `lines.skipped`."""
    results = []
    for number, values in lines:
        try:
            result = Result(**values)
        except TypeError:
            result = None
        if result is None or not _is_valid(result):
            lines.skipped.append(number)
        else:
            results.append(result)
    return results


def _is_valid(result: Result) -> bool:
    """Whether the values from a file have the types of their fields."""
    texts = (result.task, result.key, result.kind, result.measure, result.error, result.model)
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(count) is int and 0 <= count < 2**63 for count in (result.images, result.unusable))
        and isinstance(result.scores, dict)
        and all(type(score) in (int, float) for score in result.scores.values())
    )


def read_results(path: Path) -> dict[str, Result]:
    """Earlier results by key, except failed ones, which are to be retried, and an incomplete last line."""
    results = read_all(JsonLines(path)) if path.exists() else []
    return {result.key: result for result in results if result.key and not result.error}


def append_result(path: Path, result: Result) -> None:
    """Append a line; an incomplete last line is ended first."""
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        torn = file.read() not in (b"", b"\n")
        file.write((b"\n" if torn else b"") + json.dumps(asdict(result)).encode() + b"\n")
