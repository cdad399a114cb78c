"""Copies of remote files: fetched once, and again when they are damaged. (test_manifest.py has more.)"""

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastclip.checked_files import CHUNK, digests_of
from fastclip.data import remote as remote_module
from fastclip.data.manifest import open_manifest
from fastclip.data.remote import RemoteError, local_copy
from tests.damage import flip, positions
from tests.data.collections import pair_members, png, write_tar

REMOTE = "memory://copies/file"


@pytest.fixture(autouse=True)
def _another_process(monkeypatch):
    """Forget which copies this process has checked."""
    monkeypatch.setattr(remote_module, "_checked", set())


def put(data, path=REMOTE):
    fsspec.filesystem("memory").pipe(path.removeprefix("memory:/"), data)


def reports(caplog):
    return [record for record in caplog.records if record.name == "fastclip.data.remote"]


def test_a_damaged_copy_is_fetched_again_and_reported(caplog):
    data = png(0)
    put(data)
    copy = local_copy(REMOTE)
    for path in (copy, digests_of(copy)):
        for position in positions(path, most=6):
            caplog.clear()
            remote_module._checked.clear()
            flip(path, position)
            assert local_copy(REMOTE).read_bytes() == data
            (report,) = reports(caplog)
            assert str(copy) in report.getMessage()
    assert not list(copy.parent.glob("*.part"))


def test_a_copy_of_an_earlier_version_is_kept_and_gets_digests(caplog):
    put(b"content")
    copy = local_copy(REMOTE)
    digests_of(copy).unlink()
    fsspec.filesystem("memory").rm("/copies/file")  # it must not be fetched
    remote_module._checked.clear()
    assert local_copy(REMOTE).read_bytes() == b"content"
    assert digests_of(copy).exists()
    assert not reports(caplog)


def test_a_copy_that_cannot_be_fetched_leaves_nothing_behind(cache, monkeypatch):
    put(b"content")

    def fail(*_):
        raise ConnectionError("reset")

    monkeypatch.setattr("fastclip.checked_files.sync", fail)
    with pytest.raises(RemoteError) as caught:
        local_copy(REMOTE)
    assert caught.value.path == REMOTE
    assert [path.suffix for path in (cache / "remote").iterdir()] == [".lock"]


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_damage_in_a_large_copy_is_noticed_in_use_and_mended(tmp_path, cache, monkeypatch, caplog, kind):
    monkeypatch.setattr(remote_module, "SMALL", 0)  # as if it were large
    monkeypatch.setattr("fastclip.data.manifest.SMALL", 0)
    path = tmp_path / f"s.{kind}"
    if kind == "tar":
        write_tar(path, pair_members(range(40)))
    else:
        columns = {"image": [png(i) for i in range(40)], "text": [f"picture {i}" for i in range(40)]}
        pq.write_table(pa.table(columns), path, row_group_size=8)
    assert path.stat().st_size > 2 * CHUNK
    put(path.read_bytes(), f"memory://copies/s.{kind}")
    expected = open_manifest(f"memory://copies/s.{kind}")
    pairs = [expected.read(i) for i in range(40)]
    (copy,) = (cache / "remote").glob(f"*.{kind}")
    for position in positions(copy, most=8):
        caplog.clear()
        flip(copy, position)
        manifest = open_manifest(f"memory://copies/s.{kind}")
        assert [manifest.read(i) for i in range(40)] == pairs
        assert len(reports(caplog)) <= 1  # none if nothing reads the damaged part
        if position and position < copy.stat().st_size // 2:
            assert reports(caplog)
        copy.write_bytes(path.read_bytes())


def test_indexing_reads_no_damaged_copy(tmp_path, cache, monkeypatch, caplog):
    monkeypatch.setattr(remote_module, "SMALL", 0)
    path = write_tar(tmp_path / "s.tar", pair_members(range(4)))
    put(path.read_bytes(), "memory://copies/s.tar")
    fingerprint = open_manifest("memory://copies/s.tar").fingerprint
    (copy,) = (cache / "remote").glob("*.tar")
    flip(copy, 600)
    for path in (cache / "manifests").glob("*/manifest.json"):
        path.unlink()
    assert open_manifest("memory://copies/s.tar").fingerprint == fingerprint
    assert len(reports(caplog)) == 1
