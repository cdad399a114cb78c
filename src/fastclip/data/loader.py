"""Batches of pairs on torch's DataLoader: read, decoded, augmented and tokenised in loader workers.

A step's batch is a pure function of the collection, the seed and the step: each sample's randomness comes
from (seed, epoch, id), so neither the number of loader workers nor the world size changes a bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from fastclip.data.bad_samples import BadSampleLog
from fastclip.data.batch_parts import PartDataset, Tokenizer
from fastclip.data.decode import Decoder
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.joining import Batch, Joiner, one_ahead
from fastclip.data.loader_workers import LoaderWorkers
from fastclip.data.manifest import Manifest
from fastclip.data.order import Order
from fastclip.data.patches import PatchChoice
from fastclip.data.prefetch import plan_prefetch
from fastclip.data.tokenize import TextEnds
from fastclip.errors import InputError, OptionError


class PairLoader:
    """Iterates over the local batches of steps [start_step, stop_step).

    Args:
        tokenizer: captions → token ids, as open_clip's tokenizers.
        workers: loader workers; 0 decodes in this process. Batches do not depend on it.
        device: where batches are needed; with a GPU the next batch is copied while a step computes.
        shared_memory: bytes of /dev/shm that this rank may use; None: not known.
        decoded: the cache of decoded images, if there is one (`DecodedCache.open`).
        max_bad: fraction of the collection that may be unusable before the loader stops.
        timeout: seconds to wait for a part of a batch before raising StalledLoaderWorker; 0 waits forever.
        ends: where captions end, if the text tower needs no padding.
        patches: how many patches of each image to keep, with patch dropout.
    """

    def __init__(
        self,
        manifest: Manifest,
        order: Order,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        stop_step: int,
        start_step: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 2,
        device: torch.device | str = "cpu",
        shared_memory: int | None = None,
        decoded: DecodedCache | None = None,
        max_bad: float = 0.01,
        timeout: float = 0,
        ends: TextEnds | None = None,
        patches: PatchChoice | None = None,
    ):
        if order.n != len(manifest):
            raise InputError("order", f"is for {order.n:,} samples, but the manifest has {len(manifest):,}.")
        if not 0 <= max_bad < 1:
            raise OptionError("data.max_bad", max_bad, "must be in [0, 1)", example=0.01)
        self.bad = BadSampleLog(manifest, max_bad)
        self._steps = range(start_step, stop_step)
        self._order, self._local_batch = order, order.local_size(world_size)
        self._joiner, self._on_gpu = Joiner(torch.device(device), ends), torch.device(device).type == "cuda"
        self.prefetch = plan_prefetch(self._local_batch, decoder.form.nbytes, workers, shared_memory)
        reading = manifest, order, decoder, tokenizer, ends, patches
        self._parts = PartDataset(*reading, rank, world_size, decoded, workers, self.prefetch.pairs)
        first, last = (step * self._parts.parts for step in (start_step, stop_step))
        self._received = LoaderWorkers(
            self._parts,
            range(first, last),
            workers=workers,
            per_worker=self.prefetch.per_worker,
            pin_memory=self._on_gpu,
            timeout=timeout,
            stalled=self._stalled,
            reading=self._parts.reading,
        )

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches()
        for batch in one_ahead(batches) if self._on_gpu else batches:
            self.bad.add(batch.bad)
            yield batch.arrived()
            del batch  # before the next one is joined

    def _batches(self) -> Iterator[Batch]:
        items, per_batch = iter(self._received), self._parts.parts
        for step in self._steps:
            parts = islice(items, per_batch)
            yield self._joiner.join(step, self._order.epoch_of(step), self._local_batch, parts)

    def _stalled(self, number: int) -> str:
        """The rest of a message about this iteration's n-th part."""
        step, where = self._steps[number // self._parts.parts], self._parts.progress(number)
        return (
            f": step {step} {where}. Check that its storage responds, or wait longer with a larger "
            "--data.timeout."
        )
