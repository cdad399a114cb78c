"""Readers: a shard is opened once, a pair is read at once, and the process's limit on open files holds."""

import os
import resource
import subprocess
import sys

import pytest

from fastclip.data import readers
from fastclip.data.images import UnusableSample
from fastclip.data.manifest import open_manifest
from fastclip.data.order import Order
from fastclip.data.pairs import Columns
from fastclip.data.readers import ChangedFile, OpenFiles, ParquetImages, Span
from tests.data.collections import png, write_shards, write_tar

NO_COLUMNS = Columns(None, None, "utf-8")


@pytest.fixture
def calls(monkeypatch):
    """The opens and reads of the readers."""
    counted = {"open": 0, "pread": 0}
    for name in counted:
        original = getattr(os, name)

        def call(*args, original=original, name=name, **options):
            counted[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(readers.os, name, call)
    return counted


def epoch(manifest):
    """All pairs in the order of a full shuffle."""
    samples = Order(len(manifest), len(manifest), shuffle="full").global_batch(0).ids.tolist()
    return [manifest.pair_at(manifest.place(sample)) for sample in samples]


def test_a_shuffled_epoch_opens_each_shard_once_and_reads_each_pair_once(tmp_path, calls):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 300, 100)))
    calls |= {"open": 0, "pread": 0}
    assert len(epoch(manifest)) == 300
    assert calls == {"open": 100, "pread": 300}


def test_files_beyond_the_limit_are_closed_oldest_first(tmp_path):
    paths = [str(tmp_path / str(i)) for i in range(5)]
    for path in paths:
        (tmp_path / path).write_bytes(b"abc")
    files = OpenFiles(dict.fromkeys(paths, ""), limit=3)
    for path in [*paths[:3], paths[0], paths[3]]:
        files.read(path, 3, 0)
    assert list(files.files) == [paths[2], paths[0], paths[3]]
    opened = list(files.files.values())
    del files
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("gap", [0, 512, readers._NEIGHBOURS])
def test_neighbours_are_read_at_once_in_either_order(tmp_path, calls, gap):
    (tmp_path / "file").write_bytes(b"image" + bytes(gap) + b"text" + b"rest")
    files, path = OpenFiles({str(tmp_path / "file"): ""}), str(tmp_path / "file")
    image, text = Span(0, 5), Span(5 + gap, 4)
    assert files.read_neighbours(path, image, text) == (b"image", b"text")
    assert files.read_neighbours(path, text, image) == (b"text", b"image")
    assert calls == {"open": 1, "pread": 2}


def test_parts_that_are_far_apart_or_missing_are_not_read_at_once(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3 * readers._NEIGHBOURS))
    files, path = OpenFiles({str(tmp_path / "file"): ""}), str(tmp_path / "file")
    assert files.read_neighbours(path, Span(0, 5), Span(2 * readers._NEIGHBOURS, 5)) is None
    assert files.read_neighbours(path, Span(3 * readers._NEIGHBOURS - 5, 5), Span(0, 10**6)) is None


def far_apart(between):
    return [("a.png", png(0)), ("a.json", bytes(between)), ("a.txt", b"far away"), ("b.png", png(1))]


@pytest.mark.parametrize("between", [100, 10_000])
def test_a_pair_is_the_same_however_far_its_members_are_apart(tmp_path, between):
    members = [*far_apart(between), ("b.txt", b" \n")]
    manifest = open_manifest(str(write_tar(tmp_path / "pairs.tar", members)))
    assert manifest.pair_at(manifest.place(0)) == (png(0), "far away")
    with pytest.raises(UnusableSample, match="empty caption"):
        manifest.pair_at(manifest.place(1))


def test_a_pair_cut_off_by_a_shorter_file_fails_as_its_caption_does(tmp_path):
    manifest = open_manifest(str(write_tar(tmp_path / "pairs.tar", [("a.png", png(0)), ("a.txt", b"words")])))
    os.truncate(manifest.files[0], 1000)
    place = manifest.place(0)
    with pytest.raises(ChangedFile) as expected:
        manifest.caption_at(place)
    with pytest.raises(ChangedFile) as caught:
        manifest.pair_at(place)
    assert (str(caught.value), caught.value.path) == (str(expected.value), manifest.files[0])


def test_parquet_files_beyond_the_limit_are_closed(tmp_path, monkeypatch):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(readers, "most_descriptors", lambda: 8)  # two files of four descriptors
    paths = [str(tmp_path / f"{i}.parquet") for i in range(4)]
    for i, path in enumerate(paths):
        pq.write_table(pa.table({"image": [png(i)], "caption": ["a"]}), path)
    images = ParquetImages(NO_COLUMNS, dict.fromkeys(paths, ""))
    assert [images.read(path, 0) for path in [*paths, *paths]] == [png(i) for i in range(4)] * 2
    assert list(images.tables) == paths[2:]


PROGRAM = """
import resource, sys
from fastclip.data.readers import most_descriptors
from fastclip.files import open_files_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(open_files_limit(), most_descriptors(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.slow
def test_the_limit_on_open_files_is_raised_and_two_collections_fit_into_it():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    command = [sys.executable, "-c", PROGRAM, str(most // 4), str(most)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    limit, descriptors, soft, _ = map(int, out.split())
    assert limit == soft == most
    assert 2 * descriptors < limit
