"""Unusable pairs are logged once, counted over ranks and resumes, and limited."""

import logging

import pytest

from fastclip.data.bad_samples import BadSample, BadSampleLog, TooManyBadSamples
from fastclip.data.manifest import open_manifest
from tests.data.collections import png, write_shards, write_tar


@pytest.fixture
def manifest(tmp_path):
    return open_manifest(str(write_shards(tmp_path / "data", 30, 3)))


def sample(manifest, number, reason="truncated PNG"):
    return BadSample(number, manifest.where(number), reason)


def test_a_sample_is_logged_and_counted_once(manifest, caplog):
    bad = BadSampleLog(manifest, 0.5)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            bad.add([sample(manifest, 3), sample(manifest, 12)])
    assert [record.args[0] for record in caplog.records] == [3, 12]
    assert [one.id for one in bad.take_new()] == [3, 12]
    assert bad.take_new() == []
    assert bad.summary().startswith("2 pairs ")


def test_samples_of_a_resumed_run_are_counted_and_not_logged_again(manifest, caplog):
    bad = BadSampleLog(manifest, 0.5)
    bad.restore([list(sample(manifest, 3))])  # as JSON has them
    bad.add([sample(manifest, 3)])
    assert bad.samples == {3: sample(manifest, 3)}
    assert bad.take_new() == []
    assert not caplog.records


def test_too_many_raise_with_reasons_and_files(manifest):
    bad = BadSampleLog(manifest, 0.05)
    with pytest.raises(TooManyBadSamples) as caught:
        bad.add([sample(manifest, 3), sample(manifest, 12)])
    assert caught.value.reasons == {"truncated PNG": 2}
    assert caught.value.files == {manifest.files[0]: 1, manifest.files[1]: 1}
    for number in (3, 12):
        place = f"{manifest.where(number)}, byte {manifest.place(number).image:,}"
        assert f"{place}: truncated PNG" in str(caught.value)


def test_pairs_that_indexing_skipped_count(tmp_path):
    members = [("a.png", png(0)), ("a.txt", b"x"), ("b.png", png(1))]
    lossy = open_manifest(str(write_tar(tmp_path / "lossy.tar", members)))
    with pytest.raises(TooManyBadSamples) as caught:
        BadSampleLog(lossy, 0.1)
    assert (caught.value.reasons, caught.value.files) == ({"no caption": 1}, {lossy.files[0]: 1})
    offset = (tmp_path / "lossy.tar").read_bytes().index(b"b.png")
    assert f"{lossy.files[0]}, byte {offset:,}, b: no caption" in str(caught.value)
    assert BadSampleLog(lossy, 0.6).summary().startswith("1 pairs ")


def test_the_summary_does_without_a_cache_that_was_deleted(tmp_path):
    path = tmp_path / "pairs.tar"
    write_tar(path, [("a.png", png(1)), ("a.txt", b"a"), ("b.png", png(2))])
    manifest = open_manifest(str(path))
    bad = BadSampleLog(manifest, 0.9)
    expected = bad.summary().partition(" The worst files")[0]
    manifest.folder.rename(tmp_path / "gone")
    assert bad.summary().startswith(expected)
