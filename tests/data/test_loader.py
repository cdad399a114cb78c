"""The loader: the same tensors with any number of loader workers, ranks and interruptions; no silent loss."""

import errno
import logging
import multiprocessing
import os
import signal
import time
import weakref

import pytest
import torch
from torch.utils.data import get_worker_info

from fastclip.checked_files import DamagedFile
from fastclip.data.bad_samples import TooManyBadSamples
from fastclip.data.decode import Augment, FastDecoder, decoder
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.loader import PairLoader
from fastclip.data.loader_workers import DeadLoaderWorker, StalledLoaderWorker
from fastclip.data.manifest import Manifest, open_manifest
from fastclip.data.order import Order, Samples
from fastclip.data.patches import PatchChoice
from fastclip.data.prefetch import Prefetch, SmallSharedMemory, pinned_bytes
from fastclip.data.tokenize import TextEnds
from fastclip.errors import InputError, OptionError
from tests.damage import flip
from tests.data.collections import pair_members, write_shards, write_tar

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


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["full", "blocks"])
@pytest.mark.parametrize("name", ["exact", "fast"])
def test_batches_do_not_depend_on_loader_workers_and_ranks(manifest, shuffle, name):
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


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [0, 3, 4])
def test_resuming_at_the_next_step_gives_the_same_tensors(manifest, killed_at):
    """With another number of loader workers and ranks than before."""
    whole = batches(manifest, workers=2)
    rest = [
        batches(manifest, start_step=killed_at + 1, rank=rank, world_size=2, workers=1 - rank)
        for rank in (0, 1)
    ]
    for offset, expected in enumerate(whole[killed_at + 1 :]):
        assert torch.equal(torch.cat([part[offset].images for part in rest]), expected.images)
        assert torch.equal(torch.cat([part[offset].index for part in rest]), expected.index)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_patches_do_not_depend_on_loader_workers_ranks_and_the_first_step(manifest, workers):
    choice = PatchChoice(16, 6)
    for step, whole in enumerate(batches(manifest, seed=3, patches=choice)):
        samples = Order(30, 8, 3, "full", manifest.block_ends()).global_batch(step)
        assert torch.equal(whole.patches, choice.draw(3, samples))  # step 3 holds two epochs
    parts = [
        batches(manifest, seed=3, patches=choice, start_step=5, rank=rank, world_size=2, workers=workers)
        for rank in (0, 1)
    ]
    assert torch.equal(torch.cat([part[0].patches for part in parts]), whole.patches)
    assert batches(manifest)[0].patches is None


def test_a_replaced_sample_has_the_patches_of_its_replacement(tmp_path):
    choice, order = PatchChoice(16, 6), Order(30, 10, shuffle="none")
    loader = PairLoader(
        damaged(tmp_path), order, decoder("exact", AUGMENT), tokenizer, stop_step=4, workers=0, max_bad=0.5,
        patches=choice,
    )  # fmt: skip
    for step, batch in enumerate(loader):
        epochs = order.global_batch(step).epochs
        assert torch.equal(batch.patches, choice.draw(0, Samples(batch.index.numpy(), epochs)))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pairs", [1, 3, 8])
def test_batches_do_not_depend_on_the_size_of_their_parts(tmp_path, monkeypatch, workers, pairs):
    manifest = damaged(tmp_path)
    options = {"batch": 10, "max_bad": 0.5, "patches": PatchChoice(16, 6), "ends": TextEnds("padding", 0, 20)}
    whole = batches(manifest, **options)
    monkeypatch.setattr("fastclip.data.prefetch.LARGEST", pairs)
    parts = batches(manifest, workers=workers, **options)
    assert same(whole, parts)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.patches, other.patches)
        assert torch.equal(one.group, other.group)
        assert (one.lengths, one.bad, one.epoch) == (other.lengths, other.bad, other.epoch)
    assert whole[0].tokens.shape[1] < 20  # cut to the longest of the batch


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_batch_is_released_before_the_next_is_joined(manifest, on_gpu):
    """With a GPU, the next one is on the device already, and the one after it is joined."""
    seen = []

    class Watching(FastDecoder):
        def train(self, data, seed):
            assert [ref() for ref in seen] == [None] * len(seen)
            return super().train(data, seed)

    loader = PairLoader(manifest, Order(30, 8), Watching(AUGMENT), tokenizer, stop_step=5, workers=0)
    loader._on_gpu = on_gpu
    for batch in loader:
        seen.append(weakref.ref(batch))
        del batch
    assert len(seen) == 5


def test_with_a_gpu_the_next_batch_is_fetched_early_and_its_unusable_samples_count_with_it(tmp_path):
    order = Order(30, 10, shuffle="none")
    loader = PairLoader(
        damaged(tmp_path), order, decoder("exact", AUGMENT), tokenizer, stop_step=3, workers=0, max_bad=0.5
    )
    expected = list(loader)
    loader.bad.samples.clear()
    loader._on_gpu, found, counted = True, [], []
    for batch in loader:
        found.append(batch)
        counted.append(sorted(loader.bad.samples))
    assert same(expected, found)
    assert counted == [[5, 6], [5, 6, 11], [5, 6, 11, 20]]


@pytest.mark.slow
def test_loader_workers_stop_when_as_much_is_in_flight_as_the_budget_allows(manifest, monkeypatch):
    """Counted by the decoder, in the loader workers' processes."""
    monkeypatch.setattr("fastclip.data.prefetch.LARGEST", 2)
    monkeypatch.setattr("fastclip.data.prefetch.BUDGET", 8 * pinned_bytes(2 * 3 * 16 * 16))
    order, counting = Order(30, 8), CountingDecoder(AUGMENT)
    loader = PairLoader(manifest, order, counting, tokenizer, stop_step=100, workers=2)
    assert loader.prefetch == Prefetch(pairs=2, per_worker=3)
    running = iter(loader)
    for steps in (1, 2):
        next(running)
        most = steps * 8 + 2 * 3 * 2  # pairs: delivered, and in flight over two loader workers
        wait_until(lambda most=most: counting.decoded.sum() >= most)
        time.sleep(0.3)
        assert counting.decoded.sum() == most


class CountingDecoder(FastDecoder):
    """Counts the images that each loader worker has decoded."""

    def __init__(self, augment):
        super().__init__(augment)
        self.decoded = torch.zeros(2, dtype=torch.int64).share_memory_()

    def train(self, data, seed):
        self.decoded[get_worker_info().id] += 1
        return super().train(data, seed)


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.slow
def test_a_loader_worker_that_finds_shared_memory_full_ends_the_run_with_advice(manifest):
    with pytest.raises(DeadLoaderWorker, match="--shm-size"):
        batches(BusError(manifest.folder), workers=1)
    with pytest.raises(SmallSharedMemory, match="--shm-size") as caught:
        batches(FullSharedMemory(manifest.folder), workers=1)
    assert caught.value.path == "/dev/shm"


class FullSharedMemory(Manifest):
    """As torch in a loader worker whose /dev/shm has no room."""

    def pair_at(self, place):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device")


class BusError(Manifest):
    """As a loader worker that writes to shared memory for which there is no room."""

    def pair_at(self, place):
        os.kill(os.getpid(), signal.SIGBUS)


@pytest.mark.slow
def test_a_stalled_part_names_its_step_and_sample(manifest, monkeypatch):
    monkeypatch.setattr("fastclip.data.prefetch.LARGEST", 2)
    with pytest.raises(StalledLoaderWorker) as caught:  # sample 13 is in part 2 of step 1
        batches(Stalling(manifest.folder), shuffle="none", workers=2, timeout=2)
    assert f"step 1 waits for sample 13 of {manifest.where(13)}" in str(caught.value)


class Stalling(Manifest):
    """Storage that does not respond in time."""

    def pair_at(self, place):
        if place == self.place(13):
            time.sleep(5)
        return super().pair_at(place)


def test_too_little_shared_memory_is_an_error_before_loader_workers_start(manifest):
    with pytest.raises(SmallSharedMemory):
        batches(manifest, workers=2, shared_memory=10_000)


def test_a_batch_that_ranks_cannot_divide_is_refused(manifest):
    with pytest.raises(OptionError) as caught:
        batches(manifest, world_size=16)
    assert caught.value.option == "batch.size"


def test_images_match_their_captions_and_each_epoch_augments_differently(manifest):
    seen = {}
    for batch in batches(manifest, stop_step=8):
        for image, tokens, index in zip(batch.images, batch.tokens, batch.index.tolist(), strict=True):
            assert bytes(tokens.tolist()).rstrip(b"\0").decode() == f"picture {index}"
            seen.setdefault(index, []).append(image)
    assert set(seen) == set(range(30))
    twice = [images for images in seen.values() if len(images) > 1]
    assert twice
    assert not any(torch.equal(images[0], images[1]) for images in twice)


def test_random_state_of_the_process_is_unchanged(manifest):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    batches(manifest)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.slow
def test_decoded_cache_gives_the_same_batches(manifest):
    for name in ("exact", "fast"):
        decoded = DecodedCache.open(manifest, AUGMENT.max_pixels)
        assert same(batches(manifest, name=name), batches(manifest, name=name, decoded=decoded, workers=2))


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


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_unusable_sample_is_replaced_by_its_neighbour_logged_and_counted(tmp_path, workers, cached, caplog):
    manifest = damaged(tmp_path)
    decoded = DecodedCache.open(manifest, AUGMENT.max_pixels) if cached else None
    order = Order(30, 10, shuffle="none")
    loader = PairLoader(
        manifest,
        order,
        decoder("exact", AUGMENT),
        tokenizer,
        stop_step=3,
        workers=workers,
        max_bad=0.5,
        decoded=decoded,
    )
    with caplog.at_level(logging.WARNING):
        index = torch.cat([batch.index for batch in loader]).tolist()
    expected = list(range(30))
    expected[5] = expected[6] = 7  # an unseen sample is not in the index: its state is unchanged
    expected[20], expected[11] = 21, 12
    assert index == expected
    assert sorted(loader.bad.samples) == [5, 6, 11, 20]
    assert loader.bad.summary().startswith("4 pairs ")
    assert "1 × empty caption" in loader.bad.summary()
    logged = [record.args for record in caplog.records if record.name == "fastclip.data.bad_samples"]
    assert sorted(sample for sample, *_ in logged) == [5, 6, 11, 20]
    assert {file for _, file, *_ in logged} == {manifest.where(5)}
    assert {sample: reason for sample, *_, reason in logged}[11] == "empty caption"


def test_unusable_samples_are_counted_once_over_ranks_and_epochs(tmp_path):
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


@pytest.mark.parametrize("workers", [0, 1])
def test_error_that_is_not_the_samples_stops_the_loader(manifest, workers):
    with pytest.raises(OSError, match="Input/output error") as caught:
        batches(FailingDisk(manifest.folder), workers=workers)
    assert workers or caught.value.errno == errno.EIO


class FailingDisk(Manifest):
    def pair_at(self, place):
        raise OSError(errno.EIO, "Input/output error")


def _consume(folder, cache, ready):
    os.environ["FASTCLIP_CACHE"] = cache
    manifest = open_manifest(folder)
    order = Order(len(manifest), 8, 0, "full", manifest.block_ends())
    for batch in PairLoader(manifest, order, decoder("exact", AUGMENT), tokenizer, stop_step=1000, workers=2):
        ready.put(batch.step)


@pytest.mark.slow
def test_run_resumes_after_a_killed_process(tmp_path, cache):
    """SIGKILL while its loader workers are alive; another process resumes at the next step."""
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


def test_too_many_unusable_samples_raise_with_the_worst_files(tmp_path):
    manifest = damaged(tmp_path)
    with pytest.raises(TooManyBadSamples) as caught:
        batches(manifest, shuffle="none", max_bad=0.05, batch=10, stop_step=3)
    assert caught.value.files == {manifest.files[0]: 2}
    assert all(text in str(caught.value) for text in ("5.0%", f"{manifest.files[0]} (2)", "--data.max_bad"))


@pytest.mark.parametrize("workers", [0, 1])
def test_search_for_a_usable_neighbour_ends(tmp_path, workers):
    manifest = damaged(tmp_path, bad=range(40), n=40)
    with pytest.raises(TooManyBadSamples) as caught:
        batches(manifest, shuffle="none", max_bad=0.99, workers=workers)
    assert caught.value.files == {manifest.files[0]: 32}
    assert manifest.files[0] in str(caught.value)


@pytest.mark.slow
def test_order_of_another_collection_is_rejected(manifest):
    with pytest.raises(InputError) as caught:
        PairLoader(manifest, Order(31, 8), decoder("exact", AUGMENT), tokenizer, stop_step=1)
    assert caught.value.argument == "order"


@pytest.mark.slow
def test_max_bad_must_be_a_fraction(manifest):
    with pytest.raises(OptionError) as caught:
        batches(manifest, max_bad=1.5)
    assert (caught.value.option, caught.value.value) == ("data.max_bad", 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_index_stops_the_run_and_is_built_again_by_the_next(tmp_path, monkeypatch, workers):
    monkeypatch.setattr("fastclip.data.manifest.SMALL", 0)  # as if it were large
    data = str(write_shards(tmp_path / "data", 30, 3))
    expected = batches(open_manifest(data))
    manifest = open_manifest(data)
    flip(manifest.folder / "rows.bin", 100)
    with pytest.raises(DamagedFile) as caught:
        batches(manifest, workers=workers, stop_step=1)
    assert str(manifest.folder / "rows.bin") in str(caught.value)
    assert same(expected, batches(open_manifest(data)))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_decoded_images_change_no_batch(manifest, monkeypatch, workers):
    monkeypatch.setattr("fastclip.data.decoded_cache.SMALL", 0)  # as if they were many
    decoded = DecodedCache.open(manifest, AUGMENT.max_pixels)
    expected = batches(manifest, decoded=decoded)
    damaged = DecodedCache.open(manifest, AUGMENT.max_pixels)
    flip(damaged.folder / "pixels.bin", 50_000)
    assert same(expected, batches(manifest, decoded=damaged, workers=workers))
