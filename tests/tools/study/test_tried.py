"""What tuning tried is read as far as it can be, and what cannot be is told."""

import json

import pytest

from fastclip.tools.study.tried import read_tried


def write(folder, content):
    (folder / "tuning.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_study_that_tunes_nothing_has_no_tries(tmp_path):
    missing = []
    assert read_tried(tmp_path, missing) == []
    assert missing == []


def test_the_choice_is_marked_and_only_it(tmp_path):
    tried = [{"values": {"optim.lr": lr}, "score": lr, "error": ""} for lr in (0.1, 0.2)]
    write(tmp_path, {"arms": [{"arm": "a", "chosen": {"optim.lr": 0.1}, "tried": tried}]})
    found = read_tried(tmp_path, [])
    assert [(one.score, one.chosen) for one in found] == [(0.1, True), (0.2, False)]


def test_before_the_choice_nothing_is_marked(tmp_path):
    write(tmp_path, {"arms": [{"arm": "a", "chosen": None, "tried": [{"values": {}, "score": None}]}]})
    (one,) = read_tried(tmp_path, [])
    assert (one.score, one.chosen) == (None, False)


@pytest.mark.parametrize("content", ["{", "[]", {"arms": [{"arm": "a"}]}, {"arms": [1]}])
def test_a_broken_file_is_told(tmp_path, content):
    write(tmp_path, content)
    missing = []
    assert read_tried(tmp_path, missing) == []
    assert "tuning.json cannot be read" in missing[0]
