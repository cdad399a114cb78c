"""Batches of pairs on torch's DataLoader: read, decoded, augmented and tokenised in workers.

A step's batch is a pure function of the collection, the seed and the step: each sample's randomness comes
from (seed, epoch, id), so neither the number of workers nor the world size changes a bit of it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from fastclip.data.decode import Decoder
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.manifest import Manifest, Place
from fastclip.data.order import Order, seed_of
from fastclip.data.readers import UNUSABLE

log = logging.getLogger(__name__)
_NEIGHBOURS = 32  # how many samples in a row may be unusable before we stop looking for a replacement


class BadSample(NamedTuple):
    """A pair that could not be used, and why."""

    id: int
    file: str
    reason: str


class TooManyBadSamples(RuntimeError):
    """More than `max_bad` of the collection cannot be used."""


class StalledLoaderWorker(RuntimeError):
    """A reading process has brought nothing for too long."""


class DeadLoaderWorker(RuntimeError):
    """A reading process has ended, killed perhaps."""


@dataclass(frozen=True)
class Batch:
    """One worker's part of a step."""

    step: int
    epoch: int
    images: Tensor  # as the decoder makes them; `PairLoader.finish` brings them to the device
    tokens: Tensor
    index: Tensor  # the ids of the pairs that are really here: a replaced pair has its replacement's
    bad: list[BadSample]

    def pin_memory(self) -> Batch:
        """What DataLoader calls before a copy to a GPU."""
        pinned = {name: getattr(self, name).pin_memory() for name in ("images", "tokens", "index")}
        return replace(self, **pinned)


Tokenizer = Callable[[list[str]], Tensor]


class PairLoader:
    """Iterates over the local batches of steps [start_step, stop_step).

    Args:
        tokenizer: captions → token ids, as open_clip's tokenizers.
        workers: processes that decode; 0 decodes in this one. Results do not depend on it.
        kept: the collection's decoded images, if they are kept (`DecodedCache.open`).
        max_bad: share of the collection that may be unusable before the loader stops.
        timeout: seconds after which a stalled worker is an error; 0 waits for ever.
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
        kept: DecodedCache | None = None,
        max_bad: float = 0.01,
        timeout: float = 0,
    ):
        if order.n != len(manifest):
            raise ValueError(f"The order is for {order.n:,} samples, the manifest has {len(manifest):,}.")
        if not 0 <= max_bad < 1:
            raise ValueError(f"max_bad={max_bad} must lie in [0, 1); try 0.01.")
        self.decoder, self.bad = decoder, BadSampleLog(manifest, max_bad)
        self._start_step, self._timeout = start_step, timeout
        self._pairs = _StepDataset(manifest, order, decoder, tokenizer, rank, world_size, kept, workers)
        self._loader = DataLoader(
            self._pairs,
            sampler=range(start_step, stop_step),
            batch_size=None,  # the data set makes whole batches
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
            timeout=timeout if workers else 0,
            prefetch_factor=4 if workers else None,
            generator=torch.Generator(),  # or it would draw from the process's own
            worker_init_fn=leave_group,
        )

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        for step in range(self._start_step, self._start_step + len(self._loader)):
            try:
                batch = next(batches)
            except (RuntimeError, ConnectionError, EOFError) as error:
                if problem := self._problem_of_a_reader(error, step):
                    raise problem from None
                raise
            self.bad.add(batch.bad)
            yield batch

    def _problem_of_a_reader(self, error: Exception, step: int) -> RuntimeError | None:
        """What torch says of a reading process that stalls or is gone, in our words; None of other errors."""
        text = str(error)
        if not self._loader.num_workers or "in DataLoader worker process" in text:
            return None  # an error of the data: read here, or sent by the process
        if "DataLoader timed out" in text:
            where = self._pairs.progress(step - self._start_step)
            return StalledLoaderWorker(
                f"No batch for {self._timeout:g} s: step {step} {where}. "
                "Look whether that storage answers, or wait longer with a larger data.timeout."
            )
        if "DataLoader worker (pid" in text or not isinstance(error, RuntimeError):
            return DeadLoaderWorker(
                f"A process that reads data has died ({text.strip() or type(error).__name__}). "
                "If the machine ran out of memory, try a smaller data.workers."
            )
        return None

    def finish(self, images: Tensor, device: torch.device) -> Tensor:
        """A batch's images on the device, as float32 with mean and deviation taken out."""
        return self.decoder.finish(images, device)


class BadSampleLog:
    """Counts the samples that could not be used, names each once, and stops when they are too many.

    The limit is that of the whole collection: pairs that indexing left out count. With several workers each
    counts what it met itself until they tell each other what is new.
    """

    def __init__(self, manifest: Manifest, max_bad: float):
        self.manifest, self.max_bad = manifest, max_bad
        self.left_out = sum(manifest.problem_counts.values())
        self.samples: dict[int, BadSample] = {}
        self._new: list[BadSample] = []
        self._check()

    def add(self, samples: Iterable[BadSample]) -> None:
        """Count these, if they are new, and name them."""
        for sample in samples:
            if sample.id not in self.samples:
                self.samples[sample.id] = sample
                self._new.append(sample)
                log.warning("sample %d of %s is left out: %s", *sample)
        self._check()

    def take_new(self) -> list[BadSample]:
        """Those found since the last call, for the other workers."""
        new, self._new = self._new, []
        return new

    def restore(self, samples: Iterable[Sequence]) -> None:
        """What an earlier process of the run had counted, and named."""
        self.samples |= {sample[0]: BadSample(*sample) for sample in samples}

    def summary(self) -> str:
        """One line for the end of a run: how many, why, and where most of them are."""
        reasons, files = Counter(sample.reason for sample in self.samples.values()), Counter[str]()
        for sample in self.samples:
            files[self.manifest.files[self.manifest.place(sample).file]] += 1
        for problem in self.manifest.problems():
            reasons[problem.reason] += problem.pairs
            files[problem.file] += problem.pairs
        if not reasons:
            return "Every pair could be used."
        why = ", ".join(f"{count:,} × {reason}" for reason, count in reasons.most_common(3))
        worst = ", ".join(f"{file} ({count:,})" for file, count in files.most_common(3))
        return f"{sum(reasons.values()):,} pairs could not be used: {why}. The worst files: {worst}."

    def _check(self) -> None:
        if len(self.samples) + self.left_out > self.max_bad * (len(self.manifest) + self.left_out):
            raise TooManyBadSamples(
                f"More than {self.max_bad:.1%} of the collection is broken. {self.summary()} "
                "Look at it with `fastclip data check`, or allow more with a larger max_bad."
            )


class _StepDataset(Dataset):
    """Item t is the local batch of step t."""

    def __init__(
        self,
        manifest: Manifest,
        order: Order,
        decoder: Decoder,
        tokenizer: Tokenizer,
        rank: int,
        world_size: int,
        kept: DecodedCache | None,
        workers: int,
    ):
        self.manifest, self.order, self.decoder, self.tokenizer = manifest, order, decoder, tokenizer
        self.rank, self.world_size, self.kept = rank, world_size, kept
        self._reading = torch.full((max(1, workers),), -1).share_memory_()  # each process's sample

    def __getitem__(self, step: int) -> Batch:
        samples = self.order.local_batch(step, self.rank, self.world_size)
        bad: list[BadSample] = []
        images, captions, ids = [], [], []
        rows = self.manifest.find(samples.ids)
        for sample, epoch, row in zip(samples.ids.tolist(), samples.epochs.tolist(), rows, strict=True):
            image, caption, used = self._load(sample, epoch, Place(*row.item()), bad)
            images.append(image)
            captions.append(caption)
            ids.append(used)
        tokens = self.tokenizer(captions)
        stacked = default_collate(images)  # in a worker, straight into the memory that it shares
        return Batch(step, self.order.epoch_of(step), stacked, tokens, torch.tensor(ids), bad)

    def progress(self, batch: int) -> str:
        """How far this run's n-th batch is, for messages: "waits for sample 17 of a.tar"."""
        sample = int(self._reading[batch % len(self._reading)])  # DataLoader's processes take turns
        if sample < 0:
            return "has not begun"
        return f"waits for sample {sample} of {self.manifest.where(sample)}"

    def _load(self, sample: int, epoch: int, place: Place, bad: list[BadSample]) -> tuple[Tensor, str, int]:
        """The pair itself, or else its next usable neighbour."""
        process = get_worker_info()
        for step in range(_NEIGHBOURS):
            candidate = (sample + step) % len(self.manifest)
            if step:
                place = self.manifest.place(candidate)
            self._reading[0 if process is None else process.id] = candidate
            seed = seed_of(self.order.seed, epoch, candidate)
            try:
                return (*self._pair(candidate, place, seed), candidate)
            except UNUSABLE as error:
                bad.append(BadSample(candidate, self.manifest.where(candidate), str(error)))
        raise TooManyBadSamples(
            f"{_NEIGHBOURS} neighbouring pairs from {sample} on cannot be used; the last, in {bad[-1].file}: "
            f"{bad[-1].reason}. Check the collection with `fastclip data check`."
        )

    def _pair(self, sample: int, place: Place, seed: int) -> tuple[Tensor, str]:
        caption = self.manifest.caption_at(place)
        if self.kept is not None:
            return self.decoder.train_array(self.kept.image(sample), seed), caption
        return self.decoder.train(self.manifest.image_at(place), seed), caption


def _as_it_is(batch):
    return batch


def leave_group(worker: int) -> None:
    """What a launcher or Ctrl-C sends to the whole process group is for the trainer, which then ends us."""
    os.setpgid(0, 0)
