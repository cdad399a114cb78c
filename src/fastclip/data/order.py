"""In which order samples are seen: a pure function of the seed and the step, in constant memory.

The epochs form one endless stream of positions: position p is sample number p mod n of epoch p // n. The
global batch of a step is B consecutive positions of the stream, so every epoch sees each sample exactly once,
whatever n and B are. That is the remainder rule: nothing is dropped or repeated; a batch may hold the end of
one epoch and the start of the next. Workers take equal consecutive parts of the global batch, so its samples
are the same at every world size, and resuming needs nothing but the number of the step.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from math import isqrt
from typing import Literal, NamedTuple

import numpy as np

Shuffle = Literal["full", "blocks", "none"]
_ROUNDS = 6  # of the permutation's network; even


class Samples(NamedTuple):
    """A batch: ids, and the epoch to which each belongs."""

    ids: np.ndarray
    epochs: np.ndarray


class Order:
    """The order of n samples in global batches of `batch`.

    Args:
        shuffle: "full", a true permutation; "blocks", shards in random order and samples mixed within a
            window of consecutive ones, for disks and networks that want sequential reads; "none", as is.
        block_ends: where each block of samples (a shard) ends; only "blocks" needs it.
        window: how many consecutive samples of the blocks' order are mixed.
    """

    def __init__(
        self,
        n: int,
        batch: int,
        seed: int = 0,
        shuffle: Shuffle = "full",
        block_ends: np.ndarray | None = None,
        window: int = 20_000,
    ):
        if n < 1 or batch < 1:
            raise ValueError(f"n={n} samples and batch={batch} must both be at least 1.")
        if shuffle not in ("full", "blocks", "none"):
            raise ValueError(f"shuffle={shuffle!r} is unknown. Choose 'full', 'blocks' or 'none'.")
        if window < 1:
            raise ValueError(f"window={window} must be at least 1; try 20000.")
        self.n, self.batch, self.seed, self.shuffle, self.window = n, batch, seed, shuffle, window
        ends = np.array([n]) if block_ends is None else np.asarray(block_ends, dtype=np.int64)
        if shuffle == "blocks" and (ends[-1] != n or (np.diff(ends, prepend=0) < 0).any()):
            raise ValueError(f"block_ends must rise to n={n}.")
        self._starts, self._sizes = np.concatenate([[0], ends[:-1]]), np.diff(ends, prepend=0)
        self._mixed: tuple[int, np.ndarray, np.ndarray] | None = None  # the last epoch's order of blocks

    def epoch_of(self, step: int) -> int:
        """The epoch in which a step's batch begins."""
        return step * self.batch // self.n

    def global_batch(self, step: int) -> Samples:
        """All samples of a step, over all workers."""
        return self._at(np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64))

    def local_batch(self, step: int, rank: int, world_size: int) -> Samples:
        """One worker's part of a step."""
        if self.batch % world_size:
            raise ValueError(
                f"The global batch of {self.batch} cannot be divided by {world_size} workers; "
                f"try {self.batch // world_size * world_size or world_size}."
            )
        b = self.batch // world_size
        start = step * self.batch + rank * b
        return self._at(np.arange(start, start + b, dtype=np.int64))

    def _at(self, positions: np.ndarray) -> Samples:
        epochs, within = np.divmod(positions, self.n)
        ids = np.empty_like(within)
        for epoch in np.unique(epochs):  # one, or two at an epoch's end
            mask = epochs == epoch
            ids[mask] = self._epoch_ids(int(epoch), within[mask])
        return Samples(ids, epochs)

    def _epoch_ids(self, epoch: int, position: np.ndarray) -> np.ndarray:
        if self.shuffle == "none":
            return position
        if self.shuffle == "full":
            return permute(position, self.n, key=(self.seed, epoch))
        return self._block_ids(epoch, position)

    def _block_ids(self, epoch: int, position: np.ndarray) -> np.ndarray:
        """Mix within windows of the stream of shuffled blocks, then find the block of each place."""
        place = np.empty_like(position)
        windows = position // self.window
        for w in np.unique(windows):
            mask = windows == w
            start = int(w) * self.window
            size = min(self.window, self.n - start)
            place[mask] = start + permute(position[mask] - start, size, key=(self.seed, epoch, int(w)))
        if self._mixed is None or self._mixed[0] != epoch:
            blocks = len(self._sizes)
            order = permute(np.arange(blocks), blocks, key=(self.seed, epoch, -1))
            self._mixed = (epoch, order, np.cumsum(self._sizes[order]))
        _, order, ends = self._mixed
        slot = np.searchsorted(ends, place, side="right")
        block = order[slot]
        return self._starts[block] + place - (ends[slot] - self._sizes[block])


def permute(x: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """A pseudo-random permutation of range(n), at the places x only: a Feistel network with cycle walking.

    A place is (high, low) in a rectangle of about √n × √n cells, the first n of which are range(n). Each
    round turns one coordinate by an amount that depends on the other; the few places that leave range(n)
    walk on until they are inside again.
    """
    height = np.uint64(isqrt(n - 1) + 1)
    width = np.uint64(-(-n // int(height)))
    keys = np.frombuffer(_digest(key, 8 * _ROUNDS), dtype="<u8")
    out = x.astype(np.uint64)
    outside = np.arange(len(out))
    while len(outside):
        high, low = np.divmod(out[outside], width)
        for i in range(0, _ROUNDS, 2):
            high = (high + _mix(low + keys[i]) % height) % height
            low = (low + _mix(high + keys[i + 1]) % width) % width
        walked = high * width + low
        out[outside] = walked
        outside = outside[walked >= n]
    return out.astype(np.int64)


def seed_of(*key: int) -> int:
    """63 bits for whatever happens at this place of a run: (seed, epoch, id) is a sample's augmentation."""
    return int.from_bytes(_digest(key, 8), "little") >> 1


def _digest(key: tuple[int, ...], size: int) -> bytes:
    return blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=size).digest()


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64 bits in place (murmur3's finaliser): every bit moves about half of the others."""
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x
