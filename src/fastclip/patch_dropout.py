"""Patch dropout (FLIP, arXiv:2212.00794): in training, the image tower encodes some of an image's patches.

The towers' own patch dropout draws from torch's generator, so the patches would depend on ranks and
micro-batches. Ours takes its place and is given the patches, which the loader draws (`data/patches.py`).

Shapes: b images, n patches, k of them kept, p class and register tokens before them, d width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from open_clip.transformer import VisionTransformer
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn

from fastclip.data.patches import PatchChoice
from fastclip.errors import InputError, OptionError


class KeepPatches(nn.Module):
    """Keeps the patches that are given for one forward; all of them if none are given, as in evaluation."""

    def __init__(self, choice: PatchChoice, prefix: int, returns_patches: bool):
        super().__init__()
        self.choice, self.prefix, self.returns_patches = choice, prefix, returns_patches
        self._kept_bk: Tensor | None = None

    @contextmanager
    def keeping(self, kept_bk: Tensor | None) -> Iterator[None]:
        """Keep these patches of each image in what the tower encodes inside."""
        self._kept_bk = kept_bk
        try:
            yield
        finally:
            self._kept_bk = None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Tokens [b, p + n, d] → [b, p + k, d]."""
        kept_bk = self._kept_bk
        if kept_bk is not None:
            prefix_bpd, patches_bnd = x[:, : self.prefix], x[:, self.prefix :]
            if (found := patches_bnd.shape[1]) != self.choice.patches:  # a GPU would not say what is wrong
                problem = f"have {found} patches, but {self.choice.patches} were expected."
                raise InputError("images", f"{problem} Train without model.patch_dropout.")
            kept_bkd = patches_bnd.gather(1, kept_bk[..., None].expand(-1, -1, x.shape[-1]))
            x = torch.cat([prefix_bpd, kept_bkd], dim=1)
        return (x, kept_bk) if self.returns_patches else x


def drop_patches(clip: Any, share: float, name: str) -> KeepPatches:
    """Replace the patch dropout of the image tower by ours, which is returned; OptionError if it has none."""
    place = _find_place(clip.visual)
    if place is None:
        kind = type(getattr(clip.visual, "trunk", clip.visual)).__name__  # timm's, or open_clip's own
        raise OptionError(
            "model.patch_dropout",
            share,
            f"is not supported by the image tower of {name}, {kind}",
            advice="Omit it, or choose a vision transformer such as ViT-B-32.",
        )
    own = getattr(place.owner, place.attribute)
    if own is not None and not isinstance(own, nn.Identity):
        rule = f"conflicts with patch_dropout={own.prob} in the config of {name}"
        raise OptionError("model.patch_dropout", share, rule, advice="Remove one of them.")
    choice = PatchChoice(place.patches, kept=max(1, round(place.patches * (1 - share))))
    if choice.kept == choice.patches:
        rule = f"has no effect: it rounds to none of the {choice.patches} patches of {name}"
        raise OptionError("model.patch_dropout", share, rule, advice="Omit it, or choose a larger share.")
    keep = KeepPatches(choice, place.prefix, place.returns_patches)
    setattr(place.owner, place.attribute, keep)
    return keep


class _Place(NamedTuple):
    """Where a tower drops patches."""

    owner: nn.Module
    attribute: str
    prefix: int
    patches: int
    returns_patches: bool
    """Whether the tower needs the kept patches too, for rotary embeddings."""


def _find_place(visual: Any) -> _Place | None:
    if isinstance(visual, VisionTransformer):
        rows, columns = visual.grid_size
        return _Place(visual, "patch_dropout", 1, rows * columns, returns_patches=False)
    trunk = getattr(visual, "trunk", None)  # of open_clip's TimmModel
    if isinstance(trunk, TimmVisionTransformer | Eva):
        prefix, patches = trunk.num_prefix_tokens, trunk.patch_embed.num_patches
        return _Place(trunk, "patch_drop", prefix, patches, isinstance(trunk, Eva))
    return None
