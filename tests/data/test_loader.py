"""The loader: the same tensors whatever the workers, ranks and interruptions; no silent loss."""

import logging
import multiprocessing
import os

import pytest
import torch

from fastclip.data.decode import Augment, decoder
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.loader import PairLoader, TooManyBadSamples
from fastclip.data.manifest import open_manifest
from fastclip.data.order import Order
from tests.data.collections import pair_members, png, write_shards, write_tar

AUGMENT = Augment(image_size=16, scale=(0.4, 1.0))


def tokenizer(captions):
    """Bytes as tokens."""
    rows = [list(caption.encode()[:20]) for caption in captions]
    return torch.tensor([row + [0] * (20 - len(row)) for row in rows])


def batches(manifest, *, batch=8, seed=0, shuffle="full", name="exact", **options):
    order = Order(len(manifest), batch, seed, shuffle, manifest.block_ends())
    options = {"stop_step": 6, "workers": 0} | options
    return list(PairLoader(manifest, order, decoder(name, AUGMENT), tokenizer, **options))


def same(a, b):
    return all(
        x.step == y.step
        and torch.equal(x.images, y.images)
        and torch.equal(x.tokens, y.tokens)
        and torch.equal(x.index, y.index)
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture
def manifest(tmp_path):
    return open_manifest(str(write_shards(tmp_path / "data", 30, 3)))


@pytest.mark.parametrize("shuffle", ["full", "blocks"])
@pytest.mark.parametrize("name", ["exact", "fast"])
def test_workers_and_ranks_change_nothing(manifest, shuffle, name):
    alone = batches(manifest, shuffle=shuffle, name=name)
    assert same(alone, batches(manifest, shuffle=shuffle, name=name, workers=2))
    for K, workers in ((2, 1), (4, 0)):
        parts = [
            batches(manifest, shuffle=shuffle, name=name, rank=r, world_size=K, workers=workers)
            for r in range(K)
        ]
        for step, whole in enumerate(alone):
            assert torch.equal(torch.cat([part[step].images for part in parts]), whole.images)
            assert torch.equal(torch.cat([part[step].tokens for part in parts]), whole.tokens)
            assert torch.equal(torch.cat([part[step].index for part in parts]), whole.index)


@pytest.mark.parametrize("killed_at", [0, 3, 4])
def test_going_on_at_the_next_step_gives_the_same_tensors(manifest, killed_at):
    """With another number of workers and ranks than before."""
    whole = batches(manifest, workers=2)
    rest = [
        batches(manifest, start_step=killed_at + 1, rank=rank, world_size=2, workers=1 - rank)
        for rank in (0, 1)
    ]
    for offset, expected in enumerate(whole[killed_at + 1 :]):
        assert torch.equal(torch.cat([part[offset].images for part in rest]), expected.images)
        assert torch.equal(torch.cat([part[offset].index for part in rest]), expected.index)


def test_pairs_belong_together_and_each_epoch_augments_anew(manifest):
    seen = {}
    for batch in batches(manifest, stop_step=8):
        for image, tokens, index in zip(batch.images, batch.tokens, batch.index.tolist(), strict=True):
            assert bytes(tokens.tolist()).rstrip(b"\0").decode() == f"picture {index}"
            seen.setdefault(index, []).append(image)
    assert set(seen) == set(range(30))
    twice = [images for images in seen.values() if len(images) > 1]
    assert twice
    assert not any(torch.equal(images[0], images[1]) for images in twice)


def test_the_processs_own_randomness_is_left_alone(manifest):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    batches(manifest)
    assert torch.equal(torch.rand(4), expected)


def test_kept_images_give_the_same_batches(manifest):
    for name in ("exact", "fast"):
        kept = DecodedCache.open(manifest, AUGMENT.max_pixels)
        assert same(batches(manifest, name=name), batches(manifest, name=name, kept=kept, workers=2))


def damaged(tmp_path, bad=(5, 6, 20), n=30):
    members = []
    for name, data in pair_members(range(n)):
        number = int(name[:6])
        if number in bad and name.endswith(".png"):
            data = data[: len(data) // 2]
        if number == 11 and name.endswith(".txt"):
            data = b"  \n"
        members.append((name, data))
    return open_manifest(str(write_tar(tmp_path / "damaged.tar", members)))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_replaced_by_its_neighbour_logged_and_counted(tmp_path, workers, keep, caplog):
    manifest = damaged(tmp_path)
    kept = DecodedCache.open(manifest, AUGMENT.max_pixels) if keep else None
    order = Order(30, 10, shuffle="none")
    loader = PairLoader(
        manifest,
        order,
        decoder("exact", AUGMENT),
        tokenizer,
        stop_step=3,
        workers=workers,
        max_bad=0.5,
        kept=kept,
    )
    with caplog.at_level(logging.WARNING):
        index = torch.cat([batch.index for batch in loader]).tolist()
    expected = list(range(30))
    expected[5] = expected[6] = 7  # a sample that was not seen is not in the index: its state stays untouched
    expected[20], expected[11] = 21, 12
    assert index == expected
    assert sorted(loader.bad.samples) == [5, 6, 11, 20]
    assert "4 pairs could not be used" in loader.bad.summary()
    assert "1 × empty caption" in loader.bad.summary()
    assert f"sample 5 of {manifest.where(5)} is left out: " in caplog.text


def test_bad_samples_are_counted_once_whatever_the_workers_and_epochs(tmp_path):
    manifest = damaged(tmp_path)
    for K in (1, 2, 4):
        order = Order(30, 4)
        for rank in range(K):
            loader = PairLoader(
                manifest,
                order,
                decoder("exact", AUGMENT),
                tokenizer,
                stop_step=24,  # more than three epochs
                rank=rank,
                world_size=K,
                workers=0,
                max_bad=4 / 30,
            )
            list(loader)
            assert set(loader.bad.samples) <= {5, 6, 11, 20}


def test_an_error_that_is_not_the_samples_stops_the_loader(manifest, monkeypatch):
    def broken(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.pread", broken)
    with pytest.raises(OSError, match="Input/output error"):
        batches(manifest)


def _consume(folder, cache, ready):
    os.environ["FASTCLIP_CACHE"] = cache
    manifest = open_manifest(folder)
    order = Order(len(manifest), 8, 0, "full", manifest.block_ends())
    for batch in PairLoader(manifest, order, decoder("exact", AUGMENT), tokenizer, stop_step=1000, workers=2):
        ready.put(batch.step)


def test_a_killed_consumer_does_not_matter(tmp_path, cache):
    """SIGKILL while its workers are alive; another process goes on with the next step."""
    folder = str(write_shards(tmp_path / "data", 30, 3))
    whole = batches(open_manifest(folder), stop_step=12)
    context = multiprocessing.get_context("fork")
    ready = context.Queue()
    consumer = context.Process(target=_consume, args=(folder, str(cache), ready))
    consumer.start()
    while (step := ready.get(timeout=30)) < 5:
        pass
    consumer.kill()
    consumer.join()
    rest = batches(open_manifest(folder), start_step=step + 1, stop_step=12, workers=1)
    assert same(rest, whole[step + 1 :])


def test_too_many_bad_samples_stop_with_the_worst_shards(tmp_path):
    manifest = damaged(tmp_path)
    with pytest.raises(
        TooManyBadSamples, match=r"More than 5.0% of the collection is broken.*damaged.tar \(2\)"
    ):
        batches(manifest, shuffle="none", max_bad=0.05, batch=10, stop_step=3)
    members = [("a.png", png(0)), ("a.txt", b"x"), ("b.png", png(1))]
    lossy = open_manifest(str(write_tar(tmp_path / "lossy.tar", members)))
    with pytest.raises(TooManyBadSamples, match=r"1 × no caption. The worst files: .*lossy.tar \(1\)"):
        batches(lossy)


def test_a_collection_of_nothing_but_broken_images_ends(tmp_path):
    manifest = damaged(tmp_path, bad=range(40), n=40)
    with pytest.raises(TooManyBadSamples, match="32 neighbouring pairs from 0 on"):
        batches(manifest, shuffle="none", max_bad=0.99)


def test_wrong_options_are_refused(manifest):
    order = Order(31, 8)
    with pytest.raises(ValueError, match="order is for 31 samples, the manifest has 30"):
        PairLoader(manifest, order, decoder("exact", AUGMENT), tokenizer, stop_step=1)
    with pytest.raises(ValueError, match=r"max_bad=1.5 must lie in \[0, 1\)"):
        batches(manifest, max_bad=1.5)
