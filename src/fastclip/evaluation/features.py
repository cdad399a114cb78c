"""Features of images and texts, encoded by all workers together, for whatever is measured on them.

Shapes: b images, m texts, d features. Workers encode consecutive parts, cut between batches: a batch holds
the same images whatever the number of workers, and so gives the same features. Every worker gets all of them.
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
from torch.utils.data import DataLoader, Dataset, default_collate

from fastclip.data.images import upright_rgb
from fastclip.data.loader import BadSample, Tokenizer, leave_group
from fastclip.data.manifest import Manifest, caption_lines
from fastclip.data.readers import UNUSABLE
from fastclip.distributed.world import World
from fastclip.model import TwoTowers

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # is given what is done, and the total


class Pictures(Protocol):
    """Images by number."""

    def __len__(self) -> int: ...

    def image(self, number: int) -> bytes:
        """The bytes of its file."""

    def where(self, number: int) -> str:
        """The file that a person should look at when it is broken."""


class ImageFeatures(NamedTuple):
    """Unit-length features of the images that can be used, in their order."""

    image_bd: Tensor
    kept_b: Tensor  # the number of each row's image
    bad: list[BadSample]  # images that could not be used, over all workers


class Features(NamedTuple):
    """Unit-length features of a collection's pairs in its order, without those that cannot be used."""

    image_bd: Tensor
    text_md: Tensor
    image_of_text: Tensor  # m, the row of each text's image
    unusable: int  # pairs left out, over all workers; those that indexing left out are not among them


class Encoder:
    """Encodes with one model; all workers of the world have to call it alike.

    The model is in evaluation mode meanwhile, and no random number is drawn.

    Args:
        model: on the world's device, where the features will be too.
        transform: upright RGB image → tensor; the model's own if left out.
        tokenizer: texts → token ids; the model's own if left out.
        batch_size: images, and texts, that are encoded at once.
        workers: processes that decode; 0 decodes in this one. Results do not depend on it.
        autocast: the type that matrices are multiplied in; None is the model's own.
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
        autocast: torch.dtype | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be positive; try 256.")
        self.clip, self.world = model.clip, world
        self.transform = transform or model.eval_transform()
        self.tokenizer = tokenizer or model.tokenizer()
        self.device, self.autocast = world.device, autocast
        self.batch_size, self.workers = batch_size, workers
        self.dtype = next(model.clip.visual.parameters()).dtype

    def images(self, pictures: Pictures, progress: Progress | None = None) -> ImageFeatures:
        """Features of all images but the broken ones, which are named; none at all is an error."""
        batches = self._batches(len(pictures))
        start, stop = batches.start * self.batch_size, min(batches.stop * self.batch_size, len(pictures))
        loader = DataLoader(
            _ImageBatches(pictures, self.transform, self.batch_size),
            sampler=batches,
            batch_size=None,  # the data set makes whole batches
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # or it would draw from the process's own
            worker_init_fn=leave_group,
        )
        parts, kept, bad = [], [torch.empty(0, dtype=torch.int64)], []
        with self._failing_together(), self._evaluating():
            for number, (images, kept_b, unusable) in zip(batches, loader, strict=True):
                bad += unusable
                if len(kept_b):
                    parts.append(self._encode_images(images.to(self.device, self.dtype, non_blocking=True)))
                    kept.append(kept_b)
                if progress:
                    progress(min((number + 1) * self.batch_size, stop) - start, stop - start)
        _report(bad, stop - start)
        everyones = [one for each in self.world.gather(bad) for one in each]
        if len(everyones) == len(pictures):
            raise ValueError(
                f"None of the {len(pictures):,} images of {pictures.where(0)} can be used; the first: "
                f"{everyones[0].reason}. Look at it with `fastclip data check`."
            )
        kept_b = _gather(torch.cat(kept).to(self.device), self.world.size)
        return ImageFeatures(self._joined(parts, len(kept_b)), kept_b, everyones)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Features of all texts."""
        parts = []
        with self._failing_together(), self._evaluating():
            for number in self._batches(len(texts)):
                start = number * self.batch_size
                tokens = self.tokenizer(list(texts[start : start + self.batch_size]))
                _check_tokens(tokens, self.clip)
                parts.append(self.clip.encode_text(tokens.to(self.device, non_blocking=True), normalize=True))
        return self._joined(parts, len(texts))

    def captions(self, captions: Sequence[list[str]]) -> tuple[Tensor, Tensor]:
        """Features of every image's captions, image after image; and for each text the row of its image."""
        counts = torch.tensor([len(lines) for lines in captions], device=self.device)
        image_of_text = torch.arange(len(captions), device=self.device).repeat_interleave(counts)
        return self.texts([line for lines in captions for line in lines]), image_of_text

    def pairs(self, manifest: Manifest, progress: Progress | None = None) -> Features:
        """Features of a collection; a caption of several lines is several texts of one image."""
        found = self.images(_Pairs(manifest), progress)
        kept = map(manifest.place, found.kept_b.tolist())
        text_md, image_of_text = self.captions([caption_lines(manifest.caption_at(place)) for place in kept])
        return Features(found.image_bd, text_md, image_of_text, len(found.bad))

    def all_agree(self, mine: bool) -> bool:
        """Whether it is so on every worker."""
        return all(self.world.gather(mine))

    def _batches(self, items: int) -> range:
        """The batches of this worker."""
        batches, rank = -(-items // self.batch_size), self.world.rank
        return range(batches * rank // self.world.size, batches * (rank + 1) // self.world.size)

    def _encode_images(self, images: Tensor) -> Tensor:
        try:
            return self.clip.encode_image(images, normalize=True)
        except (RuntimeError, AssertionError) as error:  # open_clip's and timm's
            size, given = self.clip.visual.image_size, tuple(images.shape[-2:])
            wanted = (size, size) if isinstance(size, int) else tuple(size)
            if given == wanted:
                raise
            raise ValueError(
                f"The model takes images of {wanted[0]} x {wanted[1]} pixels, and the transform makes "
                f"{given[0]} x {given[1]}; use the model's own (`TwoTowers.eval_transform`)."
            ) from error

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """An error of one worker is raised on all; or they would wait for features that never come."""
        try:
            yield
        except Exception as error:
            self.world.gather(f"{type(error).__name__}: {error}")
            raise
        if told := next(filter(None, self.world.gather("")), None):
            raise RuntimeError(f"Another worker failed: {told}")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; afterwards every module has the mode it had."""
        modes = [(module, module.training) for module in self.clip.modules()]
        self.clip.eval()
        # Up to torch 2.9 a caller's autocast kept what was cast here, without gradients.
        on = self.autocast is not None
        casting = torch.autocast(self.device.type, self.autocast, enabled=on, cache_enabled=False)
        try:
            with torch.inference_mode(), casting:
                yield
        finally:
            for module, training in modes:
                module.training = training

    def _joined(self, parts: list[Tensor], rows: int) -> Tensor:
        """Features of all workers one after another, in float32 or float64."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        nothing = torch.empty(0, dtype=dtype, device=self.device)  # of a worker without a part
        flat = torch.cat([nothing, *(part.flatten().to(dtype) for part in parts)])
        features = _gather(flat, self.world.size).view(rows, -1)
        if not features.isfinite().all():
            raise ValueError("The model's features are not finite; its weights may be broken, or overflow.")
        return features


class _Pairs:
    """A manifest's images; one without a usable caption is as bad as a broken one."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest

    def __len__(self) -> int:
        return len(self.manifest)

    def image(self, number: int) -> bytes:
        place = self.manifest.place(number)
        self.manifest.caption_at(place)
        return self.manifest.image_at(place)

    def where(self, number: int) -> str:
        return self.manifest.where(number)


class _ImageBatches(Dataset):
    """Item i holds the images from i·batch_size on that can be used, their numbers, and the bad ones."""

    def __init__(self, pictures: Pictures, transform: Callable, batch_size: int):
        self.pictures, self.transform, self.batch_size = pictures, transform, batch_size

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, list[BadSample]]:
        start = number * self.batch_size
        images, kept, bad = [], [], []
        for i in range(start, min(start + self.batch_size, len(self.pictures))):
            try:
                image = upright_rgb(self.pictures.image(i))
            except UNUSABLE as error:
                bad.append(BadSample(i, self.pictures.where(i), str(error)))
                continue
            images.append(self.transform(image))
            kept.append(i)
        stacked = default_collate(images) if images else torch.empty(0)
        return stacked, torch.tensor(kept, dtype=torch.int64), bad


def _check_tokens(tokens: Tensor, clip: Any) -> None:
    """On the host: a GPU that meets an id without an embedding is lost to the process."""
    longest, words = getattr(clip, "context_length", 0), getattr(clip, "vocab_size", 0)  # 0 is not known
    length, highest = tokens.shape[1], int(tokens.max())
    if (longest and length > longest) or (words and highest >= words):
        raise ValueError(
            f"The model takes {longest} tokens of a vocabulary of {words:,}, and the tokenizer makes "
            f"{length} with ids up to {highest:,}; use the model's own (`TwoTowers.tokenizer`)."
        )


def _report(bad: list[BadSample], images: int) -> None:
    if bad:
        reasons = Counter(sample.reason for sample in bad).most_common(3)
        why = ", ".join(f"{count:,} × {reason}" for reason, count in reasons)
        message = "%s of %s images are left out of the evaluation: %s. The first is number %d, in %s."
        log.warning(message, f"{len(bad):,}", f"{images:,}", why, bad[0].id, bad[0].file)


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
