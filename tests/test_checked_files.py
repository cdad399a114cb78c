"""Damage of any byte is noticed when it is read, and only then."""

import logging
import os
import pickle
import shutil

import numpy as np
import pytest

from fastclip.checked_files import (
    CHUNK,
    CheckedFile,
    CheckedWriter,
    DamagedFile,
    checked,
    digests_of,
    open_or_build,
    set_aside,
    write_checked,
)
from fastclip.errors import PathError
from tests.damage import flip, positions

SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


def written(path, size):
    data = np.random.default_rng(size).bytes(size)
    with CheckedWriter(path) as file:
        for start in range(0, size, 40_000):
            file.write(data[start : start + 40_000])
    return data


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_read_as_it_was_written(tmp_path, size):
    data = written(tmp_path / "f", size)
    file = CheckedFile(tmp_path / "f", size)
    assert checked(tmp_path / "f").read_bytes() == file.read(0, size).tobytes() == data
    assert file.read(size // 3, size // 2).tobytes() == data[size // 3 : size // 3 + size // 2]


@pytest.mark.parametrize("size", SIZES)
def test_every_flipped_bit_is_noticed(tmp_path, size):
    written(tmp_path / "f", size)
    for path in (tmp_path / "f", digests_of(tmp_path / "f")):
        for position in positions(path):
            flip(path, position)
            with pytest.raises(DamagedFile) as caught:
                checked(tmp_path / "f")
            assert caught.value.path == str(tmp_path / "f")
            flip(path, position)
    checked(tmp_path / "f")


def test_a_file_that_is_cut_off_extended_or_missing_is_damaged(tmp_path):
    data = written(tmp_path / "f", 3 * CHUNK)
    digests = digests_of(tmp_path / "f").read_bytes()
    changes = [(data[: 2 * CHUNK], digests), (data + b"x", digests), (b"", digests), (b"", b"")]
    for content, kept in [*changes, (data, digests[:-8]), (data, digests[:-3]), (data, b"")]:
        (tmp_path / "f").write_bytes(content)
        digests_of(tmp_path / "f").write_bytes(kept)
        with pytest.raises(DamagedFile):
            CheckedFile(tmp_path / "f")
    (tmp_path / "f").unlink()
    with pytest.raises(DamagedFile):
        CheckedFile(tmp_path / "f")
    written(tmp_path / "f", 3)
    with pytest.raises(DamagedFile):
        CheckedFile(tmp_path / "f", size=4)


def test_only_what_is_read_is_checked_and_only_once(tmp_path):
    data = written(tmp_path / "f", 4 * CHUNK)
    flip(tmp_path / "f", 2 * CHUNK)
    file = CheckedFile(tmp_path / "f")
    assert file.read(0, 2 * CHUNK).tobytes() == data[: 2 * CHUNK]
    file.check_places(np.array([0, 2047, 3 * 2048, 4 * 2048 - 1]), 32)
    for read in (
        lambda: file.read(2 * CHUNK - 1, 2),
        lambda: file.check_places(np.array([5, 2 * 2048]), 32),
        file.check_whole,
    ):
        with pytest.raises(DamagedFile):
            read()
    file.check_whole(most=4 * CHUNK - 1)  # too large to check whole
    flip(tmp_path / "f", 0)
    file.read(0, 1)  # checked before


def test_the_error_survives_the_way_from_a_loader_worker(tmp_path):
    error = DamagedFile(tmp_path / "f", "is damaged.")
    again = pickle.loads(pickle.dumps(error))
    assert (again.path, again.problem, str(again)) == (error.path, error.problem, str(error))
    assert "is damaged." in str(DamagedFile(str(error)))  # as torch rebuilds it


def open_text_cache(folder, built):
    def build(part):
        built.append(part)
        write_checked(part / "f", "text")

    return open_or_build(
        folder, lambda: checked(folder / "f").read_text(), lambda text: text == "text", build
    )


def test_a_damaged_cache_is_built_again_with_one_line(tmp_path, caplog):
    built: list = []
    for _ in range(2):
        assert open_text_cache(tmp_path / "cache", built) == "text"
    assert len(built) == 1
    flip(tmp_path / "cache" / "f", 2)
    with caplog.at_level(logging.WARNING):
        assert open_text_cache(tmp_path / "cache", built) == "text"
    (record,) = caplog.records
    assert str(tmp_path / "cache" / "f") in record.getMessage()
    assert len(built) == 2


def test_a_cache_is_set_aside_only_by_those_who_opened_it(tmp_path):
    folder, built = tmp_path / "cache", []
    open_text_cache(folder, built)
    first, also_first = CheckedFile(folder / "f"), CheckedFile(folder / "f")
    set_aside(folder, first)
    assert not folder.exists()
    assert first.read(0, 4).tobytes() == b"text"
    open_text_cache(folder, built)
    set_aside(folder, also_first)  # noticed late: the new one stays
    assert folder.exists()
    assert len(built) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "cache.lock"]


def test_a_cache_that_cannot_be_written_is_named_with_advice(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "file"))
    with pytest.raises(PathError) as caught:
        open_text_cache(tmp_path / "file" / "cache", [])
    assert caught.value.path == str(tmp_path / "file")
    assert "$FASTCLIP_CACHE" in caught.value.problem


def test_a_sector_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    written(tmp_path / "f", 10)
    file = CheckedFile(tmp_path / "f")

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(DamagedFile) as caught:
        file.read(0, 1)
    assert caught.value.path == str(tmp_path / "f")
    shutil.rmtree(tmp_path)
