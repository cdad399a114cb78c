"""Which pairs a model finds hardest, and which of its negatives are likely none at all.

Shapes: b pictures with a caption each, d features; s_ij is the cosine of picture i and caption j. Up to 5,000
of the evaluated pairs are compared, in tiles: b×b similarities are never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastclip.tools.report.search_examples import Thumbnail, thumbnail_of
from fastclip.tools.search.index import Index

MOST_PAIRS = 5_000
HARDEST, LIKELY = 12, 12  # shown on a page
_TILE = 1024
Ranked = list[tuple[float, int, int]]  # a value, a picture and a caption, the highest values first


class HardPair(NamedTuple):
    """A picture whose own caption does not stand out."""

    thumbnail: Thumbnail
    log_g: float
    """By both directions: how much the other pairs weigh against this one."""
    caption_place: int
    """Of its own caption among all, from 1; equal captions do not count."""
    picture_place: int


class LikelyFalse(NamedTuple):
    """Two samples that the loss would push apart, and should not."""

    picture: Thumbnail
    other: Thumbnail
    similarity: float
    """Of the picture with the other's caption."""
    own: float
    """With its own."""
    equal: bool
    """Both have the same caption."""


class Samples(NamedTuple):
    """What the evaluated pairs tell."""

    pairs: int
    of: int
    """Pairs that are there; those beyond the first 5,000 were not looked at."""
    hardest: list[HardPair]
    likely_false: list[LikelyFalse]
    equal: int
    """Pairs of samples that have the same caption."""
    exceeding: int
    """Pairs of samples with different captions in which the other's caption fits better than one's own."""


class Comparison(NamedTuple):
    """Numbers of every pair, and the likeliest false negatives as (picture, caption) rows.

    Of those with different captions, likeliest are the ones that each fit the other best, over their own: a
    single picture that the model does not understand at all would fit everything better than its own caption.
    """

    log_g_b: Tensor
    caption_place_b: Tensor
    picture_place_b: Tensor
    equal_pairs: list[tuple[int, int]]
    better_pairs: list[tuple[int, int]]
    equal: int
    exceeding: int


def look_at_samples(index: Index, progress: Callable[[int, int], None]) -> Samples | None:
    """Of pictures that have captions, by the first caption of each; None if fewer than two have."""
    told = [(row, number, captions[0])
            for row, number in enumerate(index.features.kept_b.tolist())
            if (captions := index.pictures.pictures[number].captions)]  # fmt: skip
    if len(told) < 2:
        return None
    chosen = told[:MOST_PAIRS]
    code_of = {caption: code for code, caption in enumerate(index.captions)}
    image_bd = index.features.image_bd[torch.tensor([row for row, _, _ in chosen])].float()
    code_b = torch.tensor([code_of[caption] for _, _, caption in chosen], device=image_bd.device)
    text_bd = index.caption_features().to(image_bd.device).float()[code_b]
    tau = 1 / float(index.model.towers.clip.logit_scale.detach().exp())
    found = compare(image_bd, text_bd, code_b, tau, progress=progress)

    def tile(row: int) -> Thumbnail:
        return thumbnail_of(index, chosen[row][1], [chosen[row][2]])

    def cosine(picture: int, caption: int) -> float:
        return float(image_bd[picture] @ text_bd[caption])

    hard = found.log_g_b.argsort(descending=True, stable=True)[:HARDEST].tolist()
    numbers = [number_b[hard].tolist() for number_b in found[:3]]  # log g, and the places of both
    hardest = [HardPair(tile(row), *known) for row, *known in zip(hard, *numbers, strict=True)]
    likely = [(i, j, True) for i, j in found.equal_pairs] + [(i, j, False) for i, j in found.better_pairs]
    pairs = [
        LikelyFalse(tile(i), tile(j), cosine(i, j), cosine(i, i), same) for i, j, same in likely[:LIKELY]
    ]
    return Samples(len(chosen), len(told), hardest, pairs, found.equal, found.exceeding)


@torch.no_grad()
def compare(
    image_bd: Tensor,
    text_bd: Tensor,
    code_b: Tensor,
    tau: float,
    tile: int = _TILE,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Every picture with every caption.

    Args:
        code_b: equal for equal captions; these are no negatives of each other.
        tau: the model's temperature.
        progress: is told (done, total) of the pairs.
    """
    own_b = (image_bd * text_bd).sum(1)
    b = len(own_b)
    log_sum = image_bd.new_full((2, b), -torch.inf)  # of the pictures, of the captions
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
            # How much better the row's caption fits the column's picture than its own
            turned = (image_bd[columns] @ text_bd[rows].T).T - own_b[columns]
            both = torch.minimum(excess, turned).masked_fill((excess <= 0) | (excess < turned), -torch.inf)
            better_pairs = _keep_best(better_pairs, both, rows, columns)
        if progress is not None:
            progress(rows.stop, b)
    log_g_b = (log_sum - negatives_b.clamp(min=1).log()).mean(0)
    pairs = [[(i, j) for _, i, j in best] for best in (equal_pairs, better_pairs)]
    return Comparison(log_g_b, place[0], place[1], pairs[0], pairs[1], equal, exceeding)


def _keep_best(best: Ranked, values: Tensor, rows: slice, columns: slice) -> Ranked:
    """The highest of a tile and of those before it."""
    top = values.flatten().topk(min(LIKELY, values.numel()))
    places = (divmod(place, values.shape[1]) for place in top.indices.tolist())
    new = [
        (value, rows.start + i, columns.start + j)
        for value, (i, j) in zip(top.values.tolist(), places, strict=True)
        if value > -torch.inf
    ]
    return sorted(best + new, key=lambda found: (-found[0], found[1:]))[:LIKELY]
