"""Features of every pair of a collection, encoded by all workers together, for whatever is measured on them.

Shapes: b images, m texts, d features. A caption of several lines is several texts of one image, as in
CLIP_benchmark's retrieval collections. Workers encode consecutive parts, cut between batches: a batch holds
the same pairs whatever the number of workers, and so gives the same features.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from fastclip.data.images import upright_rgb
from fastclip.data.loader import BadSample, Tokenizer
from fastclip.data.manifest import Manifest, Place
from fastclip.data.readers import UNUSABLE
from fastclip.evaluation.retrieval import recalls

log = logging.getLogger(__name__)


class TwoTowers(Protocol):
    """What holds an open_clip model, with its `encode_image` and `encode_text`."""

    clip: Any


class Features(NamedTuple):
    """Unit-length features in the collection's order, without the pairs that cannot be used."""

    image_bd: Tensor
    text_md: Tensor
    image_of_text: Tensor
    """m, the row of each text's image."""
    unusable: int
    """Pairs that were left out, over all workers; those that indexing left out are not among them."""


def encode_pairs(
    model: TwoTowers,
    manifest: Manifest,
    *,
    transform: Callable[[Image.Image], Tensor],
    tokenizer: Tokenizer,
    device: torch.device | str,
    batch_size: int = 256,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    autocast: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Features:
    """Features of a collection, the same on every worker; all `world_size` workers have to call it.

    The model is in evaluation mode meanwhile, and no random number is drawn.

    Args:
        transform: upright RGB image → tensor, as open_clip's `image_transform(…, is_train=False)`.
        tokenizer: texts → token ids, as open_clip's tokenizers.
        device: where the model is, and where the features will be.
        batch_size: images, and texts, that are encoded at once.
        workers: processes that decode; 0 decodes in this one. Results do not depend on it.
        rank, world_size: this worker's place in torch.distributed's default group; (0, 1) needs no group.
        autocast: the type that matrices are multiplied in; None is the model's own.
        progress: told (done, total) of this worker's pairs.
    """
    _check(batch_size, rank, world_size)
    device = torch.device(device)
    batches = _BatchDataset(manifest, transform, tokenizer, batch_size)
    first, last = (len(batches) * part // world_size for part in (rank, rank + 1))
    ends = [min(number * batch_size, len(manifest)) for number in range(first, last + 1)]
    loader = DataLoader(
        batches,
        sampler=range(first, last),
        batch_size=None,  # the data set makes whole batches
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # or it would draw from the process's own
    )
    dtype = next(model.clip.visual.parameters()).dtype
    # Before it was mended (after torch 2.9), a caller's autocast kept what was cast here, without gradients.
    casting = torch.autocast(device.type, autocast, enabled=autocast is not None, cache_enabled=False)
    parts, bad = [], []
    with _evaluating(model.clip), casting:
        for end, batch in zip(ends[1:], loader, strict=True):
            bad += batch.bad
            if len(batch.images):
                parts.append(_encode(model.clip, batch, device, dtype, batch_size))
            if progress:
                progress(end - ends[0], ends[-1] - ends[0])
    _report(bad, ends[-1] - ends[0])
    unusable = int(_gather(torch.tensor([len(bad)], device=device), world_size).sum())
    if unusable == len(manifest):
        raise ValueError(
            f"None of the {unusable:,} pairs of {manifest.files[0]} can be used; look at it with "
            "`fastclip data check`."
        )
    return Features(*_join(parts, device, dtype, world_size), unusable)


def validate(model: TwoTowers, manifest: Manifest, **how: Any) -> dict[str, float]:
    """Recalls of a collection's images and texts by each other; the options are those of `encode_pairs`."""
    features = encode_pairs(model, manifest, **how)
    return recalls(features.image_bd, features.text_md, features.image_of_text)


class _Batch(NamedTuple):
    images: Tensor
    tokens: Tensor  # of the first image's texts, then of the second's, …
    texts_b: Tensor  # how many texts each image has
    bad: list[BadSample]


class _BatchDataset(Dataset):
    """Item i holds the pairs from i·batch_size on; nothing but `bad` if none of them can be used."""

    def __init__(self, manifest: Manifest, transform: Callable, tokenizer: Tokenizer, batch_size: int):
        self.manifest, self.transform, self.tokenizer = manifest, transform, tokenizer
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.manifest) // self.batch_size)

    def __getitem__(self, number: int) -> _Batch:
        start = number * self.batch_size
        samples = np.arange(start, min(start + self.batch_size, len(self.manifest)))
        images, texts, counts, bad = [], [], [], []
        for sample, row in zip(samples.tolist(), self.manifest.find(samples), strict=True):
            place = Place(*row.item())
            try:
                lines = self.manifest.caption_at(place).split("\n")
                image = upright_rgb(self.manifest.image_at(place))
            except UNUSABLE as error:
                bad.append(BadSample(sample, self.manifest.where(sample), str(error)))
                continue
            lines = [line.strip() for line in lines if line.strip()]
            images.append(self.transform(image))
            texts += lines
            counts.append(len(lines))
        if not images:
            return _Batch(torch.empty(0), torch.empty(0), torch.empty(0), bad)
        return _Batch(default_collate(images), self.tokenizer(texts), torch.tensor(counts), bad)


def _as_it_is(batch):
    return batch


@contextmanager
def _evaluating(clip: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module has the mode it had, frozen ones theirs."""
    modes = [(module, module.training) for module in clip.modules()]
    clip.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _encode(
    clip: Any, batch: _Batch, device: torch.device, dtype: torch.dtype, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    image_bd = clip.encode_image(batch.images.to(device, dtype, non_blocking=True), normalize=True)
    tokens = batch.tokens.to(device, non_blocking=True)
    text_md = torch.cat([clip.encode_text(some, normalize=True) for some in tokens.split(most)])
    return image_bd, text_md, batch.texts_b.to(device)


def _report(bad: list[BadSample], pairs: int) -> None:
    if bad:
        reasons = Counter(sample.reason for sample in bad).most_common(3)
        why = ", ".join(f"{count:,} × {reason}" for reason, count in reasons)
        message = "%s of %s pairs are left out of the evaluation: %s. The first is sample %d of %s."
        log.warning(message, f"{len(bad):,}", f"{pairs:,}", why, bad[0].id, bad[0].file)


def _join(
    parts: list[tuple[Tensor, Tensor, Tensor]], device: torch.device, dtype: torch.dtype, world_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of all workers one after another, in float32 or float64, and the image of each text."""
    dtype = torch.promote_types(dtype, torch.float32)
    joined = []
    for which, kind in enumerate((dtype, dtype, torch.int64)):
        flat = [torch.empty(0, dtype=kind, device=device)]  # a worker may have no part, nor know the width
        flat += [part[which].flatten().to(kind) for part in parts]
        joined.append(_gather(torch.cat(flat), world_size))
    image, text, texts_b = joined
    image_bd = image.view(len(texts_b), -1)
    image_of_text = torch.arange(len(texts_b), device=device).repeat_interleave(texts_b)
    return image_bd, text.view(len(image_of_text), -1), image_of_text


def _gather(mine: Tensor, world_size: int) -> Tensor:
    """The elements of all workers in the order of their ranks; each may have another number of them."""
    if world_size == 1:
        return mine
    sizes = mine.new_empty(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(mine)], device=mine.device))
    most = int(sizes.max())
    gathered = mine.new_empty(world_size * most)
    dist.all_gather_into_tensor(gathered, nn.functional.pad(mine, (0, most - len(mine))))
    return torch.cat([part[:size] for part, size in zip(gathered.split(most), sizes.tolist(), strict=True)])


def _check(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be positive; try 256.")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must lie in [0, world_size={world_size}).")
    running = dist.is_available() and dist.is_initialized()
    group = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    if world_size > 1 and group != (rank, world_size):
        raise ValueError(
            f"rank={rank}, world_size={world_size}, but this is worker {group[0]} of {group[1]}; "
            "call torch.distributed.init_process_group first, or leave both out."
        )
