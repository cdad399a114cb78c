"""The manifest: stable ids, reuse, several processes, damaged files."""

import errno
import multiprocessing
import os
import pickle
import shutil
import time

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastclip.data.images import UnusableSample
from fastclip.data.manifest import open_manifest
from fastclip.data.pairs import SourceError
from fastclip.data.readers import ChangedFile
from fastclip.data.remote import RemoteError
from fastclip.data.tables import NO_IMAGE
from tests.data.collections import pair_members, picture, png, write_shards, write_tar


def test_pairs_are_read_by_id(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 60, 3)))
    assert len(manifest) == 60
    for i in (0, 19, 20, 59):
        assert manifest.read(i) == (png(i), f"picture {i}")
    assert manifest.where(59).endswith("00002.tar")
    assert manifest.block_ends().tolist() == [20, 40, 60]


def test_sources_of_all_kinds_can_be_combined(tmp_path):
    shards = write_shards(tmp_path / "shards", 4, 1)
    folder = tmp_path / "folder"
    folder.mkdir()
    picture(7).save(folder / "a.png")
    (folder / "a.txt").write_text("seven")
    images = [{"bytes": png(i), "path": None} for i in range(3)]
    pq.write_table(
        pa.table({"image": images, "text": ["x", "y", "z"]}), tmp_path / "t.parquet", row_group_size=2
    )
    (tmp_path / "t.csv").write_text("filepath,title\nfolder/a.png,again\n")
    manifest = open_manifest([str(shards), str(folder), str(tmp_path / "t.parquet"), str(tmp_path / "t.csv")])
    captions = [manifest.read(i).caption for i in range(len(manifest))]
    assert captions == [f"picture {i}" for i in range(4)] + ["seven", "x", "y", "z", "again"]
    assert manifest.read(4).image == manifest.read(8).image == png(7)
    assert [manifest.read(i).image for i in (5, 6, 7)] == [png(0), png(1), png(2)]
    assert manifest.where(8).endswith("folder/a.png")


def test_manifest_is_reused_until_a_file_changes(tmp_path):
    data = write_shards(tmp_path / "data", 10, 2)

    def open_and_watch():
        calls = []
        manifest = open_manifest(str(data), progress=lambda *counts: calls.append(counts))
        return manifest, bool(calls)

    first, built = open_and_watch()
    assert built
    again, built = open_and_watch()
    assert not built
    assert again.fingerprint == first.fingerprint
    write_tar(data / "00001.tar", [("z.png", png(1)), ("z.txt", b"new")])
    changed, built = open_and_watch()
    assert built
    assert len(changed) == 6
    assert changed.fingerprint != first.fingerprint


def test_changed_file_in_a_folder_is_detected(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    picture(1).save(folder / "a.png")
    (folder / "a.txt").write_text("one")
    assert open_manifest(str(folder)).read(0).caption == "one"
    (folder / "a.txt").write_text("another")
    assert open_manifest(str(folder)).read(0).caption == "another"


def test_fingerprint_depends_on_content_not_on_location_or_time(tmp_path):
    data = write_shards(tmp_path / "here", 10, 2)
    fingerprint = open_manifest(str(data)).fingerprint
    shutil.copytree(data, tmp_path / "there")
    os.utime(tmp_path / "there" / "00000.tar", (1, 1))
    assert open_manifest(str(tmp_path / "there")).fingerprint == fingerprint


def test_another_image_of_the_same_name_changes_the_fingerprint(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    fingerprints = set()
    for size in ((40, 30), (80, 60)):
        picture(1, size=size).save(folder / "a.png")
        fingerprints.add(open_manifest(str(folder)).fingerprint)
        (tmp_path / "t.csv").write_text("image,caption\nfolder/a.png,one\n")
        os.utime(tmp_path / "t.csv", (size[0], size[0]))
        fingerprints.add(open_manifest(str(tmp_path / "t.csv")).fingerprint)
    assert len(fingerprints) == 4


def test_images_added_after_their_table_was_indexed_are_found(tmp_path):
    (tmp_path / "a.png").write_bytes(png(0))
    (tmp_path / "t.csv").write_text("image,caption\na.png,one\nb.png,two\n")
    assert len(open_manifest(str(tmp_path / "t.csv"))) == 1
    (tmp_path / "b.png").write_bytes(png(1))
    assert len(open_manifest(str(tmp_path / "t.csv"))) == 2


def test_unusual_names_are_read_and_dangling_links_skipped(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    os.symlink("nowhere", folder / "dead.png")
    for name in (b"caf\xe9", "naïve".encode()):
        (folder / os.fsdecode(name + b".png")).write_bytes(png(1))
        (folder / os.fsdecode(name + b".txt")).write_text("x")
    manifest = open_manifest(str(folder))
    assert [manifest.read(i).image for i in range(len(manifest))] == [png(1), png(1)]
    assert manifest.problem_counts == {"image file not found": 1}


def test_pickled_manifest_has_no_rows(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 60, 3)))
    assert len(pickle.dumps(manifest)) < 300
    assert pickle.loads(pickle.dumps(manifest)).read(7) == manifest.read(7)


def test_parquet_with_bytes_under_unusual_names(tmp_path):
    pq.write_table(pa.table({"bild": [png(0), png(1)], "wort": ["a", "b"]}), tmp_path / "t.parquet")
    manifest = open_manifest(str(tmp_path / "t.parquet"), image_column="bild", caption_column="wort")
    assert manifest.read(1) == (png(1), "b")


def test_images_of_hugging_face_tables_may_be_files(tmp_path):
    (tmp_path / "0.png").write_bytes(png(0))
    images = [{"bytes": None, "path": "0.png"}, {"bytes": None, "path": None}]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(images, kind), "text": ["a", "b"]}), tmp_path / "t.parquet")
    manifest = open_manifest(str(tmp_path / "t.parquet"))
    assert manifest.read(0).image == png(0)
    with pytest.raises(UnusableSample) as caught:
        manifest.read(1)
    assert str(caught.value) == NO_IMAGE


def test_full_disk_leaves_no_incomplete_manifest(tmp_path, cache):
    data = write_shards(tmp_path / "data", 10, 2)

    def fail(done, total):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        open_manifest(str(data), progress=fail)
    assert caught.value.errno == errno.ENOSPC
    assert not [path for path in (cache / "manifests").iterdir() if path.suffix != ".lock"]
    assert len(open_manifest(str(data))) == 10


def _open_slowly(path, cache, queue):
    os.environ["FASTCLIP_CACHE"] = cache
    calls = []

    def report_first(*counts):
        if not calls:
            queue.put("built")
            time.sleep(0.3)
        calls.append(counts)

    queue.put(open_manifest(path, progress=report_first).fingerprint)


@pytest.mark.slow
def test_one_of_several_processes_builds_and_the_others_wait(tmp_path, cache):
    data = write_shards(tmp_path / "data", 40, 4)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_open_slowly, args=(str(data), str(cache), queue)) for _ in range(4)]
    for process in processes:
        process.start()
    messages = [queue.get(timeout=30) for _ in range(5)]
    for process in processes:
        process.join()
    assert messages.count("built") == 1
    assert set(messages) == {"built", open_manifest(str(data)).fingerprint}
    assert not list((cache / "manifests").glob("*.part"))


def test_problems_are_stored_and_counted(tmp_path):
    members = [("a.png", png(0)), ("a.txt", b"x"), ("b.png", png(1)), ("c.png", png(1)), ("c.txt", b"")]
    manifest = open_manifest(str(write_tar(tmp_path / "s.tar", members)))
    assert len(manifest) == 1
    assert manifest.problem_counts == {"no caption": 1, "empty caption": 1}
    assert [problem.key for problem in manifest.problems()] == ["b", "c"]


def test_collection_without_a_usable_pair_is_rejected(tmp_path, cache):
    path = write_tar(tmp_path / "s.tar", [("a.png", png(0))])
    with pytest.raises(SourceError) as caught:
        open_manifest(str(path))
    assert caught.value.path == str(path)
    assert "1 × no caption" in caught.value.problem
    assert not [path for path in (cache / "manifests").iterdir() if path.suffix != ".lock"]


def test_file_that_shrank_after_indexing_is_an_error_of_the_sample(tmp_path):
    data = write_shards(tmp_path / "data", 4, 1)
    manifest = open_manifest(str(data))
    os.truncate(data / "00000.tar", 3000)
    with pytest.raises(ChangedFile) as caught:
        manifest.read(3)
    assert caught.value.path == str(data / "00000.tar")


def test_remote_shards_are_copied_once_and_again_when_they_change(tmp_path, cache):
    data = write_shards(tmp_path / "data", 6, 2)
    remote = fsspec.filesystem("memory")
    for path in data.iterdir():
        remote.pipe(f"/bucket/{path.name}", path.read_bytes())

    def copies():
        return {path.name: path.stat().st_mtime_ns for path in (cache / "remote").glob("*.tar")}

    manifest = open_manifest("memory://bucket/*.tar")
    assert [manifest.read(i).caption for i in range(6)] == [f"picture {i}" for i in range(6)]
    assert manifest.read(5).image == png(5)
    first = copies()
    assert len(first) == 2
    open_manifest("memory://bucket/*.tar").read(0)
    assert copies() == first
    assert open_manifest(str(data)).fingerprint == manifest.fingerprint
    assert len(open_manifest("memory://bucket/{00000..00001}.tar")) == 6
    before = copies()
    more = write_tar(tmp_path / "more.tar", pair_members(range(3, 9)))
    remote.pipe("/bucket/00001.tar", more.read_bytes())
    assert len(open_manifest("memory://bucket/*.tar")) == 9
    assert before.items() <= copies().items()
    assert len(copies()) == len(before) + 1
    with pytest.raises(RemoteError) as caught:
        open_manifest("memory://bucket/none.tar")
    assert caught.value.path == "memory://bucket/none.tar"


def test_rows_are_memory_mapped(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 6, 2)))
    assert isinstance(manifest.rows, np.memmap)
    assert manifest.rows.dtype.itemsize == 32
