"""Parts of batches, as loader workers make them: pairs read, decoded, augmented and tokenised.

A part is at most a few hundred pairs of one rank's batch: what is in flight is small, and all loader workers
work on the same few batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from fastclip.data.bad_samples import BadSample, TooManyBadSamples
from fastclip.data.caption_groups import caption_group
from fastclip.data.decode import Decoder
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.manifest import Manifest, Place
from fastclip.data.order import Order, Samples, seed_of
from fastclip.data.patches import PatchChoice
from fastclip.data.readers import UNUSABLE
from fastclip.data.tokenize import TextEnds

_NEIGHBOURS = 32  # consecutive unusable samples before the search for a replacement stops
Tokenizer = Callable[[list[str]], Tensor]


class Labels(NamedTuple):
    """All of a part except its images: small, and sent through a pipe, not through shared memory.

    Shapes: p pairs, T tokens, k patches.
    """

    tokens_pT: np.ndarray
    lengths: list[int] | None
    index_p: np.ndarray
    group_p: np.ndarray
    patches_pk: np.ndarray | None
    bad: list[BadSample]


@dataclass(frozen=True)
class Part:
    """Some of the pairs of a batch."""

    images: Tensor
    labels: Labels

    def pin_memory(self) -> Part:
        """Called by DataLoader before a copy to a GPU."""
        return replace(self, images=self.images.pin_memory())


class PartDataset(Dataset):
    """Item i is part i mod P of the local batch of step i // P: a batch has P parts of `pairs` pairs."""

    def __init__(
        self,
        manifest: Manifest,
        order: Order,
        decoder: Decoder,
        tokenizer: Tokenizer,
        ends: TextEnds | None,
        patches: PatchChoice | None,
        rank: int,
        world_size: int,
        decoded: DecodedCache | None,
        workers: int,
        pairs: int,
    ):
        self.manifest, self.order, self.decoder = manifest, order, decoder
        self.tokenizer, self.ends, self.patches = tokenizer, ends, patches
        self.rank, self.world_size, self.decoded = rank, world_size, decoded
        self.pairs, self.parts = pairs, -(-order.local_size(world_size) // pairs)
        self._reading = torch.full((max(1, workers),), -1).share_memory_()  # the sample of each loader worker

    def __getitem__(self, item: int) -> Part:
        step, part = divmod(item, self.parts)
        rows = slice(part * self.pairs, (part + 1) * self.pairs)
        samples = self.order.local_batch(step, self.rank, self.world_size, rows)
        bad: list[BadSample] = []
        images, captions, ids = [], [], []
        places = self.manifest.find(samples.ids)
        for sample, epoch, row in zip(samples.ids.tolist(), samples.epochs.tolist(), places, strict=True):
            image, caption, used = self._load(sample, epoch, Place(*row.item()), bad)
            images.append(image)
            captions.append(caption)
            ids.append(used)
        tokens = self.tokenizer(captions)
        lengths = None if self.ends is None else self.ends.lengths(tokens)
        index, group = np.array(ids), np.array([caption_group(caption) for caption in captions])
        patches = None
        if self.patches is not None:
            patches = self.patches.draw(self.order.seed, Samples(index, samples.epochs)).numpy()
        stacked = default_collate(images)  # in a loader worker, directly into shared memory
        return Part(stacked, Labels(tokens.numpy(), lengths, index, group, patches, bad))

    def progress(self, number: int) -> str:
        """The state of this run's n-th part, for messages: "waits for sample 17 of a.tar"."""
        sample = self.reading(number % len(self._reading))  # loader workers take turns
        return f"waits for {sample}" if sample else "has not started"

    def reading(self, worker: int) -> str:
        """What this loader worker began last: "sample 17 of a.tar"; empty if nothing."""
        sample = int(self._reading[worker])
        return "" if sample < 0 else f"sample {sample} of {self.manifest.where(sample)}"

    def _load(self, sample: int, epoch: int, place: Place, bad: list[BadSample]) -> tuple[Tensor, str, int]:
        """Load the pair, or its next usable neighbour."""
        worker = get_worker_info()
        for offset in range(_NEIGHBOURS):
            candidate = (sample + offset) % len(self.manifest)
            if offset:
                place = self.manifest.place(candidate)
            self._reading[0 if worker is None else worker.id] = candidate
            seed = seed_of(self.order.seed, epoch, candidate)
            try:
                return (*self._pair(candidate, place, seed), candidate)
            except UNUSABLE as error:
                bad.append(BadSample(candidate, self.manifest.where(candidate), str(error)))
        raise TooManyBadSamples(
            f"{_NEIGHBOURS} consecutive pairs from sample {sample} on cannot be used; the last, in "
            f"{bad[-1].file}: {bad[-1].reason}. Inspect the collection with `fastclip data check`.",
            Counter(pair.reason for pair in bad),
            Counter(pair.file for pair in bad),
        )

    def _pair(self, sample: int, place: Place, seed: int) -> tuple[Tensor, str]:
        if self.decoded is not None:
            caption = self.manifest.caption_at(place)
            return self.decoder.train_array(self.decoded.image(sample), seed), caption
        image, caption = self.manifest.pair_at(place)
        return self.decoder.train(image, seed), caption
