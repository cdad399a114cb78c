"""Images kept decoded. (That batches are the same with and without them is tested in test_loader.py.)"""

import os
import pickle

import numpy as np
import pytest

from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.images import UnusableSample
from fastclip.data.manifest import open_manifest
from tests.data.collections import picture, png, write_shards, write_tar

PIXELS = 1_000_000


def test_pixels_are_those_of_the_images_and_bad_ones_say_why(tmp_path):
    members = [("a.png", png(0)), ("a.txt", b"x"), ("b.png", png(1)[:100]), ("b.txt", b"x")]
    manifest = open_manifest(str(write_tar(tmp_path / "s.tar", members)))
    kept = DecodedCache.open(manifest, PIXELS)
    assert (kept.image(0) == np.asarray(picture(0))).all()
    with pytest.raises(UnusableSample, match="truncated PNG"):
        kept.image(1)
    assert len(pickle.dumps(kept)) < 300
    assert (pickle.loads(pickle.dumps(kept)).image(0) == kept.image(0)).all()


def test_a_changed_image_is_decoded_anew(tmp_path):
    (tmp_path / "t.csv").write_text("image,caption\na.png,x\n")
    for number in (1, 2):
        (tmp_path / "a.png").write_bytes(png(number))
        os.utime(tmp_path / "a.png", (number, number))
        kept = DecodedCache.open(open_manifest(str(tmp_path / "t.csv")), PIXELS)
        assert (kept.image(0) == np.asarray(picture(number))).all()


def test_a_second_opening_decodes_nothing(tmp_path, monkeypatch):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 6, 2)))
    DecodedCache.open(manifest, PIXELS)
    monkeypatch.setattr("fastclip.data.decoded_cache.upright_rgb", None)
    assert DecodedCache.open(manifest, PIXELS).image(5).shape == (30, 40, 3)


def test_a_collection_that_would_not_fit_is_refused(tmp_path, monkeypatch, cache):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 6, 2)))
    monkeypatch.setattr("fastclip.data.decoded_cache._free_memory", lambda: 100)
    with pytest.raises(MemoryError, match="Train without keeping them decoded"):
        DecodedCache.open(manifest, PIXELS)
    assert not [path for path in (cache / "decoded").iterdir() if path.suffix != ".lock"]


def test_many_images_are_decoded_on_several_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("fastclip.data.decoded_cache._CHUNK", 8)
    manifest = open_manifest(str(write_shards(tmp_path / "many", 40, 2)))
    done = []
    kept = DecodedCache.open(manifest, PIXELS, jobs=2, progress=lambda d, t: done.append((d, t)))
    assert done[-1] == (40, 40)
    assert all((kept.image(i) == np.asarray(picture(i))).all() for i in range(40))
