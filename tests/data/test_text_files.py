"""Tables in another encoding are refused by line and likely encoding, and read with the right one."""

import json

import pytest

from fastclip.data.pairs import Columns, File, Pair, SourceError
from fastclip.data.sources import read_pairs
from fastclip.data.text_files import likely_encoding
from tests.data.collections import png

FRENCH = ["un café à Paris", "une fenêtre ouverte", "le garçon mange une pêche", "a dog"]


def write_csv(folder, captions, encoding, name="t.csv"):
    for i in range(len(captions)):
        (folder / f"{i}.png").write_bytes(png(i))
    rows = "".join(f"{i}.png,{caption}\n" for i, caption in enumerate(captions))
    (folder / name).write_bytes(f"image,caption\n{rows}".encode(encoding))
    return File(str(folder / name), "table")


def captions_of(file, encoding="utf-8"):
    pairs = list(read_pairs(file, Columns(encoding=encoding)))
    assert all(isinstance(pair, Pair) for pair in pairs)
    return [pair.caption for pair in pairs]


def refused(file, encoding="utf-8"):
    with pytest.raises(SourceError) as caught:
        list(read_pairs(file, Columns(encoding=encoding)))
    assert caught.value.path == file.path
    return caught.value.problem


@pytest.mark.parametrize("ascii_rows", [0, 3000])  # longer than what a text stream decodes at a time
def test_a_table_that_is_not_utf_8_is_refused_and_the_advice_reads_it(tmp_path, ascii_rows):
    captions = ["plain"] * ascii_rows + FRENCH
    write_csv(tmp_path, FRENCH, "cp1252")
    rows = "".join(f"0.png,{caption}\n" for caption in captions)
    (tmp_path / "t.csv").write_bytes(f"image,caption\n{rows}".encode("latin-1"))
    file = File(str(tmp_path / "t.csv"), "table")
    problem = refused(file)
    assert f"line {ascii_rows + 2}:" in problem
    assert r"un caf\xe9" in problem  # as it is in the file
    assert "un café à" in problem  # as it reads in this encoding
    assert "--data.encoding cp1252" in problem
    assert captions_of(file, "cp1252") == captions


def test_metadata_jsonl_that_is_not_utf_8_is_refused_by_its_line(tmp_path):
    (tmp_path / "0.png").write_bytes(png(0))
    rows = [{"file_name": "0.png", "text": caption} for caption in ("a dog", "un café à Paris")]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "metadata.jsonl").write_bytes(lines.encode("latin-1"))
    with pytest.raises(SourceError) as caught:
        list(read_pairs(File(str(tmp_path), "folder")))
    assert caught.value.path == str(tmp_path / "metadata.jsonl")
    assert "line 2:" in caught.value.problem
    assert captions_of(File(str(tmp_path), "folder"), "latin-1") == ["a dog", "un café à Paris"]


def test_a_damaged_line_among_utf_8_is_not_taken_for_another_encoding(tmp_path):
    """Read in another encoding, all other lines would be garbled."""
    file = write_csv(tmp_path, FRENCH, "utf-8")
    with open(file.path, "ab") as stream:
        stream.write("0.png,la pêche\n".encode("latin-1"))
    problem = refused(file)
    assert "line 6:" in problem
    assert "--data.encoding" not in problem
    with open(file.path, "wb") as stream:  # the file ends within a character
        stream.write("image,caption\n0.png,été\n0.png,caf".encode() + b"\xc3")
    assert "line 3:" in refused(file)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-16-le", "cp1252"])
def test_other_encodings_are_read(tmp_path, encoding):
    file = write_csv(tmp_path, FRENCH, encoding)
    assert captions_of(file, "utf-8" if encoding == "utf-8-sig" else encoding) == FRENCH


def test_utf_16_as_spreadsheets_write_it_is_recognised(tmp_path):
    assert "--data.encoding utf-16" in refused(write_csv(tmp_path, FRENCH, "utf-16"))


@pytest.mark.parametrize("encoding", ["iso8859-1", "ascii"])
def test_a_utf_8_table_is_not_garbled_by_another_encoding(tmp_path, encoding):
    problem = refused(write_csv(tmp_path, FRENCH, "utf-8"), encoding)
    assert "UTF-8" in problem
    assert captions_of(write_csv(tmp_path, ["plain"], "utf-8"), encoding) == ["plain"]


@pytest.mark.parametrize(
    ("text", "written", "expected"),
    [
        ("a café", "latin-1", "cp1252"),
        ("un niño pequeño en la montaña\n", "latin-1", "cp1252"),
        ("ein Mädchen läuft über die Straße\n", "latin-1", "cp1252"),
        ("žlutý kůň běží přes louku, dívka s květinou\n", "cp1250", "cp1250"),
        ("красная машина на дороге, собака бежит по пляжу\n", "cp1251", "cp1251"),
        ("赤い車が道を走っている、犬が海辺で遊ぶ\n", "cp932", "cp932"),
        ("一只狗在海边奔跑，红色的汽车在路上\n", "gbk", "gb18030"),
    ],
)
def test_the_likely_encoding(text, written, expected):
    assert likely_encoding(text.encode(written) * 20) == expected
