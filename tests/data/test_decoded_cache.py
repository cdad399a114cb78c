"""The cache of decoded images. (test_loader.py tests that batches are the same with and without it.)"""

import logging
import os
import pickle

import numpy as np
import pytest

from fastclip.data.decoded_cache import CacheTooLarge, DecodedCache
from fastclip.data.images import UnusableSample
from fastclip.data.manifest import open_manifest
from tests.damage import flip, positions
from tests.data.collections import encode, picture, png, write_shards, write_tar

PIXELS = 1_000_000


def test_cache_has_the_pixels_of_images_and_the_reasons_of_unusable_ones(tmp_path):
    members = [("a.png", png(0)), ("a.txt", b"x"), ("b.png", png(1)[:100]), ("b.txt", b"x")]
    manifest = open_manifest(str(write_tar(tmp_path / "s.tar", members)))
    decoded = DecodedCache.open(manifest, PIXELS)
    assert (decoded.image(0) == np.asarray(picture(0))).all()
    with pytest.raises(UnusableSample) as caught:
        decoded.image(1)
    assert str(caught.value) == "truncated PNG"
    assert len(pickle.dumps(decoded)) < 600
    assert (pickle.loads(pickle.dumps(decoded)).image(0) == decoded.image(0)).all()


def test_images_of_further_formats_are_decoded_if_they_are_asked_for(tmp_path):
    avif = encode(picture(0), "AVIF")
    manifest = open_manifest(str(write_tar(tmp_path / "s.tar", [("a.png", avif), ("a.txt", b"x")])))
    with pytest.raises(UnusableSample) as caught:
        DecodedCache.open(manifest, PIXELS).image(0)
    assert "--data.formats avif" in str(caught.value)
    decoded = pickle.loads(pickle.dumps(DecodedCache.open(manifest, PIXELS, ("avif",))))
    assert decoded.image(0).shape == (30, 40, 3)


def test_changed_image_is_decoded_again(tmp_path):
    (tmp_path / "t.csv").write_text("image,caption\na.png,x\n")
    for number in (1, 2):
        (tmp_path / "a.png").write_bytes(png(number))
        os.utime(tmp_path / "a.png", (number, number))
        decoded = DecodedCache.open(open_manifest(str(tmp_path / "t.csv")), PIXELS)
        assert (decoded.image(0) == np.asarray(picture(number))).all()


def test_second_opening_decodes_nothing(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 6, 2)))
    done = []
    for _ in range(2):
        decoded = DecodedCache.open(manifest, PIXELS, chunk=2, progress=lambda *counts: done.append(counts))
    assert done == [(2, 6), (4, 6), (6, 6)]  # of the first
    assert decoded.image(5).shape == (30, 40, 3)


def test_collection_that_would_not_fit_is_rejected(tmp_path, cache):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 6, 2)))
    with pytest.raises(CacheTooLarge) as caught:
        DecodedCache.open(manifest, PIXELS, memory=lambda: 100)
    assert (caught.value.needed, caught.value.free) == (6 * 30 * 40 * 3, 100)
    assert "--data.keep_decoded false" in str(caught.value)
    assert not [path for path in (cache / "decoded").iterdir() if path.suffix != ".lock"]


@pytest.mark.slow
def test_many_images_are_decoded_in_several_processes(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "many", 40, 2)))
    done = []
    decoded = DecodedCache.open(
        manifest, PIXELS, jobs=2, chunk=8, progress=lambda *counts: done.append(counts)
    )
    assert done[-1] == (40, 40)
    assert all((decoded.image(i) == np.asarray(picture(i))).all() for i in range(40))


# A damaged cache


def collection(tmp_path):
    members = [("a.png", png(0)), ("a.txt", b"x"), ("b.png", png(1)[:100]), ("b.txt", b"x")]
    return open_manifest(str(write_tar(tmp_path / "s.tar", [*members, ("c.png", png(2)), ("c.txt", b"x")])))


def images(decoded):
    found = []
    for sample in range(3):
        try:
            found.append(decoded.image(sample).tobytes())
        except UnusableSample as error:
            found.append(str(error))
    return found


def cached_files(cache):
    (folder,) = [path for path in (cache / "decoded").iterdir() if path.is_dir()]
    return sorted(folder.iterdir())


@pytest.mark.slow
def test_damaged_images_are_decoded_again_and_reported(tmp_path, cache, caplog):
    manifest = collection(tmp_path)
    expected = images(DecodedCache.open(manifest, PIXELS))
    assert expected == [picture(0).tobytes(), "truncated PNG", picture(2).tobytes()]
    names = [path.name for path in cached_files(cache)]
    assert len(names) == 2 * 3
    for number, name in enumerate(names):
        for position in positions(cached_files(cache)[number], most=6):
            caplog.clear()
            flip(cached_files(cache)[number], position)
            assert images(DecodedCache.open(manifest, PIXELS)) == expected
            (report,) = caplog.records
            assert name.removesuffix(".xxh3") in report.getMessage()
        os.truncate(cached_files(cache)[number], 0)
        assert images(DecodedCache.open(manifest, PIXELS)) == expected


@pytest.mark.parametrize("name", ["pixels.bin", "places.bin"])
def test_damage_noticed_in_use_costs_decoding_and_the_next_run_rebuilds_the_cache(
    tmp_path, cache, monkeypatch, caplog, name
):
    monkeypatch.setattr("fastclip.data.decoded_cache.SMALL", 0)  # as if both files were large
    manifest = collection(tmp_path)
    expected = images(DecodedCache.open(manifest, PIXELS))
    decoded = pickle.loads(pickle.dumps(DecodedCache.open(manifest, PIXELS)))
    flip(decoded.folder / name, 7)
    assert images(decoded) == images(decoded) == expected
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    (report,) = warnings
    assert str(decoded.folder / name) in report.getMessage()
    done = []
    again = DecodedCache.open(manifest, PIXELS, chunk=1, progress=lambda *counts: done.append(counts))
    assert images(again) == expected
    assert done[-1] == (3, 3)
    assert [path.name for path in (cache / "decoded").iterdir() if path.is_dir()] == [decoded.folder.name]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
