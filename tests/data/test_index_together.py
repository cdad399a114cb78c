"""Processes that index one collection: killed and resumed, or side by side, they write the same manifest."""

import os
import shutil
import signal
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from fastclip.checked_files import DamagedFile
from fastclip.data import index_files, index_together, manifest
from fastclip.data.index_together import Crew
from fastclip.data.manifest import INDEXES, open_manifest
from fastclip.data.pairs import SourceError
from tests.damage import flip
from tests.data.collections import png, write_shards, write_tar
from tests.processes import wait_for

FORK = get_context("fork")


def contents(folder):
    """All bytes of a manifest."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def files_read(log):
    """(process, file) for each time that a process began to read a file."""
    return [tuple(line.split()) for line in log.read_text().splitlines()] if log.exists() else []


def _index(data, cache, log, pause=0.0, stuck="", crew=None, ready=None, die_while_merging=False):
    """The body of a process; `pause` is the time that a file takes, `stuck` one that takes forever."""
    os.environ["FASTCLIP_CACHE"] = str(cache)
    read_pairs = index_files.read_pairs

    def read(file, columns):
        with log.open("a") as lines:
            lines.write(f"{os.getpid()} {Path(file.path).name}\n")
        time.sleep(60 if Path(file.path).name == stuck else pause)
        return read_pairs(file, columns)

    index_files.read_pairs = read
    if die_while_merging:
        manifest.take_fingerprint = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if ready:
        ready.wait(60)
    open_manifest(str(data), crew=crew)


@pytest.fixture
def start(tmp_path, cache):
    """Start a process that indexes; all are killed at the end."""
    started = []

    def start_one(data, **options):
        process = FORK.Process(target=_index, args=(data, cache, tmp_path / "log"), kwargs=options)
        process.start()
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.join()


def manifest_alone(data, tmp_path, monkeypatch):
    """What one process writes that nothing disturbs."""
    with monkeypatch.context() as patched:
        patched.setenv("FASTCLIP_CACHE", str(tmp_path / "alone"))
        return contents(open_manifest(str(data)).folder)


@pytest.mark.slow
def test_ten_kills_on_the_way_give_the_same_manifest_and_finished_files_are_not_read_again(
    tmp_path, cache, monkeypatch, start
):
    data, log, random = write_shards(tmp_path / "data", 120, 60), tmp_path / "log", np.random.default_rng(0)
    for _ in range(10):
        target = len(files_read(log)) + random.integers(1, 6)
        process = start(data, pause=0.005)
        assert wait_for(lambda target=target: len(files_read(log)) >= target)
        time.sleep(random.uniform(0, 0.01))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert not [path for path in (cache / "manifests").iterdir() if not path.suffix]
    process = start(data, die_while_merging=True)
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    times_read = Counter(name for _, name in files_read(log))
    assert len(times_read) == 60
    assert 60 <= times_read.total() <= 60 + 10  # a kill costs at most the file that it hit
    with monkeypatch.context() as patched:
        patched.setattr(index_files, "read_pairs", None)  # no file is read any more
        found = open_manifest(str(data))
    assert contents(found.folder) == manifest_alone(data, tmp_path, monkeypatch)
    assert {path.suffix for path in (cache / "manifests").iterdir()} == {".lock", ""}


@pytest.mark.slow
def test_two_processes_share_the_files(tmp_path, cache, monkeypatch, start):
    data = write_shards(tmp_path / "data", 60, 30)
    ready = FORK.Barrier(2)
    processes = [start(data, pause=0.03, crew=Crew(1, rank, 2), ready=ready) for rank in range(2)]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    read = files_read(tmp_path / "log")
    assert sorted(name for _, name in read) == sorted(path.name for path in data.iterdir())
    assert len({pid for pid, _ in read}) == 2
    assert contents(open_manifest(str(data)).folder) == manifest_alone(data, tmp_path, monkeypatch)
    assert {path.suffix for path in (cache / "manifests").iterdir()} == {".lock", ""}


@pytest.mark.slow
def test_the_file_of_a_process_that_died_is_indexed_by_one_that_waits(tmp_path, start):
    data = write_shards(tmp_path / "data", 8, 4)
    stuck = start(data, stuck="00002.tar")
    assert wait_for(lambda: len(files_read(tmp_path / "log")) == 3)
    other = start(data)
    assert wait_for(lambda: len(files_read(tmp_path / "log")) == 4)
    other.join(timeout=0.3)
    assert other.is_alive()  # it waits for the claimed file
    stuck.kill()
    other.join(timeout=60)
    assert other.exitcode == 0
    assert Counter(name for _, name in files_read(tmp_path / "log"))["00002.tar"] == 2


@pytest.mark.slow
def test_worker_processes_give_the_same_manifest(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "data", 60, 12)
    expected = manifest_alone(data, tmp_path, monkeypatch)
    monkeypatch.setattr(index_together, "SMALL", 0)
    monkeypatch.setattr(index_together, "write_index", None)  # this process indexes nothing
    counts = []
    found = open_manifest(str(data), crew=Crew(2), progress=lambda *both: counts.append(both))
    assert contents(found.folder) == expected
    total = sum(path.stat().st_size for path in data.iterdir())
    assert (total, total) in counts


@pytest.mark.slow
def test_an_error_in_a_worker_process_names_its_file_and_keeps_finished_ones(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "data", 12, 6)
    (data / "bad.csv").write_text("neither,nor\n1,2\n")
    paths = [*sorted(str(path) for path in data.glob("*.tar")), str(data / "bad.csv")]
    monkeypatch.setattr(index_together, "SMALL", 0)
    with pytest.raises(SourceError) as caught:
        open_manifest(paths, crew=Crew(2))
    assert caught.value.path == str(data / "bad.csv")
    assert "neither, nor" in caught.value.problem
    (data / "bad.csv").write_text("image,caption\n")
    monkeypatch.setattr(index_together, "SMALL", 1 << 26)
    tars, read_pairs = [], index_files.read_pairs

    def read(file, columns):
        tars.append(file.kind)
        return read_pairs(file, columns)

    monkeypatch.setattr(index_files, "read_pairs", read)
    assert len(open_manifest(paths)) == 12
    assert tars == ["table"]


def interrupted(data, monkeypatch):
    """Index all files, but do not finish the manifest; returns the folder of the indexes."""
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "take_fingerprint", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_manifest(data)
    folders = Path(os.environ["FASTCLIP_CACHE"], "manifests").glob(f"*{INDEXES}")
    return max(folders, key=lambda folder: folder.stat().st_mtime)


def test_a_damaged_index_is_reported_and_its_file_indexed_again(tmp_path, monkeypatch, caplog):
    data = write_shards(tmp_path / "data", 6, 3)
    expected = manifest_alone(data, tmp_path, monkeypatch)
    indexes = sorted(interrupted(str(data), monkeypatch).glob("*.index"))
    flip(indexes[1], 40)
    assert contents(open_manifest(str(data)).folder) == expected
    reports = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(reports) == 1
    assert indexes[1].name in reports[0]


def test_indexes_that_vanish_again_and_again_are_an_error(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "data", 6, 3)
    merge = manifest._Building._merge

    def merge_without(building, indexes):
        shutil.rmtree(building.indexes)
        return merge(building, indexes)

    monkeypatch.setattr(manifest._Building, "_merge", merge_without)
    with pytest.raises(DamagedFile) as caught:
        open_manifest(str(data))
    assert Path(caught.value.path).parent.suffix == INDEXES


def test_a_file_that_changed_after_an_interruption_is_indexed_again(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "data", 6, 3)
    interrupted(str(data), monkeypatch)
    write_tar(data / "00001.tar", [("z.png", png(1)), ("z.txt", b"new")])
    found = open_manifest(str(data))
    assert [found.read(i).caption for i in (1, 2, 3)] == ["picture 1", "new", "picture 4"]


def test_an_image_that_appeared_after_an_interruption_is_found(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png(0))
    (tmp_path / "t.csv").write_text("image,caption\na.png,one\nb.png,two\n")
    interrupted(str(tmp_path / "t.csv"), monkeypatch)
    (tmp_path / "b.png").write_bytes(png(1))
    assert len(open_manifest(str(tmp_path / "t.csv"))) == 2


def test_indexes_are_removed_when_their_manifest_is_complete_or_they_were_given_up(
    tmp_path, cache, monkeypatch
):
    given_up, recent = (write_shards(tmp_path / name, 2, 1) for name in ("given_up", "recent"))
    old = interrupted(str(given_up), monkeypatch)
    os.utime(old, (1, 1))
    new = interrupted(str(recent), monkeypatch)
    complete = open_manifest(str(write_shards(tmp_path / "complete", 2, 1))).folder
    left = complete.with_name(complete.name + INDEXES)
    assert [path.name for path in (cache / "manifests").glob(f"*{INDEXES}*")] == [new.name]
    left.mkdir()  # as if it had been killed before it removed them
    left.with_name(left.name + ".part").mkdir()
    (left.with_name(left.name + ".part") / "file").touch()
    open_manifest(str(tmp_path / "complete"))
    assert [path.name for path in (cache / "manifests").glob(f"*{INDEXES}*")] == [new.name]


def test_progress_counts_what_other_processes_have_finished(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "data", 6, 3)
    interrupted(str(data), monkeypatch)
    counts = []
    open_manifest(str(data), progress=lambda *both: counts.append(both))
    total = sum(path.stat().st_size for path in data.iterdir())
    assert counts[0] == (total, total)
