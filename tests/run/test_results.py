"""Results from a file: lines whose values have other types are skipped, and counted."""

import json
from dataclasses import asdict

import pytest

from fastclip.run.metrics_file import JsonLines
from fastclip.run.results import Result, append_result, read_all, read_results

GOOD = Result("task", "key", "pairs", "recall", {"recall": 0.5}, 10)
WRONG = [
    {"task": 3},
    {"key": ["x"]},
    {"images": "10"},
    {"images": -1},
    {"unusable": True},
    {"scores": {"recall": "0.5"}},
    {"scores": {"recall": None}},
    {"scores": []},
    {"other": 1},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_line_with_values_of_another_type_is_skipped(tmp_path, wrong):
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(asdict(GOOD) | wrong) + "\n")
    append_result(file, GOOD)
    lines = JsonLines(file)
    assert read_all(lines) == [GOOD]
    assert lines.skipped == [1]
    assert read_results(file) == {"key": GOOD}
