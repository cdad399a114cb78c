"""Batches of pairs on torch's DataLoader: read, decoded, augmented and tokenised in loader workers.

A step's batch is a pure function of the collection, the seed and the step: each sample's randomness comes
from (seed, epoch, id), so neither the number of loader workers nor the world size changes a bit of it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from fastclip.data.caption_groups import caption_group
from fastclip.data.decode import Decoder
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.manifest import Manifest, Place
from fastclip.data.order import Order, Samples, seed_of
from fastclip.data.patches import PatchChoice
from fastclip.data.readers import UNUSABLE
from fastclip.data.tokenize import TextEnds
from fastclip.errors import InputError, OptionError

log = logging.getLogger(__name__)
_NEIGHBOURS = 32  # consecutive unusable samples before the search for a replacement stops


class BadSample(NamedTuple):
    """A pair that could not be used, and the reason."""

    id: int
    file: str
    reason: str


class TooManyBadSamples(RuntimeError):
    """More than `max_bad` of the collection cannot be used.

    `reasons` and `files` count the unusable pairs. A loader worker's error is rebuilt from its message alone:
    they are empty then.
    """

    def __init__(self, message: str, reasons: Mapping[str, int] = {}, files: Mapping[str, int] = {}):
        super().__init__(message)
        self.reasons, self.files = dict(reasons), dict(files)


class StalledLoaderWorker(RuntimeError):
    """A loader worker has sent nothing for too long."""


class DeadLoaderWorker(RuntimeError):
    """A loader worker has exited; it may have been killed."""


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step."""

    step: int
    epoch: int
    images: Tensor  # as the decoder returns them; `PairLoader.finish` brings them to the device
    tokens: Tensor
    lengths: list[int] | None  # of the captions, if their padding is left out: the tokens are cut then
    index: Tensor  # the ids of the pairs actually used: of a replaced pair, its replacement's
    group: Tensor  # equal numbers for equal captions
    bad: list[BadSample]
    patches: Tensor | None = None  # those to keep of each image, with patch dropout

    def pin_memory(self) -> Batch:
        """Called by DataLoader before a copy to a GPU."""
        pinned: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **pinned)


Tokenizer = Callable[[list[str]], Tensor]


class PairLoader:
    """Iterates over the local batches of steps [start_step, stop_step).

    Args:
        tokenizer: captions → token ids, as open_clip's tokenizers.
        workers: loader workers; 0 decodes in this process. Batches do not depend on it.
        decoded: the cache of decoded images, if there is one (`DecodedCache.open`).
        max_bad: fraction of the collection that may be unusable before the loader stops.
        timeout: seconds to wait for a batch before raising StalledLoaderWorker; 0 waits forever.
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
        self.decoder, self.bad = decoder, BadSampleLog(manifest, max_bad)
        self._start_step, self._timeout = start_step, timeout
        reading = manifest, order, decoder, tokenizer, ends, patches
        self._pairs = _StepDataset(*reading, rank, world_size, decoded, workers)
        self._loader = DataLoader(
            self._pairs,
            sampler=range(start_step, stop_step),
            batch_size=None,  # the dataset returns whole batches
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=torch.cuda.is_available(),
            timeout=timeout if workers else 0,
            prefetch_factor=4 if workers else None,
            generator=torch.Generator(),  # otherwise it draws from the process's own
            worker_init_fn=leave_group,
        )

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        for step in range(self._start_step, self._start_step + len(self._loader)):
            try:
                batch = next(batches)
            except (RuntimeError, ConnectionError, EOFError) as error:
                if problem := self._worker_problem(error, step):
                    raise problem from None
                raise
            self.bad.add(batch.bad)
            yield batch

    def _worker_problem(self, error: Exception, step: int) -> RuntimeError | None:
        """Translate torch's error of a stalled or dead loader worker; None for other errors."""
        text = str(error)
        if not self._loader.num_workers or "in DataLoader worker process" in text:
            return None  # an error of the data, raised here or sent by a loader worker
        if "DataLoader timed out" in text:
            where = self._pairs.progress(step - self._start_step)
            return StalledLoaderWorker(
                f"No batch for {self._timeout:g} s: step {step} {where}. "
                "Check that its storage responds, or wait longer with a larger --data.timeout."
            )
        if "DataLoader worker (pid" in text or not isinstance(error, RuntimeError):
            return DeadLoaderWorker(
                f"A loader worker died ({text.strip() or type(error).__name__}). "
                "If the machine ran out of memory, use fewer: --data.workers."
            )
        return None

    def finish(self, images: Tensor, device: torch.device) -> Tensor:
        """Bring a batch's images to the device, as normalised float32."""
        return self.decoder.finish(images, device)


class BadSampleLog:
    """Count samples that could not be used, log each once, and raise when there are too many.

    The limit applies to the whole collection, including pairs that indexing skipped. Each rank counts its own
    samples until the ranks exchange new ones (`take_new`).
    """

    def __init__(self, manifest: Manifest, max_bad: float):
        self.manifest, self.max_bad = manifest, max_bad
        self.left_out = sum(manifest.problem_counts.values())
        self.samples: dict[int, BadSample] = {}
        self._new: list[BadSample] = []
        self._check()

    def add(self, samples: Iterable[BadSample]) -> None:
        """Count and log those that are new."""
        for sample in samples:
            if sample.id not in self.samples:
                self.samples[sample.id] = sample
                self._new.append(sample)
                log.warning("sample %d of %s is skipped: %s", *sample)
        self._check()

    def take_new(self) -> list[BadSample]:
        """Return the samples found since the last call, for the other ranks."""
        new, self._new = self._new, []
        return new

    def restore(self, samples: Iterable[Sequence]) -> None:
        """Add samples that the run counted and logged before it was resumed."""
        self.samples |= {sample[0]: BadSample(*sample) for sample in samples}

    def summary(self) -> str:
        """One line for the end of a run: the number of unusable pairs, main reasons and worst files."""
        reasons, files = self._counts()
        if not reasons:
            return "All pairs could be used."
        why = ", ".join(f"{count:,} × {reason}" for reason, count in reasons.most_common(3))
        worst = ", ".join(f"{file} ({count:,})" for file, count in files.most_common(3))
        return f"{sum(reasons.values()):,} pairs could not be used: {why}. The worst files: {worst}."

    def _counts(self) -> tuple[Counter[str], Counter[str]]:
        """Unusable pairs by reason and by file, with those that indexing skipped."""
        reasons, files = Counter(sample.reason for sample in self.samples.values()), Counter[str]()
        for sample in self.samples:
            files[self.manifest.files[self.manifest.place(sample).file]] += 1
        for problem in self.manifest.problems():
            reasons[problem.reason] += problem.pairs
            files[problem.file] += problem.pairs
        return reasons, files

    def _check(self) -> None:
        if len(self.samples) + self.left_out > self.max_bad * (len(self.manifest) + self.left_out):
            message = (
                f"More than {self.max_bad:.1%} of the collection cannot be used. {self.summary()} "
                "Inspect the collection with `fastclip data check`, or allow more, e.g. --data.max_bad 0.05."
            )
            raise TooManyBadSamples(message, *self._counts())


class _StepDataset(Dataset):
    """Item t is the local batch of step t."""

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
    ):
        self.manifest, self.order, self.decoder = manifest, order, decoder
        self.tokenizer, self.ends, self.patches = tokenizer, ends, patches
        self.rank, self.world_size, self.decoded = rank, world_size, decoded
        self._reading = torch.full((max(1, workers),), -1).share_memory_()  # the sample of each loader worker

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
        tokens, lengths = self.tokenizer(captions), None
        if self.ends is not None:
            lengths = self.ends.lengths(tokens)
            tokens = self.ends.cut(tokens, lengths)
        stacked = default_collate(images)  # in a loader worker, directly into shared memory
        index, group = torch.tensor(ids), torch.tensor([caption_group(caption) for caption in captions])
        patches = None
        if self.patches is not None:
            patches = self.patches.draw(self.order.seed, Samples(index.numpy(), samples.epochs))
        return Batch(step, self.order.epoch_of(step), stacked, tokens, lengths, index, group, bad, patches)

    def progress(self, batch: int) -> str:
        """The state of this run's n-th batch, for messages: "waits for sample 17 of a.tar"."""
        sample = int(self._reading[batch % len(self._reading)])  # loader workers take turns
        if sample < 0:
            return "has not started"
        return f"waits for sample {sample} of {self.manifest.where(sample)}"

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
        caption = self.manifest.caption_at(place)
        if self.decoded is not None:
            return self.decoder.train_array(self.decoded.image(sample), seed), caption
        return self.decoder.train(self.manifest.image_at(place), seed), caption


def _unchanged(batch):
    return batch


def leave_group(worker: int) -> None:
    """Leave the process group: signals of a launcher or Ctrl-C are for the trainer alone, which ends us."""
    os.setpgid(0, 0)
