"""Parts of a batch joined on the device that trains, on a GPU while the step before computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fastclip.data.bad_samples import BadSample
from fastclip.data.batch_parts import Labels, Part
from fastclip.data.tokenize import TextEnds

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step."""

    step: int
    epoch: int
    images: Tensor  # as the decoder returns them, on the device; `Decoder.finish` normalises them
    tokens: Tensor  # on the device
    lengths: list[int] | None  # of the captions, if their padding is left out: the tokens are cut then
    index: Tensor  # the ids of the pairs actually used: of a replaced pair, its replacement's; on the host
    group: Tensor  # equal numbers for equal captions; on the host
    bad: list[BadSample]
    patches: Tensor | None = None  # those to keep of each image, with patch dropout; on the device
    copied: torch.cuda.Event | None = None  # the end of the copy to a GPU

    def arrived(self) -> Batch:
        """Make the current stream wait for the copy; the host does not."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.images.device)
            stream.wait_event(self.copied)
            for tensor in (self.images, self.tokens, self.patches):
                if tensor is not None:
                    tensor.record_stream(stream)  # its memory was allocated on the copying stream
        return self


class Joiner:
    """Copies parts to the device one at a time, each to its rows: a part's memory is free at once.

    On a GPU the copies run on a stream of their own, from pinned memory: nothing waits for them until
    `Batch.arrived`.
    """

    def __init__(self, device: torch.device, ends: TextEnds | None):
        self.device, self.ends = device, ends
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def join(self, step: int, epoch: int, pairs: int, parts: Iterable[Part]) -> Batch:
        """Join the parts of a step, in their order, to a batch of `pairs` pairs."""
        images, labels = self._join_images(pairs, parts)
        tokens, lengths = _joined([one.tokens_pT for one in labels]), None
        if self.ends is not None:
            lengths = [length for one in labels for length in one.lengths or ()]
            tokens = self.ends.cut(tokens, lengths)
        patches = [one.patches_pk for one in labels if one.patches_pk is not None]
        return Batch(
            step,
            epoch,
            images,
            self._small(tokens),
            lengths,
            _joined([one.index_p for one in labels]),
            _joined([one.group_p for one in labels]),
            [sample for one in labels for sample in one.bad],
            self._small(_joined(patches)) if patches else None,
            None if self._stream is None else self._stream.record_event(),
        )

    def _join_images(self, pairs: int, parts: Iterable[Part]) -> tuple[Tensor, list[Labels]]:
        images, labels, done = torch.empty(0), list[Labels](), 0
        for part in parts:
            labels.append(part.labels)
            if self._stream is None and len(part.images) == pairs:
                return part.images, labels  # the whole batch, where it is
            with self._copying():
                if not done:
                    shape, dtype = part.images.shape[1:], part.images.dtype
                    images = torch.empty((pairs, *shape), dtype=dtype, device=self.device)
                rows = images[done : done + len(part.images)]
                rows.copy_(part.images, non_blocking=True)
            done += len(part.images)
            del part  # before the next one is fetched
        return images, labels

    def _small(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor
        with self._copying():
            return tensor.pin_memory().to(self.device, non_blocking=True)

    def _copying(self) -> AbstractContextManager:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def one_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, each after the next one was fetched; an error comes after the items before it."""
    ready: deque[Item] = deque()
    failure: Exception | None = None
    while True:
        try:
            ready.append(next(items))
        except StopIteration:
            break
        except Exception as error:
            failure = error
            break
        if len(ready) > 1:
            yield ready.popleft()
    while ready:
        yield ready.popleft()
    if failure is not None:
        raise failure


def _joined(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
