"""Features of images and texts, encoded by all ranks together.

Shapes: b images, m texts, d features. Ranks encode consecutive parts, cut between batches: a batch holds the
same images for any number of ranks, and so gives the same features. Every rank gets all features.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from fastclip.data.bad_samples import BadSample
from fastclip.data.batch_parts import Tokenizer
from fastclip.data.images import upright_rgb
from fastclip.data.loader_workers import LoaderWorkers
from fastclip.data.machine import Share
from fastclip.data.manifest import Manifest
from fastclip.data.pairs import caption_lines
from fastclip.data.prefetch import whole_batches
from fastclip.data.readers import UNUSABLE
from fastclip.distributed.world import World
from fastclip.errors import CommandError, InputError, OptionError, PathError
from fastclip.model import TwoTowers
from fastclip.precision import computing_in

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # takes (done, total)


class Images(Protocol):
    """Images by number."""

    def __len__(self) -> int: ...

    def image(self, number: int) -> bytes:
        """The bytes of the image's file."""

    def where(self, number: int) -> str:
        """The file to name in an error about this image."""


class ImageFeatures(NamedTuple):
    """Unit-length features of the usable images, in order."""

    image_bd: Tensor
    kept_b: Tensor  # the number of each row's image
    bad: list[BadSample]  # images that could not be used, on all ranks


class Features(NamedTuple):
    """Unit-length features of a collection's usable pairs, in order."""

    image_bd: Tensor
    text_md: Tensor
    image_of_text: Tensor  # m, the row of each text's image
    unusable: int  # pairs skipped on all ranks, not counting those that indexing skipped


class Encoder:
    """Encodes with one model; all ranks must make the same calls.

    The model is in evaluation mode meanwhile, and no random numbers are drawn.

    Args:
        model: on the world's device; features are on it too.
        transform: upright RGB image → tensor; default: the model's own.
        tokenizer: texts → token ids; default: the model's own.
        batch_size: images, and texts, per batch.
        workers: loader workers; 0 decodes in this process. Results do not depend on it.
        precision: of matrix products and convolutions: float32, tf32, bfloat16, float16 or float64.
        formats: of images, as in `upright_rgb`.
    """

    def __init__(
        self,
        model: TwoTowers,
        world: World,
        *,
        transform: Callable[[Image.Image], Tensor] | None = None,
        tokenizer: Tokenizer | None = None,
        batch_size: int = 256,
        workers: int = 0,
        precision: str = "float32",
        formats: Sequence[str] = (),
    ):
        if batch_size < 1:
            raise OptionError("batch_size", batch_size, "must be at least 1", example=256)
        self.model, self.clip, self.world = model, model.clip, world
        self.transform = transform or model.eval_transform()
        self.tokenizer = tokenizer or model.tokenizer()
        self.device, self.precision = world.device, precision
        self.batch_size, self.workers, self.formats = batch_size, workers, tuple(formats)
        self.dtype = next(model.clip.visual.parameters()).dtype

    def images(self, images: Images, progress: Progress | None = None) -> ImageFeatures:
        """Features of the usable images; the others are listed in `bad`. It is an error if none is usable."""
        batches = self._batches(len(images))
        start, stop = batches.start * self.batch_size, min(batches.stop * self.batch_size, len(images))
        workers, in_flight = self._prefetch()
        loader = LoaderWorkers(
            _ImageBatches(images, self.transform, self.batch_size, self.formats),
            batches,
            workers=workers,
            per_worker=in_flight,
            pin_memory=self.device.type == "cuda",
        )
        parts, kept, bad = [], [torch.empty(0, dtype=torch.int64)], []
        with self._failing_together(), self._evaluating():
            for number, (pixels, kept_b, unusable) in zip(batches, loader, strict=True):
                bad += unusable
                if len(kept_b):
                    parts.append(self._encode_images(pixels.to(self.device, self.dtype, non_blocking=True)))
                    kept.append(kept_b)
                if progress:
                    progress(min((number + 1) * self.batch_size, stop) - start, stop - start)
        _report(bad, stop - start)
        all_bad = [sample for of_rank in self.world.gather(bad) for sample in of_rank]
        if len(all_bad) == len(images):
            raise PathError(
                images.where(0),
                f": {all_bad[0].reason}; none of the {len(images):,} images can be used. Inspect them with "
                "`fastclip data check`.",
            )
        kept_b = _gather(torch.cat(kept).to(self.device), self.world.size)
        return ImageFeatures(self._joined(parts, len(kept_b)), kept_b, all_bad)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Features of all texts."""
        parts = []
        with self._failing_together(), self._evaluating():
            for number in self._batches(len(texts)):
                start = number * self.batch_size
                tokens = self.tokenizer(list(texts[start : start + self.batch_size]))
                _check_tokens(tokens, self.clip)
                parts.append(self.model.encode_text(tokens))
        return self._joined(parts, len(texts))

    def captions(self, captions: Sequence[list[str]]) -> tuple[Tensor, Tensor]:
        """Features of all captions, image by image; and for each text the row of its image."""
        counts = torch.tensor([len(lines) for lines in captions], device=self.device)
        image_of_text = torch.arange(len(captions), device=self.device).repeat_interleave(counts)
        return self.texts([line for lines in captions for line in lines]), image_of_text

    def pairs(self, manifest: Manifest, progress: Progress | None = None) -> Features:
        """Features of a collection; a caption of several lines is several texts of one image."""
        images = self.images(_Pairs(manifest), progress)
        kept = map(manifest.place, images.kept_b.tolist())
        text_md, image_of_text = self.captions([caption_lines(manifest.caption_at(place)) for place in kept])
        return Features(images.image_bd, text_md, image_of_text, len(images.bad))

    def all_agree(self, mine: bool) -> bool:
        """Whether it is true on every rank."""
        return all(self.world.gather(mine))

    def _batches(self, items: int) -> range:
        """The batches of this rank."""
        batches, rank = -(-items // self.batch_size), self.world.rank
        return range(batches * rank // self.world.size, batches * (rank + 1) // self.world.size)

    def _prefetch(self) -> tuple[int, int]:
        """Loader workers, and batches in flight for each."""
        size = self.clip.visual.image_size
        height, width = (size, size) if isinstance(size, int) else size
        batch_bytes = self.batch_size * 3 * height * width * torch.float32.itemsize
        return whole_batches(batch_bytes, self.workers, Share.of(self.world).shared_memory)

    def _encode_images(self, pixels: Tensor) -> Tensor:
        try:
            return self.clip.encode_image(pixels, normalize=True)
        except (RuntimeError, AssertionError) as error:  # open_clip's and timm's
            size, given = self.clip.visual.image_size, tuple(pixels.shape[-2:])
            expected = (size, size) if isinstance(size, int) else tuple(size)
            if given == expected:
                raise
            raise InputError(
                "transform",
                f"makes images of {given[0]} x {given[1]} pixels, but the model takes {expected[0]} x "
                f"{expected[1]}; use the model's own (`TwoTowers.eval_transform`).",
            ) from error

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raise an error of one rank on all; otherwise they would wait for features that never come."""
        try:
            yield
        except Exception as error:
            self.world.gather(f"{type(error).__name__}: {error}")
            raise
        if failure := next(filter(None, self.world.gather("")), None):
            raise CommandError(f"another rank failed: {failure}")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; afterwards every module's mode is restored."""
        modes = [(module, module.training) for module in self.clip.modules()]
        self.clip.eval()
        try:
            with torch.inference_mode(), computing_in(self.precision, self.device):
                yield
        finally:
            for module, training in modes:
                module.training = training

    def _joined(self, parts: list[Tensor], rows: int) -> Tensor:
        """Features of all ranks, in rank order, in float32 or float64."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        nothing = torch.empty(0, dtype=dtype, device=self.device)  # of a rank without batches
        flat = torch.cat([nothing, *(part.flatten().to(dtype) for part in parts)])
        features = _gather(flat, self.world.size).view(rows, -1)
        if not features.isfinite().all():
            raise InputError(
                "model", "gives features that are not finite: its weights are damaged, or overflow."
            )
        return features


class _Pairs:
    """The images of a manifest; those without a usable caption count as unusable."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest

    def __len__(self) -> int:
        return len(self.manifest)

    def image(self, number: int) -> bytes:
        return self.manifest.pair_at(self.manifest.place(number)).image

    def where(self, number: int) -> str:
        return self.manifest.where(number)


class _ImageBatches(Dataset):
    """Item i is batch i: the usable images, their numbers, and the bad samples."""

    def __init__(self, images: Images, transform: Callable, batch_size: int, formats: Sequence[str]):
        self.images, self.transform, self.batch_size, self.formats = images, transform, batch_size, formats

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, list[BadSample]]:
        start = number * self.batch_size
        pixels, kept, bad = [], [], []
        for i in range(start, min(start + self.batch_size, len(self.images))):
            try:
                image = upright_rgb(self.images.image(i), formats=self.formats)
            except UNUSABLE as error:
                bad.append(BadSample(i, self.images.where(i), str(error)))
                continue
            pixels.append(self.transform(image))
            kept.append(i)
        stacked = default_collate(pixels) if pixels else torch.empty(0)
        return stacked, torch.tensor(kept, dtype=torch.int64), bad


def _check_tokens(tokens: Tensor, clip: Any) -> None:
    """Check on the host: an id without an embedding makes a GPU unusable for the rest of the process."""
    longest, vocabulary = getattr(clip, "context_length", 0), getattr(clip, "vocab_size", 0)  # 0: unknown
    length, highest = tokens.shape[1], int(tokens.max())
    if (longest and length > longest) or (vocabulary and highest >= vocabulary):
        raise InputError(
            "tokenizer",
            f"makes {length} tokens with ids up to {highest:,}, but the model takes {longest} tokens of a "
            f"vocabulary of {vocabulary:,}; use the model's own (`TwoTowers.tokenizer`).",
        )


def _report(bad: list[BadSample], images: int) -> None:
    if bad:
        reasons = Counter(sample.reason for sample in bad).most_common(3)
        why = ", ".join(f"{count:,} × {reason}" for reason, count in reasons)
        message = "Skipped %s of %s images: %s. The first is number %d, in %s."
        log.warning(message, f"{len(bad):,}", f"{images:,}", why, bad[0].id, bad[0].file)


def _gather(mine: Tensor, world_size: int) -> Tensor:
    """The elements of all ranks, in rank order; their numbers may differ."""
    if world_size == 1:
        return mine
    sizes = mine.new_empty(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(mine)], device=mine.device))
    most = int(sizes.max())
    gathered = mine.new_empty(world_size * most)
    dist.all_gather_into_tensor(gathered, nn.functional.pad(mine, (0, most - len(mine))))
    return torch.cat([part[:size] for part, size in zip(gathered.split(most), sizes.tolist(), strict=True)])
