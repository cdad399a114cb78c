"""The manifest: ids that never change, reuse, several processes, damage."""

import multiprocessing
import os
import shutil

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastclip.data import manifest as module
from fastclip.data.cache import RemoteError
from fastclip.data.manifest import open_manifest
from fastclip.data.sources import SourceError
from tests.data.collections import picture, png, write_shards, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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


def _open_and_hash(path, cache, queue):
    os.environ["FASTCLIP_CACHE"] = cache
    queue.put(open_manifest(path).fingerprint)


def test_several_processes_may_start_at_once(tmp_path, cache):
    data = write_shards(tmp_path / "data", 40, 4)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=_open_and_hash, args=(str(data), str(cache), queue)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    fingerprints = {queue.get(timeout=30) for _ in processes}
    for process in processes:
        process.join()
    assert fingerprints == {open_manifest(str(data)).fingerprint}
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


def test_remote_shards_are_copied_once(tmp_path, cache):
    data = write_shards(tmp_path / "data", 6, 2)
    remote = fsspec.filesystem("memory")
    for path in data.iterdir():
        remote.pipe(f"/bucket/{path.name}", path.read_bytes())
    manifest = open_manifest("memory://bucket/*.tar")
    assert [manifest.read(i).caption for i in range(6)] == [f"picture {i}" for i in range(6)]
    assert manifest.read(5).image == png(5)
    assert len([p for p in (cache / "remote").iterdir() if p.suffix == ".tar"]) == 2
    assert open_manifest(str(data)).fingerprint == manifest.fingerprint
    assert len(open_manifest("memory://bucket/{00000..00001}.tar")) == 6
    with pytest.raises(RemoteError, match=r"memory://bucket/none.tar could not be reached"):
        open_manifest("memory://bucket/none.tar")


def test_rows_are_mapped_not_read(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 6, 2)))
    assert isinstance(manifest.rows, np.memmap)
    assert manifest.rows.dtype.itemsize == 32
