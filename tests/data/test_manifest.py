"""The manifest: ids that never change, reuse, several processes, damage."""

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

from fastclip.data import manifest as module
from fastclip.data.images import UnusableSample
from fastclip.data.manifest import open_manifest
from fastclip.data.pairs import SourceError
from fastclip.data.remote import RemoteError
from tests.data.collections import pair_members, picture, png, write_shards, write_tar


def test_every_pair_can_be_read_by_its_id(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 60, 3)))
    assert len(manifest) == 60
    for i in (0, 19, 20, 59):
        assert manifest.read(i) == (png(i), f"picture {i}")
    assert manifest.where(59).endswith("00002.tar")
    assert manifest.block_ends().tolist() == [20, 40, 60]


def test_sources_of_all_kinds_can_be_joined(tmp_path):
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


def test_it_is_used_again_until_a_file_changes(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "data", 10, 2)
    builds = []
    build = module._build
    monkeypatch.setattr(module, "_build", lambda *args: (builds.append(1), build(*args)))
    first = open_manifest(str(data))
    assert open_manifest(str(data)).fingerprint == first.fingerprint
    assert len(builds) == 1
    write_tar(data / "00001.tar", [("z.png", png(1)), ("z.txt", b"new")])
    changed = open_manifest(str(data))
    assert len(builds) == 2
    assert len(changed) == 6
    assert changed.fingerprint != first.fingerprint


def test_a_changed_file_in_a_folder_is_noticed(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    picture(1).save(folder / "a.png")
    (folder / "a.txt").write_text("one")
    assert open_manifest(str(folder)).read(0).caption == "one"
    (folder / "a.txt").write_text("another")
    assert open_manifest(str(folder)).read(0).caption == "another"


def test_the_fingerprint_is_that_of_the_content_not_of_the_place_or_time(tmp_path):
    data = write_shards(tmp_path / "here", 10, 2)
    fingerprint = open_manifest(str(data)).fingerprint
    shutil.copytree(data, tmp_path / "there")
    os.utime(tmp_path / "there" / "00000.tar", (1, 1))
    assert open_manifest(str(tmp_path / "there")).fingerprint == fingerprint


def test_another_picture_of_the_same_name_is_another_collection(tmp_path):
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


def test_images_that_come_after_their_table_was_indexed_are_found(tmp_path):
    (tmp_path / "a.png").write_bytes(png(0))
    (tmp_path / "t.csv").write_text("image,caption\na.png,one\nb.png,two\n")
    assert len(open_manifest(str(tmp_path / "t.csv"))) == 1
    (tmp_path / "b.png").write_bytes(png(1))
    assert len(open_manifest(str(tmp_path / "t.csv"))) == 2


def test_odd_names_and_dead_links_do_no_harm(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    os.symlink("nowhere", folder / "dead.png")
    for name in (b"caf\xe9", "naïve".encode()):
        (folder / os.fsdecode(name + b".png")).write_bytes(png(1))
        (folder / os.fsdecode(name + b".txt")).write_text("x")
    manifest = open_manifest(str(folder))
    assert [manifest.read(i).image for i in range(len(manifest))] == [png(1), png(1)]
    assert manifest.problem_counts == {"image file not found": 1}


def test_a_process_that_gets_a_manifest_gets_no_rows(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 60, 3)))
    assert len(pickle.dumps(manifest)) < 300
    assert pickle.loads(pickle.dumps(manifest)).read(7) == manifest.read(7)


def test_parquet_with_bytes_under_unusual_names(tmp_path):
    pq.write_table(pa.table({"bild": [png(0), png(1)], "wort": ["a", "b"]}), tmp_path / "t.parquet")
    manifest = open_manifest(str(tmp_path / "t.parquet"), image_column="bild", caption_column="wort")
    assert manifest.read(1) == (png(1), "b")


def test_hugging_faces_images_may_be_files(tmp_path):
    (tmp_path / "0.png").write_bytes(png(0))
    images = [{"bytes": None, "path": "0.png"}, {"bytes": None, "path": None}]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(images, kind), "text": ["a", "b"]}), tmp_path / "t.parquet")
    manifest = open_manifest(str(tmp_path / "t.parquet"))
    assert manifest.read(0).image == png(0)
    with pytest.raises(UnusableSample, match="the row holds no image"):
        manifest.read(1)


def test_a_full_disk_leaves_no_half_manifest(tmp_path, cache, monkeypatch):
    data = write_shards(tmp_path / "data", 10, 2)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_ends", full)
        with pytest.raises(OSError, match="No space left"):
            open_manifest(str(data))
    assert not [path for path in (cache / "manifests").iterdir() if path.suffix != ".lock"]
    assert len(open_manifest(str(data))) == 10


def _open_slowly(path, cache, queue):
    os.environ["FASTCLIP_CACHE"] = cache
    build = module._build
    module._build = lambda *args: (queue.put("built"), time.sleep(0.3), build(*args))
    queue.put(open_manifest(path).fingerprint)


def test_several_processes_may_start_at_once(tmp_path, cache):
    data = write_shards(tmp_path / "data", 40, 4)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_open_slowly, args=(str(data), str(cache), queue)) for _ in range(4)]
    for process in processes:
        process.start()
    said = [queue.get(timeout=30) for _ in range(5)]
    for process in processes:
        process.join()
    assert said.count("built") == 1
    assert set(said) == {"built", open_manifest(str(data)).fingerprint}
    assert not list((cache / "manifests").glob("*.part"))


def test_problems_are_kept_and_counted(tmp_path):
    members = [("a.png", png(0)), ("a.txt", b"x"), ("b.png", png(1)), ("c.png", png(1)), ("c.txt", b"")]
    manifest = open_manifest(str(write_tar(tmp_path / "s.tar", members)))
    assert len(manifest) == 1
    assert manifest.problem_counts == {"no caption": 1, "empty caption": 1}
    assert [problem.key for problem in manifest.problems()] == ["b", "c"]


def test_a_collection_without_a_usable_pair_is_refused(tmp_path, cache):
    path = write_tar(tmp_path / "s.tar", [("a.png", png(0))])
    with pytest.raises(SourceError, match=r"holds no usable pair \(1 × no caption\)"):
        open_manifest(str(path))
    assert not [path for path in (cache / "manifests").iterdir() if path.suffix != ".lock"]


def test_a_file_that_shrank_after_indexing_is_an_error_of_that_sample(tmp_path):
    data = write_shards(tmp_path / "data", 4, 1)
    manifest = open_manifest(str(data))
    os.truncate(data / "00000.tar", 3000)
    with pytest.raises(OSError, match="changed after it was indexed"):
        manifest.read(3)


def test_remote_shards_are_copied_once_and_again_when_they_change(tmp_path, cache, monkeypatch):
    data = write_shards(tmp_path / "data", 6, 2)
    remote = fsspec.filesystem("memory")
    for path in data.iterdir():
        remote.pipe(f"/bucket/{path.name}", path.read_bytes())
    fetched = []
    monkeypatch.setattr("shutil.copyfileobj", lambda a, b, n: (fetched.append(1), b.write(a.read())))
    manifest = open_manifest("memory://bucket/*.tar")
    assert [manifest.read(i).caption for i in range(6)] == [f"picture {i}" for i in range(6)]
    assert manifest.read(5).image == png(5)
    open_manifest("memory://bucket/*.tar").read(0)
    assert len(fetched) == 2
    assert open_manifest(str(data)).fingerprint == manifest.fingerprint
    assert len(open_manifest("memory://bucket/{00000..00001}.tar")) == 6
    fetched.clear()
    more = write_tar(tmp_path / "more.tar", pair_members(range(3, 9)))
    remote.pipe("/bucket/00001.tar", more.read_bytes())
    assert len(open_manifest("memory://bucket/*.tar")) == 9
    assert len(fetched) == 1
    with pytest.raises(RemoteError, match=r"memory://bucket/none.tar could not be reached"):
        open_manifest("memory://bucket/none.tar")


def test_rows_are_mapped_not_read(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 6, 2)))
    assert isinstance(manifest.rows, np.memmap)
    assert manifest.rows.dtype.itemsize == 32
