"""The fingerprint covers what training reads, wherever it lies; `verify` finds what changed."""

import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastclip.cli import main
from fastclip.data import manifest as manifest_module
from fastclip.data.fingerprint import Change, sample_of, verify
from fastclip.data.manifest import open_manifest
from tests.damage import flip
from tests.data.collections import write_tar

COUNT = 40


def write_text_shards(folder):
    """Shards whose members are short texts: nothing here decodes images."""
    folder.mkdir(parents=True)
    for shard in range(2):
        kinds = ("png", "txt", "json")
        members = [
            (f"{i}.{kind}", f"{kind} {shard} {i:04d}".encode()) for i in range(COUNT) for kind in kinds
        ]
        write_tar(folder / f"{shard:05d}.tar", members)
    return folder


def replace_bytes(path, old, new):
    """Change bytes within a file, keeping its size and times."""
    data, stat = path.read_bytes(), path.stat()
    assert data.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def swap(path, one, other):
    replace_bytes(path, one, b"?" * len(one))
    replace_bytes(path, other, one)
    replace_bytes(path, b"?" * len(one), other)


def copies(tmp_path, shards):
    """The same collection; with two captions swapped; two images swapped; one bit of an image flipped."""
    folders = [shutil.copytree(shards, tmp_path / f"copy {i}") for i in range(4)]
    swap(folders[1] / "00000.tar", b"txt 0 0011", b"txt 0 0022")
    swap(folders[2] / "00001.tar", b"png 1 0011", b"png 1 0022")
    flip(folders[3] / "00001.tar", (folders[3] / "00001.tar").read_bytes().index(b"png 1 0020"))
    return folders


def test_swapped_captions_and_damaged_images_change_it_though_no_size_does(tmp_path):
    same, *changed = copies(tmp_path, write_text_shards(tmp_path / "shards"))
    manifests = [open_manifest(str(folder)) for folder in (tmp_path / "shards", same, *changed)]
    assert len({manifest.fingerprint for manifest in manifests}) == 4
    assert manifests[0].fingerprint == manifests[1].fingerprint
    assert not manifests[0].images_sampled
    assert len({manifest.fingerprint_1 for manifest in manifests}) == 1  # the old rule noticed none of them


def test_neither_times_nor_the_names_of_folders_and_files_matter(tmp_path):
    shards = write_text_shards(tmp_path / "shards")
    before = open_manifest(str(shards)).fingerprint
    for path in shards.iterdir():
        os.utime(path, (1, 1))
    assert open_manifest(str(shards)).fingerprint == before
    (shards / "00000.tar").rename(shards / "00000-renamed.tar")
    shards.rename(tmp_path / "elsewhere")
    assert open_manifest(str(tmp_path / "elsewhere")).fingerprint == before


def test_images_of_tables_and_folders_count_by_their_bytes(tmp_path):
    seen = set()
    for content in (b"one image", b"two image"):
        folder = tmp_path / content.decode() / "folder"
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(content)
        (folder / "a.txt").write_text("a caption")
        (folder.parent / "t.csv").write_text("image,caption\nfolder/a.png,a caption\n")
        pq.write_table(pa.table({"image": [content], "text": ["a caption"]}), folder.parent / "t.parquet")
        for path in (folder, folder.parent / "t.csv", folder.parent / "t.parquet"):
            seen.add(open_manifest(str(path)).fingerprint)
    assert len(seen) == 4  # the CSV and the Parquet file hold the same pairs


def test_the_number_of_pairs_of_each_file_counts(tmp_path):
    for name, sizes in {"a": (1, 2), "b": (2, 1)}.items():
        (tmp_path / name).mkdir()
        ids = iter(range(3))
        for shard, size in enumerate(sizes):
            some = [next(ids) for _ in range(size)]
            members = [(f"{i}.{kind}", f"{kind} {i}".encode()) for i in some for kind in ("png", "txt")]
            write_tar(tmp_path / name / f"{shard}.tar", members)
    first, second = (open_manifest(str(tmp_path / name)) for name in "ab")
    assert [first.read(i) for i in range(3)] == [second.read(i) for i in range(3)]
    assert first.fingerprint != second.fingerprint  # blocks are shuffled by shard


def test_of_a_large_collection_captions_and_a_sample_of_images_count(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "READ_WHOLE", 100)
    monkeypatch.setattr("fastclip.data.fingerprint._SAMPLE", 8)
    same, captions, *_ = copies(tmp_path, write_text_shards(tmp_path / "shards"))
    chosen = sample_of(2 * COUNT)
    assert len(chosen) == 8
    manifest = open_manifest(str(same))
    assert manifest.images_sampled
    unread = next(i for i in range(COUNT) if i not in chosen)
    read = next(i for i in chosen if i < COUNT)
    assert open_manifest(str(captions)).fingerprint != manifest.fingerprint
    for i, changes in ((unread, False), (read, True)):
        folder = shutil.copytree(same, tmp_path / f"image {i}")
        replace_bytes(folder / "00000.tar", f"png 0 {i:04d}".encode(), b"another!!!")
        assert (open_manifest(str(folder)).fingerprint != manifest.fingerprint) is changes


def test_the_sample_is_a_function_of_the_number_of_pairs():
    assert sample_of(5) == [0, 1, 2, 3, 4]
    for n in (4096, 300_000_000):
        ids = sample_of(n)
        assert ids == sample_of(n)
        assert len(ids) == 4096
        assert all(n * i // 4096 <= one < n * (i + 1) // 4096 for i, one in enumerate(ids))
    assert sample_of(10_000_000)[:4] == [1206, 3348, 5281, 8117]  # the same on every machine


def test_the_old_rule_gives_what_old_checkpoints_recorded(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in range(2):
        kinds = ("png", "txt", "json")
        members = [(f"{i}.{kind}", f"{kind} {shard} {i}".encode()) for i in range(5) for kind in kinds]
        write_tar(shards / f"{shard:05d}.tar", members)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"an image")
    (folder / "a.txt").write_text("a caption")
    (tmp_path / "t.csv").write_text("filepath,title\nfolder/a.png,again\nfolder/none.png,never\n")
    manifest = open_manifest([str(shards), str(folder), str(tmp_path / "t.csv")])
    recorded = "d092eb436b74b3e8585b704b01fb6983"  # by fastclip 0.1
    assert manifest.fingerprint_like(recorded) == recorded
    assert manifest.fingerprint_like("2:") == manifest.fingerprint != recorded


def test_verify_names_what_changed_without_changing_a_time(tmp_path):
    shards = write_text_shards(tmp_path / "shards")
    manifest = open_manifest(str(shards))
    assert verify(manifest) == ([], True)
    swap(shards / "00000.tar", b"txt 0 0011", b"txt 0 0022")
    replace_bytes(shards / "00001.tar", b"png 1 0003", b"another!!!")
    manifest = open_manifest(str(shards))
    files = [str(shards / name) for name in ("00000.tar", "00001.tar")]
    changes = [Change(files[0], "its captions"), Change(files[1], "images of pairs 40 to 79")]
    assert verify(manifest) == (changes, True)


def test_verify_records_all_images_of_a_sampled_collection_for_the_next_time(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "READ_WHOLE", 100)
    monkeypatch.setattr("fastclip.data.fingerprint._SAMPLE", 8)
    shards = write_text_shards(tmp_path / "shards")
    assert verify(open_manifest(str(shards))) == ([], False)
    assert verify(open_manifest(str(shards))) == ([], True)
    unread = next(i for i in range(COUNT) if i not in sample_of(2 * COUNT))
    replace_bytes(shards / "00000.tar", f"png 0 {unread:04d}".encode(), b"another!!!")
    found = verify(open_manifest(str(shards)))
    assert found == ([Change(str(shards / "00000.tar"), "images of pairs 0 to 39")], True)


@pytest.mark.parametrize("json", [[], ["--json"]])
def test_the_command_verifies(tmp_path, capsys, json):
    shards = write_text_shards(tmp_path / "shards")
    assert main(["data", "index", str(shards), "--verify", *json]) == 0
    assert "verified" in capsys.readouterr().out
    replace_bytes(shards / "00001.tar", b"png 1 0003", b"another!!!")
    assert main(["data", "index", str(shards), *json]) == 0  # reads no image again
    assert main(["data", "index", str(shards), "--verify", *json]) == 1
    assert str(shards / "00001.tar") in capsys.readouterr().err
