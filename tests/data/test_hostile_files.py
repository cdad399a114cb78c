"""Every hostile file is counted with file, place and reason, and costs no good pair."""

import pytest

from tests.data.hostile_cases import differences, image_cases, read_all
from tests.data.hostile_files import HOSTILE_FILES


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.mark.timeout(60)  # a FIFO would wait for its writer forever
@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_what_is_bad_is_reported_and_all_else_is_read(name, tmp_path):
    case = HOSTILE_FILES[name]
    assert differences(case, read_all(case.make(tmp_path))) == []


def test_what_is_not_reported_or_too_much_is_a_difference(tmp_path):
    (case,) = image_cases({"text": (lambda: b"<html>", "not an image")})
    assert differences(case, read_all(case.make(tmp_path))) == []
    (other,) = image_cases({"text": (lambda: b"<html>", "truncated JPEG")})
    assert len(differences(other, read_all(case.make(tmp_path)))) == 2
