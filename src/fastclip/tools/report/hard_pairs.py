"""The pairs that a model finds hardest, and those it confuses with each other.

Shapes: b images with a caption each, d features; s_ij is the cosine of image i and caption j. Up to 5,000
pairs are compared, in tiles: the b×b similarities are never all in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastclip.tools.report.search_examples import Thumbnail, thumbnail_of
from fastclip.tools.search.index import Index

MAX_PAIRS = 5_000
HARDEST, CONFUSED = 12, 12  # shown on a page
_TILE = 1024
Ranked = list[tuple[float, int, int]]  # value, image, caption; highest values first


class HardPair(NamedTuple):
    """An image whose own caption does not stand out."""

    thumbnail: Thumbnail
    log_g: float
    """How much the other pairs weigh against this one, averaged over both directions."""
    caption_place: int
    """The position of its own caption among all captions, from 1; equal captions do not count."""
    image_place: int
    """The position of its own image among all images."""


class ConfusedPair(NamedTuple):
    """Two samples that the model confuses: with equal captions they are false negatives of the loss."""

    image: Thumbnail
    other: Thumbnail
    similarity: float
    """The cosine of the image and the other's caption."""
    own: float
    """The cosine of the image and its own caption."""
    equal: bool
    """Both have the same caption."""


class HardPairs(NamedTuple):
    """Hard pairs and most confused pairs of a collection."""

    pairs: int
    """Pairs compared."""
    total: int
    """All pairs; only the first 5,000 are compared."""
    hardest: list[HardPair]
    confused: list[ConfusedPair]
    """Equal captions first."""
    equal: int
    """Pairs of samples with the same caption."""
    exceeding: int
    """Cases in which a different caption fits an image better than its own."""


class Comparison(NamedTuple):
    """Values for every pair, and the most confused pairs as (image, caption) rows.

    With different captions, two samples are confused if each image fits the other's caption better than its
    own. One direction alone is not enough: an image that the model misreads fits any caption better.
    """

    log_g_b: Tensor
    caption_place_b: Tensor
    image_place_b: Tensor
    equal_pairs: list[tuple[int, int]]
    better_pairs: list[tuple[int, int]]
    equal: int
    exceeding: int


def find_hard_pairs(
    index: Index, progress: Callable[[int, int], None], most: int = MAX_PAIRS
) -> HardPairs | None:
    """Compare images by the first caption of each; None if fewer than two images have a caption.

    Args:
        progress: called with (done, total) pairs.
        most: compare only this many pairs.
    """
    captioned = [(row, number, captions[0])
                 for row, number in enumerate(index.features.kept_b.tolist())
                 if (captions := index.pictures.pictures[number].captions)]  # fmt: skip
    if len(captioned) < 2:
        return None
    chosen = captioned[:most]
    code_of = {caption: code for code, caption in enumerate(index.captions)}
    image_bd = index.features.image_bd[torch.tensor([row for row, _, _ in chosen])].float()
    code_b = torch.tensor([code_of[caption] for _, _, caption in chosen], device=image_bd.device)
    text_bd = index.caption_features().to(image_bd.device).float()[code_b]
    tau = 1 / float(index.model.towers.clip.logit_scale.detach().exp())
    compared = compare(image_bd, text_bd, code_b, tau, progress=progress)

    def tile(row: int) -> Thumbnail:
        return thumbnail_of(index, chosen[row][1], [chosen[row][2]])

    def cosine(image: int, caption: int) -> float:
        return float(image_bd[image] @ text_bd[caption])

    hard = compared.log_g_b.argsort(descending=True, stable=True)[:HARDEST].tolist()
    numbers = [number_b[hard].tolist() for number_b in compared[:3]]  # log g and both places
    hardest = [HardPair(tile(row), *known) for row, *known in zip(hard, *numbers, strict=True)]
    confused = [
        ConfusedPair(tile(i), tile(j), cosine(i, j), cosine(i, i), same)
        for same, pairs in ((True, compared.equal_pairs), (False, compared.better_pairs))
        for i, j in pairs
    ][:CONFUSED]
    return HardPairs(len(chosen), len(captioned), hardest, confused, compared.equal, compared.exceeding)


@torch.no_grad()
def compare(
    image_bd: Tensor,
    text_bd: Tensor,
    code_b: Tensor,
    tau: float,
    tile: int = _TILE,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare every image with every caption.

    Args:
        code_b: equal for equal captions, which are not negatives of each other.
        tau: the model's temperature.
        progress: called with (done, total) pairs.
    """
    own_b = (image_bd * text_bd).sum(1)
    b = len(own_b)
    log_sum = image_bd.new_full((2, b), -torch.inf)  # rows: images, captions
    negatives_b, place = code_b.new_zeros(b), code_b.new_ones(2, b)
    equal, exceeding = 0, 0
    equal_pairs: Ranked = []
    better_pairs: Ranked = []
    tiles = [slice(start, min(start + tile, b)) for start in range(0, b, tile)]
    for rows in tiles:
        for columns in tiles:
            s = image_bd[rows] @ text_bd[columns].T
            same = code_b[rows, None] == code_b[columns]
            apart = torch.arange(b)[rows, None] < torch.arange(b)[columns]
            excess = (s - own_b[rows, None]).masked_fill(same, -torch.inf)
            back = (s - own_b[columns]).masked_fill(same, -torch.inf)
            log_sum[0, rows] = torch.logaddexp(log_sum[0, rows], (excess / tau).logsumexp(1))
            log_sum[1, columns] = torch.logaddexp(log_sum[1, columns], (back / tau).logsumexp(0))
            place[0, rows] += (excess > 0).sum(1)
            place[1, columns] += (back > 0).sum(0)
            negatives_b[rows] += (~same).sum(1)
            twins = same & apart.to(same.device)
            equal += int(twins.sum())
            exceeding += int((excess > 0).sum())
            equal_pairs = _keep_best(equal_pairs, s.masked_fill(~twins, -torch.inf), rows, columns)
            # How much better the row's caption fits the column's image than that image's own caption does
            turned = (image_bd[columns] @ text_bd[rows].T).T - own_b[columns]
            both = torch.minimum(excess, turned).masked_fill((excess <= 0) | (excess < turned), -torch.inf)
            better_pairs = _keep_best(better_pairs, both, rows, columns)
        if progress is not None:
            progress(rows.stop, b)
    log_g_b = (log_sum - negatives_b.clamp(min=1).log()).mean(0)
    pairs = [[(i, j) for _, i, j in best] for best in (equal_pairs, better_pairs)]
    return Comparison(log_g_b, place[0], place[1], pairs[0], pairs[1], equal, exceeding)


def _keep_best(best: Ranked, values: Tensor, rows: slice, columns: slice) -> Ranked:
    """The highest values of this tile and the ones before it."""
    top = values.flatten().topk(min(CONFUSED, values.numel()))
    places = (divmod(place, values.shape[1]) for place in top.indices.tolist())
    new = [
        (value, rows.start + i, columns.start + j)
        for value, (i, j) in zip(top.values.tolist(), places, strict=True)
        if value > -torch.inf
    ]
    return sorted(best + new, key=lambda pair: (-pair[0], pair[1:]))[:CONFUSED]
