"""Batches of pairs on torch's DataLoader: read, decoded, augmented and tokenised in loader workers.

A step's batch is a pure function of the collection, the seed and the step: each sample's randomness comes
from (seed, epoch, id), so neither the number of loader workers nor the world size changes a bit of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastclip.data.bad_samples import BadSampleLog
from fastclip.data.batch_parts import Part, PartDataset, Tokenizer
from fastclip.data.decode import Decoder
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.joining import Batch, Joiner, one_ahead
from fastclip.data.machine import SHARED_MEMORY
from fastclip.data.manifest import Manifest
from fastclip.data.order import Order
from fastclip.data.patches import PatchChoice
from fastclip.data.prefetch import SmallSharedMemory, plan_prefetch
from fastclip.data.tokenize import TextEnds
from fastclip.errors import InputError, OptionError

_FEWER = "If the machine ran out of memory, use fewer: --data.workers."
_LARGER = (
    "In a container, enlarge it with `docker run --shm-size` or pass --ipc=host; or use fewer loader "
    "workers: --data.workers."
)


class StalledLoaderWorker(RuntimeError):
    """A loader worker has sent nothing for too long."""


class DeadLoaderWorker(RuntimeError):
    """A loader worker has exited; it may have been killed."""


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
        self._steps, self._timeout = range(start_step, stop_step), timeout
        self._order, self._local_batch = order, order.local_size(world_size)
        self._joiner, self._on_gpu = Joiner(torch.device(device), ends), torch.device(device).type == "cuda"
        self.prefetch = plan_prefetch(self._local_batch, decoder.form.nbytes, workers, shared_memory)
        reading = manifest, order, decoder, tokenizer, ends, patches
        self._parts = PartDataset(*reading, rank, world_size, decoded, workers, self.prefetch.pairs)
        first, last = (step * self._parts.parts for step in (start_step, stop_step))
        self._loader = DataLoader(
            self._parts,
            sampler=range(first, last),
            batch_size=None,  # the dataset returns whole parts
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=self._on_gpu,
            timeout=timeout if workers else 0,
            prefetch_factor=self.prefetch.per_worker or None,
            generator=torch.Generator(),  # otherwise it draws from the process's own
            worker_init_fn=leave_group,
        )

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches()
        for batch in one_ahead(batches) if self._on_gpu else batches:
            self.bad.add(batch.bad)
            yield batch.arrived()
            del batch  # before the next one is joined

    def _batches(self) -> Iterator[Batch]:
        items, per_batch = iter(self._loader), self._parts.parts
        for number, step in enumerate(self._steps):
            of_step = range(number * per_batch, (number + 1) * per_batch)
            parts = (self._next(items, step, item) for item in of_step)
            yield self._joiner.join(step, self._order.epoch_of(step), self._local_batch, parts)

    def _next(self, items: Iterator[Part], step: int, number: int) -> Part:
        """The next part, which is this iteration's n-th."""
        try:
            return next(items)
        except (RuntimeError, ConnectionError, EOFError) as error:
            if problem := self._worker_problem(error, step, number):
                raise problem from None
            raise

    def _worker_problem(self, error: Exception, step: int, number: int) -> Exception | None:
        """Translate torch's error of a stalled or dead loader worker, or a full /dev/shm; None for others."""
        text = str(error)
        if not self._loader.num_workers:
            return None
        if "unable to allocate shared memory" in text:
            return SmallSharedMemory(SHARED_MEMORY, f"is full. {_LARGER}")
        if "in DataLoader worker process" in text:
            return None  # an error of the data
        if "DataLoader timed out" in text:
            where = self._parts.progress(number)
            return StalledLoaderWorker(
                f"No batch for {self._timeout:g} s: step {step} {where}. "
                "Check that its storage responds, or wait longer with a larger --data.timeout."
            )
        if "DataLoader worker (pid" in text or not isinstance(error, RuntimeError):
            full = "Bus error" in f"{text} {error.__cause__}"
            advice = f"{SHARED_MEMORY} may be full. {_LARGER}" if full else _FEWER
            return DeadLoaderWorker(
                f"A loader worker died ({text.strip() or type(error).__name__}). {advice}"
            )
        return None


def _unchanged(part: Any) -> Any:
    return part


def leave_group(worker: int) -> None:
    """Leave the process group: signals of a launcher or Ctrl-C are for the trainer alone, which ends us."""
    os.setpgid(0, 0)
