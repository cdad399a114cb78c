"""The manifest: stable ids, reuse, several processes, damaged files."""

import errno
import logging
import multiprocessing
import os
import pickle
import shutil

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastclip.checked_files import DamagedFile
from fastclip.data import manifest as manifest_module
from fastclip.data.images import UnusableSample
from fastclip.data.manifest import INDEXES, open_manifest
from fastclip.data.pairs import Columns, SourceError
from fastclip.data.readers import ChangedFile
from fastclip.data.remote import RemoteError
from fastclip.data.tables import NO_IMAGE
from fastclip.data.tar_headers import Contents, read_tar
from fastclip.errors import PathError
from tests.damage import flip, positions
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


def test_a_reader_for_another_thread_shares_the_rows_and_opens_its_own_shards(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 60, 3)))
    reader = manifest.reader()
    assert reader.read(7) == manifest.read(7)
    assert reader._rows is manifest._rows  # opening 300 million rows for each of 4,096 images takes long
    assert not set(reader._tars.files.values()) & set(manifest._tars.files.values())


def test_parquet_with_bytes_under_unusual_names(tmp_path):
    pq.write_table(pa.table({"bild": [png(0), png(1)], "wort": ["a", "b"]}), tmp_path / "t.parquet")
    manifest = open_manifest(str(tmp_path / "t.parquet"), Columns("bild", "wort"))
    assert manifest.read(1) == (png(1), "b")


def test_another_encoding_is_another_index_under_any_of_its_names(tmp_path):
    (tmp_path / "0.png").write_bytes(png(0))
    table = str(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_bytes("image,caption\n0.png,un café à Paris\n".encode("latin-1"))
    manifest = open_manifest(table, Columns(encoding="latin-1"))
    assert manifest.read(0).caption == "un café à Paris"
    assert open_manifest(table, Columns(encoding="ISO-8859-1")).folder == manifest.folder
    assert open_manifest(table, Columns(encoding="cp437")).read(0).caption != manifest.read(0).caption
    with pytest.raises(SourceError) as caught:
        open_manifest(table)
    assert caught.value.path == table


def test_a_caption_in_a_tar_that_is_not_utf_8_is_unusable_or_read_in_its_encoding(tmp_path):
    members = [
        ("0.png", png(0)),
        ("0.txt", "un café".encode("latin-1")),
        ("1.png", png(1)),
        ("1.txt", b"plain"),
    ]
    path = str(write_tar(tmp_path / "s.tar", members))
    with pytest.raises(UnusableSample) as caught:
        open_manifest(path).read(0)
    assert str(caught.value) == "caption is not UTF-8"
    assert open_manifest(path).read(1).caption == "plain"
    assert open_manifest(path, Columns(encoding="latin-1")).read(0).caption == "un café"


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
    assert {path.suffix for path in (cache / "manifests").iterdir()} == {".lock", INDEXES}
    assert len(open_manifest(str(data))) == 10
    assert {path.suffix for path in (cache / "manifests").iterdir()} == {".lock", ""}


def _open(path, cache, queue):
    os.environ["FASTCLIP_CACHE"] = cache
    queue.put(open_manifest(path).fingerprint)


@pytest.mark.slow
def test_several_processes_build_one_manifest(tmp_path, cache):
    data = write_shards(tmp_path / "data", 40, 4)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_open, args=(str(data), str(cache), queue)) for _ in range(4)]
    for process in processes:
        process.start()
    fingerprints = {queue.get(timeout=30) for _ in processes}
    for process in processes:
        process.join()
    times = [path.stat().st_mtime_ns for path in cached_files(cache)]
    assert fingerprints == {open_manifest(str(data)).fingerprint}
    assert [path.stat().st_mtime_ns for path in cached_files(cache)] == times  # it was not built again
    assert {path.suffix for path in (cache / "manifests").iterdir()} == {".lock", ""}


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
    assert isinstance(manifest._rows.data, np.memmap)
    assert manifest._rows.size == 6 * 32


# A damaged cache


def every_kind_of_pair(tmp_path):
    """A collection with rows and strings of all kinds, and a problem."""
    shards = write_shards(tmp_path / "shards", 4, 1)
    (tmp_path / "a.png").write_bytes(png(7))
    (tmp_path / "t.csv").write_text("filepath,title\na.png,seven\nnone.png,eight\n")
    return [str(shards), str(tmp_path / "t.csv")]


def contents(manifest):
    pairs = [manifest.read(i) for i in range(len(manifest))]
    return pairs, manifest.fingerprint, manifest.fingerprint_1, list(manifest.problems()), manifest.files


def cached_files(cache):
    (folder,) = [path for path in (cache / "manifests").iterdir() if path.is_dir()]
    return sorted(folder.iterdir())


@pytest.mark.slow
def test_a_damaged_manifest_is_built_again_and_reported(tmp_path, cache, caplog):
    paths = every_kind_of_pair(tmp_path)
    expected = contents(open_manifest(paths))
    names = [path.name for path in cached_files(cache)]
    assert len(names) == 2 * 5
    for number, name in enumerate(names):
        for position in positions(cached_files(cache)[number], most=4):
            caplog.clear()
            flip(cached_files(cache)[number], position)
            assert contents(open_manifest(paths)) == expected
            reports = [record for record in caplog.records if record.name == "fastclip.checked_files"]
            assert len(reports) == 1
            assert name.removesuffix(".xxh3") in reports[0].getMessage()
    for number in range(len(names)):
        cached_files(cache)[number].unlink()
        assert contents(open_manifest(paths)) == expected
        os.truncate(cached_files(cache)[number], cached_files(cache)[number].stat().st_size // 2)
        assert contents(open_manifest(paths)) == expected


@pytest.mark.parametrize("name", ["rows.bin", "strings.bin"])
def test_damage_in_a_large_manifest_is_noticed_in_use_and_mended_by_the_next_run(
    tmp_path, cache, monkeypatch, name
):
    monkeypatch.setattr("fastclip.data.manifest.SMALL", 0)  # as if both files were large
    paths = every_kind_of_pair(tmp_path)
    expected = contents(open_manifest(paths))
    manifest = open_manifest(paths)
    other = open_manifest(paths)
    flip(manifest.folder / name, 5)
    for opened in (manifest, other):  # both notice; the second must not set aside what was built since then
        with pytest.raises(DamagedFile) as caught:
            opened.read(4)
        assert caught.value.path == str(manifest.folder / name)
        assert contents(open_manifest(paths)) == expected
    assert [path.name for path in (cache / "manifests").iterdir() if path.is_dir()] == [manifest.folder.name]


def _open_damaged(path, cache, queue):
    os.environ["FASTCLIP_CACHE"] = cache
    reports = []
    logging.getLogger("fastclip.checked_files").addFilter(lambda record: reports.append(record))
    queue.put((open_manifest(path).fingerprint, len(reports)))


def test_one_of_several_processes_reports_a_damaged_manifest_and_all_mend_it(tmp_path, cache):
    data = write_shards(tmp_path / "data", 20, 2)
    fingerprint = open_manifest(str(data)).fingerprint
    flip(next((cache / "manifests").glob("*/rows.bin")), 100)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_open_damaged, args=(str(data), str(cache), queue)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(found) == [(fingerprint, 0), (fingerprint, 0), (fingerprint, 1)]
    assert {path.suffix for path in (cache / "manifests").iterdir()} == {".lock", ""}


def test_a_cache_that_cannot_be_written_is_an_error_with_advice(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "data", 4, 1)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PathError) as caught:
        open_manifest(str(data))
    assert caught.value.path == str(tmp_path / "file" / "cache" / "manifests")
    assert "$FASTCLIP_CACHE" in caught.value.problem


def test_captions_beyond_the_first_are_counted_in_tables_folders_and_tars(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(png(0))
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "b.txt").write_text("only one\n")
    assert open_manifest(str(tmp_path)).extra_captions == (1, 2)
    members = [("a.png", png(0)), ("a.txt", b"one\ntwo\n"), ("b.png", png(0)), ("b.txt", b"one\n")]
    assert open_manifest(str(write_tar(tmp_path / "s.tar", members))).extra_captions == (1, 1)


# Tars that earlier versions read in part


def test_an_index_of_a_version_that_read_less_is_not_used(tmp_path, monkeypatch):
    halves = [write_tar(tmp_path / f"{i}.tar", pair_members(range(2 * i, 2 * i + 2))) for i in range(2)]
    whole = tmp_path / "both" / "whole.tar"
    whole.parent.mkdir()
    whole.write_bytes(halves[0].read_bytes() + halves[1].read_bytes())

    def first_tar_alone(stream):
        members, damages = read_tar(stream)
        return Contents(members[:6], damages)

    with monkeypatch.context() as earlier:
        earlier.setattr(manifest_module, "VERSION", 2)
        earlier.setattr("fastclip.data.sources.read_tar", first_tar_alone)
        assert len(open_manifest(str(whole))) == 2
    manifest = open_manifest(str(whole))
    assert [manifest.read(i).caption for i in range(4)] == [f"picture {i}" for i in range(4)]


def test_what_indexing_skipped_is_logged_with_file_place_and_reason(tmp_path, caplog):
    lines = ["image,caption", *(f"{i}.png,x" for i in range(8)), "folder,x", "a.png,good"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.png").write_bytes(png(0))
    (tmp_path / "t.csv").write_text("\n".join(lines))
    manifest = open_manifest(str(tmp_path / "t.csv"))
    assert manifest.problem_counts == {"image file not found": 8, "a folder, not a file": 1}
    logged = [str(record.args[0]) for record in caplog.records if len(record.args) == 1]
    assert logged == [f"{tmp_path}/t.csv, line {i + 2}, {i}.png: image file not found" for i in range(5)]


def test_a_fifo_that_becomes_an_image_is_found(tmp_path):
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "a.png").write_bytes(png(0))
    (tmp_path / "t.csv").write_text("image,caption\na.png,one\nb.png,two\n")
    assert len(open_manifest(str(tmp_path / "t.csv"))) == 1
    (tmp_path / "b.png").unlink()
    (tmp_path / "b.png").write_bytes(png(1))
    assert len(open_manifest(str(tmp_path / "t.csv"))) == 2


@pytest.mark.timeout(60)
def test_an_image_or_a_shard_that_becomes_a_fifo_is_an_error_of_the_sample(tmp_path):
    (tmp_path / "a.png").write_bytes(png(0))
    (tmp_path / "t.csv").write_text("image,caption\na.png,one\n")
    shard = write_tar(tmp_path / "s.tar", pair_members(range(1)))
    manifest = open_manifest([str(tmp_path / "t.csv"), str(shard)]).reader()
    for path in (tmp_path / "a.png", shard):
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(UnusableSample):
        manifest.read(0)
    with pytest.raises(ChangedFile):
        manifest.read(1)
