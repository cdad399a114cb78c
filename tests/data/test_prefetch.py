"""What loader workers keep ready fits into its budget and into /dev/shm, whatever the batch."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.data.machine import Share
from fastclip.data.prefetch import (
    BUDGET,
    DEEPEST,
    LARGEST,
    MOST_WORKERS,
    Prefetch,
    SmallSharedMemory,
    loader_workers,
    pinned_bytes,
    plan_prefetch,
    whole_batches,
)

IMAGE = 224 * 224 * 3  # bytes, as the fast decoder returns it
SIZES = st.sampled_from([3 * side**2 * size for side in (16, 224, 384, 1024) for size in (1, 4)])


@given(st.integers(1, 40_000), SIZES, st.integers(1, 64))
def test_what_is_in_memory_stays_within_the_budget(local_batch, image_bytes, workers):
    plan = plan_prefetch(local_batch, image_bytes, workers, None)
    assert 1 <= plan.pairs <= min(LARGEST, local_batch)
    assert 1 <= plan.per_worker <= DEEPEST
    assert plan.in_memory(workers) * pinned_bytes(plan.pairs * image_bytes) <= BUDGET


@given(st.integers(1, 40_000), SIZES, st.integers(1, 64), st.integers(0, 10**10))
def test_what_is_in_memory_fits_into_shared_memory_or_is_refused(local_batch, image_bytes, workers, free):
    try:
        plan = plan_prefetch(local_batch, image_bytes, workers, free)
    except SmallSharedMemory:
        fewest = min(8, plan_prefetch(local_batch, image_bytes, workers, None).pairs)
        assert (workers + 2) * fewest * image_bytes > 0.8 * free
    else:
        assert plan.in_memory(workers) * plan.pairs * image_bytes <= free
        assert plan.per_worker >= 1


@pytest.mark.parametrize(
    ("local_batch", "workers", "expected"),
    [
        (2048, 6, Prefetch(256, 4)),  # cc12m-large on one rank: 3 batches ahead in 1.7 GB
        (256, 6, Prefetch(256, 4)),  # on 8
        (5120, 8, Prefetch(256, 3)),  # laion-xlarge on one rank
        (640, 8, Prefetch(256, 3)),
        (16, 2, Prefetch(16, 8)),
        (2048, 0, Prefetch(256, 0)),
    ],
)
def test_the_papers_settings(local_batch, workers, expected):
    assert plan_prefetch(local_batch, IMAGE, workers, None) == expected
    assert plan_prefetch(local_batch, IMAGE, workers, 10**11) == expected


def test_dockers_64_mb_are_enough_for_one_rank_with_smaller_parts_and_a_line_in_the_log(caplog):
    with caplog.at_level(logging.WARNING):
        plan = plan_prefetch(256, IMAGE, 6, 64 << 20)
    assert plan == Prefetch(16, 3)
    assert len(caplog.records) == 1
    assert all(text in caplog.text for text in ("/dev/shm has 67 MB", "16 pairs", "--shm-size"))


def test_too_little_shared_memory_is_an_error_that_says_what_is_needed():
    with pytest.raises(SmallSharedMemory) as caught:
        plan_prefetch(256, IMAGE, 6, 8 << 20)
    assert caught.value.path == "/dev/shm"
    least = (6 + 2) * 8 * IMAGE / 0.8
    parts = ("/dev/shm", "8 MB free", f"{least / 1e6:.0f} MB", "--shm-size", "--data.workers")
    assert all(part in str(caught.value) for part in parts)
    assert plan_prefetch(256, IMAGE, 6, int(least) + 1) == Prefetch(8, 1)
    assert plan_prefetch(256, IMAGE, 0, 0) == Prefetch(256, 0)  # nothing is sent


@given(st.integers(1, 1 << 40))
def test_pinned_memory_is_rounded_up_to_a_power_of_two(size):
    rounded = pinned_bytes(size)
    assert size <= rounded < 2 * size
    assert rounded.bit_count() == 1


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (8, 7), (100, MOST_WORKERS)])
def test_by_default_one_core_of_a_rank_is_left_for_training(cores, workers):
    assert loader_workers("auto", Share(cores, None)) == workers
    assert loader_workers(3, Share(cores, None)) == 3
    assert loader_workers(0, Share(cores, None)) == 0


@pytest.mark.parametrize(
    ("workers", "free", "expected"),
    [
        (2, None, (2, 2)),
        (16, None, (16, 1)),
        (0, 0, (0, 1)),
        (6, 64 << 20, (0, 1)),  # decoded in the process itself
        (6, 1 << 30, (3, 1)),
        (6, 1 << 40, (6, 1)),
    ],
)
def test_evaluation_uses_the_loader_workers_that_fit(workers, free, expected, caplog):
    found = whole_batches(256 * 4 * IMAGE, workers, free)
    assert found[0] == expected[0]
    assert found[0] == 0 or found == expected
    assert bool(caplog.records) == (found[0] < workers)
