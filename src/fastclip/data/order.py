"""The order of samples: a pure function of the seed and the step, in constant memory.

The epochs form one endless stream of positions: position p is sample number p mod n of epoch p // n. The
global batch of a step is B consecutive positions of the stream, so every epoch sees each sample exactly once,
whatever n and B are. Nothing is dropped or repeated: a batch may hold the end of one epoch and the start of
the next. Ranks take equal consecutive parts of the global batch, so its samples are the same at every world
size, and resuming requires only the step number.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from math import isqrt
from typing import Literal, NamedTuple, get_args

import numpy as np

from fastclip.errors import InputError, OptionError

Shuffle = Literal["full", "blocks", "none"]
_ROUNDS = 6  # of the permutation's network; even


class Samples(NamedTuple):
    """The ids of a batch, and the epoch of each."""

    ids: np.ndarray
    epochs: np.ndarray


class Order:
    """The order of n samples in global batches of `batch`.

    Args:
        shuffle: "full", a true permutation; "blocks", shards in random order and samples mixed within a
            window of consecutive ones, for disks and networks that need sequential reads; "none", as is.
        block_ends: where each block of samples (a shard) ends; used by "blocks" only.
        window: number of consecutive samples that "blocks" mixes.
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
        if n < 1:
            raise InputError("n", f"is {n}; it must be at least 1.")
        if batch < 1:
            raise InputError("batch", f"is {batch}; it must be at least 1.")
        if shuffle not in get_args(Shuffle):
            raise OptionError.unknown("data.shuffle", shuffle, get_args(Shuffle))
        if window < 1:
            raise OptionError("data.window", window, "must be at least 1", example=20_000)
        self.n, self.batch, self.seed, self.shuffle, self.window = n, batch, seed, shuffle, window
        ends = np.array([n]) if block_ends is None else np.asarray(block_ends, dtype=np.int64)
        if shuffle == "blocks" and (ends[-1] != n or (np.diff(ends, prepend=0) < 0).any()):
            raise InputError("block_ends", f"must never decrease and must end at n={n}, not at {ends[-1]}.")
        self._starts, self._sizes = np.concatenate([[0], ends[:-1]]), np.diff(ends, prepend=0)
        self._mixed: tuple[int, np.ndarray, np.ndarray] | None = None  # the last epoch's order of blocks

    def epoch_of(self, step: int) -> int:
        """The epoch in which a step's batch begins."""
        return step * self.batch // self.n

    def global_batch(self, step: int) -> Samples:
        """All samples of a step, over all ranks."""
        return self._at(np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64))

    def local_batch(self, step: int, rank: int, world_size: int, rows: slice = slice(None)) -> Samples:
        """One rank's part of a step, or these rows of it."""
        b = self.local_size(world_size)
        start = step * self.batch + rank * b
        return self._at(np.arange(start, start + b, dtype=np.int64)[rows])

    def local_size(self, world_size: int) -> int:
        """The number of a rank's samples in a step."""
        if self.batch % world_size:
            near = self.batch // world_size * world_size or world_size
            rule = f"must be divisible by the number of ranks, {world_size}"
            raise OptionError("batch.size", self.batch, rule, example=near)
        return self.batch // world_size

    def _at(self, positions: np.ndarray) -> Samples:
        epochs, within = np.divmod(positions, self.n)
        ids = np.empty_like(within)
        for epoch in np.unique(epochs):  # one epoch, or two where they meet
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
        """Mix within windows of the stream of shuffled blocks, then find the block of each position."""
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
    """A pseudo-random permutation of range(n), at positions x only: a Feistel network with cycle walking.

    A position is (high, low) in a rectangle of about √n × √n cells, the first n of which are range(n). Each
    round rotates one coordinate by an amount that depends on the other; the few positions that leave
    range(n) are permuted again until they are inside.
    """
    height = np.uint64(isqrt(n - 1) + 1)
    width = np.uint64(-(-n // int(height)))
    keys = np.frombuffer(_digest(key, 8 * _ROUNDS), dtype="<u8")
    out = x.astype(np.uint64)
    outside = np.arange(len(out))
    while len(outside):
        high, low = np.divmod(out[outside], width)
        for i in range(0, _ROUNDS, 2):
            high = (high + mix(low + keys[i]) % height) % height
            low = (low + mix(high + keys[i + 1]) % width) % width
        walked = high * width + low
        out[outside] = walked
        outside = outside[walked >= n]
    return out.astype(np.int64)


def seed_of(*key: int) -> int:
    """A seed of 63 bits for this key: (seed, epoch, id) seeds a sample's augmentation."""
    return int.from_bytes(_digest(key, 8), "little") >> 1


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64 bits in place (murmur3's finaliser): every bit affects about half of the others."""
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x


def _digest(key: tuple[int, ...], size: int) -> bytes:
    return blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=size).digest()
