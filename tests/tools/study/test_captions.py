"""Equal captions in a batch are counted as a plain loop over the run's batches counts them."""

from collections import Counter
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.config.options import BatchConfig, DataConfig, TrainConfig
from fastclip.data.manifest import open_manifest
from fastclip.data.order import Order
from fastclip.tools.study import captions as captions_module
from fastclip.tools.study.captions import caption_codes, count_equal, equal_captions, expected_share
from tests.data.collections import png, write_tar

N, BATCH, SEED = 60, 8, 3


@pytest.fixture
def collection(tmp_path):
    pairs = {}
    for i in range(N):
        pairs[f"{i:03d}.png"] = png(0)
        pairs[f"{i:03d}.txt"] = f" caption {min(i, 40)} ".encode()  # the last 20 have one caption
    write_tar(tmp_path / "pairs.tar", pairs.items())
    return tmp_path / "pairs.tar"


def config(collection, **more):
    data = DataConfig(train=str(collection))
    return TrainConfig(epochs=2.5, seed=SEED, data=data, batch=BatchConfig(size=BATCH), **more)


def counted_plainly(rows):
    return sum(count for row in rows for count in Counter(row).values() if count > 1)


def test_the_runs_own_batches_are_counted(collection):
    order = Order(N, BATCH, SEED, "full")
    steps = int(2.5 * N) // BATCH
    rows = [[min(i, 40) for i in order.global_batch(step).ids.tolist()] for step in range(steps)]
    found = equal_captions(config(collection))
    assert found.actual == pytest.approx(counted_plainly(rows) / (steps * BATCH))
    assert (found.captions, found.samples, found.repeated) == (41, N, pytest.approx(20 / N))


@pytest.mark.parametrize("at_once", [1, 3 * BATCH, 5 * BATCH + 1])
def test_the_count_does_not_depend_on_how_much_is_looked_at_together(collection, monkeypatch, at_once):
    whole = equal_captions(config(collection))
    monkeypatch.setattr(captions_module, "_AT_ONCE", at_once)
    assert equal_captions(config(collection)) == whole


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=6))
def test_counting_is_that_of_a_plain_loop(rows):
    assert count_equal(np.array(rows)) == counted_plainly(rows)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=6), st.integers(2, 6))
def test_the_expected_share_is_that_of_counted_draws(sizes, batch):
    n = sum(sizes)
    if batch > n:
        return
    none = sum(size * comb(n - size, batch - 1) for size in sizes) / (n * comb(n - 1, batch - 1))
    assert expected_share(np.array(sizes), batch) == pytest.approx(1 - none, abs=1e-9)


def test_captions_are_compared_as_training_reads_them(tmp_path):
    texts = [b"a cat", b" a cat\n", b"a Cat", b"", b" "]
    members = [
        (f"{i}.{kind}", content)
        for i, text in enumerate(texts)
        for kind, content in (("png", png(0)), ("txt", text))
    ]
    write_tar(tmp_path / "pairs.tar", members)
    manifest = open_manifest(str(tmp_path / "pairs.tar"))
    codes = caption_codes(manifest).tolist()
    assert codes[0] == codes[1]
    assert len(set(codes)) == len(codes) - 1


def test_a_collection_too_large_to_count_gives_nothing(collection, monkeypatch):
    monkeypatch.setattr(captions_module, "MOST_PAIRS", N - 1)
    assert equal_captions(config(collection)) is None
