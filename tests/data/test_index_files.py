"""The index of one file: complete or absent, read as it was written, damage noticed."""

import json

import numpy as np
import pytest

from fastclip.checked_files import DamagedFile
from fastclip.data.index_files import read_index, write_index
from fastclip.data.pairs import COMMON_COLUMNS, File, SourceError
from fastclip.data.rows import IN_FILE, IN_TAR, ROW
from tests.damage import flip, positions
from tests.data.collections import png, write_tar


def index(tmp_path, file, **options):
    path = tmp_path / "file.index"
    write_index(file, COMMON_COLUMNS, path, **options)
    summary, records = read_index(path)
    return summary, list(records)


def table(tmp_path, rows=3):
    (tmp_path / "a.png").write_bytes(b"12345")
    lines = "".join(f"a.png,caption {i}\n" for i in range(rows))
    (tmp_path / "t.csv").write_text(f"image,caption\n{lines}none.png,nothing\n")
    return File(str(tmp_path / "t.csv"), "table")


def test_rows_and_problems_of_a_tar(tmp_path):
    members = [("a.png", png(0)), ("a.txt", b"one\ntwo"), ("b.png", png(1))]
    summary, (record,) = index(tmp_path, File(str(write_tar(tmp_path / "s.tar", members)), "tar"))
    (row,) = np.frombuffer(record.rows, ROW)
    assert (row["file"], row["kind"], row["image_size"], row["caption_size"]) == (0, IN_TAR, len(png(0)), 7)
    assert summary[:2] == (1, len(png(0)))
    assert summary.problem_counts == {"no caption": 1}
    assert summary.extra_captions == [1, 1]
    assert [json.loads(line)["key"] for line in record.problems.splitlines()] == ["b"]
    assert record.strings == b""


def test_strings_count_from_the_start_of_the_file_in_every_record(tmp_path):
    summary, records = index(tmp_path, table(tmp_path, rows=10_000))
    assert len(records) == 2
    rows = np.concatenate([np.frombuffer(record.rows, ROW) for record in records])
    strings = b"".join(record.strings for record in records)
    assert summary.pairs == len(rows) == 10_000
    assert set(rows["kind"]) == {IN_FILE}
    for i in (0, 8191, 8192, 9999):
        start, size = int(rows[i]["caption"]), int(rows[i]["caption_size"])
        assert strings[start : start + size] == f"caption {i}".encode()
    assert summary.image_bytes == 50_000


def test_a_file_without_pairs_has_an_index(tmp_path):
    (tmp_path / "t.csv").write_text("image,caption\n")
    summary, (record,) = index(tmp_path, File(str(tmp_path / "t.csv"), "table"))
    assert summary.pairs == 0
    assert record.content.startswith(b"t.csv\0image,caption")


@pytest.mark.parametrize("stage", ["read", "progress"])
def test_a_failure_leaves_no_file(tmp_path, stage):
    def fail(position):
        raise OSError("disk full")

    file = table(tmp_path)
    if stage == "read":
        (tmp_path / "t.csv").write_text("neither,nor\n")
    with pytest.raises(SourceError if stage == "read" else OSError):
        index(tmp_path, file, progress=fail)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a.png", "t.csv"]


def test_every_damaged_byte_is_noticed(tmp_path):
    index(tmp_path, table(tmp_path))
    path = tmp_path / "file.index"
    for position in positions(path, most=20):
        flip(path, position)
        with pytest.raises(DamagedFile) as caught:
            list(read_index(path)[1])
        assert caught.value.path == str(path)
        flip(path, position)
    list(read_index(path)[1])
    path.with_name("file.index.xxh3").unlink()
    with pytest.raises(DamagedFile):
        read_index(path)
