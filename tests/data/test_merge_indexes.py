"""Merged indexes are the manifest that one pass over all files would write."""

import pytest
from xxhash import xxh3_64_hexdigest

from fastclip.data.manifest import open_manifest
from fastclip.data.pairs import SourceError
from tests.data.collections import write_tar

# Of the version that indexed all files in one pass.
FINGERPRINT, FINGERPRINT_1 = "2:c90482106274ade6ebb8fbf28da9b42a", "ba1ab5f3430778060305becbf238da08"
ROWS, STRINGS = "32b7419c05466d52", "58d85faa98890112"


def collection_of_bytes(folder):
    """Pairs of several kinds whose bytes no library decides: more than a record, and a file without any."""
    members = [(f"{i}.{kind}", b"x" * (i + 1)) for i in range(5) for kind in ("png", "txt")]
    write_tar(folder / "a.tar", members)
    write_tar(folder / "b.tar", [("no caption.png", b"x"), ("several.png", b"x"), ("several.txt", b"1\n2")])
    (folder / "empty.tar").write_bytes(bytes(10_240))
    (folder / "images").mkdir()
    for i in range(20):
        (folder / "images" / f"{i:02d}.png").write_bytes(b"x" * i)
        (folder / "images" / f"{i:02d}.txt").write_text(f"é {i}")
    lines = "".join(f"images/{i % 30:02d}.png,again {i}\n" for i in range(9000))
    (folder / "table.csv").write_text(f"image,caption\n{lines}")
    names = ("a.tar", "table.csv", "empty.tar", "images", "b.tar", "a.tar", "table.csv")
    return [str(folder / name) for name in names]


def test_the_manifest_is_that_of_one_pass_over_all_files(tmp_path):
    manifest = open_manifest(collection_of_bytes(tmp_path))
    assert (manifest.fingerprint, manifest.fingerprint_1) == (FINGERPRINT, FINGERPRINT_1)
    assert xxh3_64_hexdigest((manifest.folder / "rows.bin").read_bytes()) == ROWS
    assert xxh3_64_hexdigest((manifest.folder / "strings.bin").read_bytes()) == STRINGS
    assert manifest.file_rows.tolist() == [5, 5700, 0, 19, 1, 5, 5700]
    assert list(manifest.problem_counts.items()) == [
        ("image of 0 bytes", 601),
        ("image file not found", 6000),
        ("truncated or damaged tar", 1),
        ("no caption", 1),
    ]
    assert manifest.extra_captions == (1, 1)
    assert [problem.key for problem in manifest.problems()][-1] == "images/29.png"


def test_pairs_are_read_by_id_whatever_file_they_are_in(tmp_path):
    manifest = open_manifest(collection_of_bytes(tmp_path))
    assert manifest.read(4) == (b"xxxxx", "xxxxx")
    assert manifest.read(5) == (b"x", "again 1")
    assert manifest.read(5705) == (b"x", "é 1")
    assert manifest.read(5724) == (b"x", "1\n2")
    assert manifest.read(5725) == (b"x", "x")
    assert manifest.read(5730) == (b"x", "again 1")
    assert manifest.read(len(manifest) - 1) == (b"x" * 19, "again 8989")


def test_a_collection_without_pairs_names_its_first_file(tmp_path):
    (tmp_path / "empty.tar").write_bytes(bytes(10_240))
    with pytest.raises(SourceError) as caught:
        open_manifest([str(tmp_path / "empty.tar")] * 2)
    assert caught.value.path == str(tmp_path / "empty.tar")
