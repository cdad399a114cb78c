"""How many pairs loader workers keep ready: a number of bytes, and no more than /dev/shm holds.

Loader workers decode a batch in parts, which they send through shared memory; on their way to a GPU they are
in pinned memory. A part is in flight from the moment when a loader worker begins it until the training
process has copied it.
"""

from __future__ import annotations

import logging
from math import inf
from typing import Literal, NamedTuple

from fastclip.data.machine import SHARED_MEMORY, Share
from fastclip.errors import PathError

log = logging.getLogger(__name__)
BUDGET = 2_000_000_000  # bytes in flight per rank, pinned as well as shared
LARGEST = 256  # pairs in a part
FEWEST = 8  # pairs in a part that /dev/shm must hold: smaller ones would cost more than they carry
DEEPEST = 8  # parts in flight per loader worker
MOST_WORKERS = 16  # by default
_AT_WORK = 2  # parts that the training process holds
_USABLE = 0.8  # of the free shared memory: NCCL needs some too


class Prefetch(NamedTuple):
    """What loader workers keep ready."""

    pairs: int
    """In a part."""
    per_worker: int
    """Parts in flight per loader worker; 0 without loader workers."""

    def in_memory(self, workers: int) -> int:
        """Parts in memory at most: those in flight, the one being copied and, on a CPU, the one in use."""
        return self.per_worker * workers + _AT_WORK


class SmallSharedMemory(PathError):
    """/dev/shm is too small for the loader workers."""


def loader_workers(option: int | Literal["auto"], share: Share) -> int:
    """The number of loader workers: by default one for each of the rank's cores except one, 16 at most."""
    return max(1, min(MOST_WORKERS, share.cores - 1)) if option == "auto" else option


def plan_prefetch(local_batch: int, image_bytes: int, workers: int, free: int | None) -> Prefetch:
    """As much as the budget allows; less, with a line in the log, if that is more than /dev/shm holds.

    Args:
        image_bytes: of one decoded image.
        free: bytes of /dev/shm for this rank; None: not known.
    """
    if workers == 0:
        return Prefetch(min(LARGEST, local_batch), 0)
    wanted = _fitting(min(LARGEST, local_batch), 1, image_bytes, workers, inf)
    if free is None:
        return wanted
    fewest = min(FEWEST, wanted.pairs)
    plan = _fitting(wanted.pairs, fewest, image_bytes, workers, _USABLE * free)
    if plan == wanted:
        return plan
    ideal = wanted.in_memory(workers) * wanted.pairs * image_bytes / _USABLE
    advice = f"In a container, pass `docker run --shm-size`, {_mb(ideal)} or more per rank, or --ipc=host"
    if plan.per_worker == 0:
        least = (workers + _AT_WORK) * fewest * image_bytes / _USABLE
        raise SmallSharedMemory(
            SHARED_MEMORY,
            f"has {_mb(free)} free for this rank, too little for its {workers} loader workers, which need "
            f"{_mb(least)} at least. {advice}; or use fewer loader workers: --data.workers.",
        )
    log.warning(
        "%s has %s free for this rank: loader workers send %d pairs at a time and keep %s ready. %s.",
        SHARED_MEMORY,
        _mb(free),
        plan.pairs,
        f"{plan.per_worker * workers * plan.pairs:,}",
        advice,
    )
    return plan


def pinned_bytes(size: int) -> int:
    """What a tensor of this size takes as pinned memory: torch rounds it up to a power of two."""
    return 1 << (size - 1).bit_length()


def whole_batches(batch_bytes: int, workers: int, free: int | None) -> tuple[int, int]:
    """For batches that are not divided, in evaluation: loader workers, and batches in flight for each.

    Fewer loader workers than asked for if /dev/shm holds no more; 0 decodes in this process.
    """
    if workers and free is not None and (fit := int(_USABLE * free // batch_bytes) - _AT_WORK) < workers:
        log.warning(
            "%s has %s free for this rank: evaluation uses %d of %d loader workers. In a container, "
            "pass `docker run --shm-size` or --ipc=host.",
            SHARED_MEMORY,
            _mb(free),
            max(0, fit),
            workers,
        )
        return max(0, fit), 1
    return workers, 2 if (2 * workers + _AT_WORK) * pinned_bytes(batch_bytes) <= BUDGET else 1


def _fitting(pairs: int, fewest: int, image_bytes: int, workers: int, shared: float) -> Prefetch:
    """Halve the parts until each loader worker may have two: one to send while it decodes the next."""
    while True:
        part = pairs * image_bytes
        slots = max(workers, BUDGET // pinned_bytes(part) - _AT_WORK)
        slots = int(min(slots, shared // part - _AT_WORK))
        if slots >= 2 * workers or pairs <= fewest:
            return Prefetch(pairs, max(0, min(DEEPEST, slots // workers)))
        pairs = max(fewest, (pairs + 1) // 2)


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
