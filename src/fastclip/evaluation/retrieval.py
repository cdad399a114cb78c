"""Recall of images by texts and of texts by images, as CLIP_benchmark and DataComp report it, in any memory.

Shapes: b images, m texts, d features. A query finds its positive at rank r if r candidates come before it:
those that are more similar, and those that are as similar and have a lower index. Recall@k is the share of
queries with a rank below k. (CLIP_benchmark takes `topk`, whose order among equals is arbitrary.)

Ranks are counted in tiles; b×m similarities are never in memory together. Equal has to mean equal in every
tile, but a matrix product is rounded differently in another shape, even for two candidates that are the same.
So no product here is rounded at all: features are put on a grid of 2⁻²⁶ (float32 has no finer one above ⅛),
their products are multiples of 2⁻⁵², and sums of those are exact in float64, in any order, while they lie
below 2, as they do at unit length. Results are the same, bit for bit, for any tile and on any device that has
float64; autocast and TF32 leave that alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_GRID = 2.0**26
_UNIT = 0.01  # how far a length may be from 1: features normalised in bfloat16 are within 0.4 %


@torch.no_grad()
def recalls(
    image_bd: Tensor, text_md: Tensor, image_of_text: Tensor, ks: Sequence[int] = (1, 5, 10), tile: int = 1024
) -> dict[str, float]:
    """Recall@k in both directions, and the mean of the two at k = 1.

    - `image_retrieval_recall@k`: the share of texts whose image is among the k most similar images.
    - `text_retrieval_recall@k`: the share of images of which any text is among the k most similar texts. An
      image without texts is not counted here; the texts do have to find their images among such images too.
    - `mean_recall@1`: the mean of the two recalls at 1.

    Args:
        image_bd, text_md: features of unit length, on one device.
        image_of_text: the row of each text's image.
        ks: how many candidates a query looks at; with fewer candidates it sees all of them.
        tile: images and texts that are compared at once; tile² similarities of 8 bytes are in memory.
    """
    _check(image_bd, text_md, image_of_text, ks, tile)
    image_of_text = image_of_text.to(image_bd.device, torch.int64)
    own_m = _own_similarities(image_bd, text_md, image_of_text, tile)
    best_b, best_text_b = _best_texts(own_m, image_of_text, len(image_bd))
    image_rank_b, text_rank_m = image_of_text.new_zeros(len(image_bd)), torch.zeros_like(image_of_text)
    for images in _slices(len(image_bd), tile):
        rows, row = on_grid(image_bd[images]), _numbers(images, image_bd.device)[:, None]
        for texts in _slices(len(text_md), tile):
            s, column = rows @ on_grid(text_md[texts]).T, _numbers(texts, image_bd.device)
            text_rank_m[texts] += _ahead(s, own_m[texts], row, image_of_text[texts]).sum(0)
            image_rank_b[images] += _ahead(s, best_b[images, None], column, best_text_b[images, None]).sum(1)
    has_text_b = best_text_b < len(text_md)
    ranks = {"image": text_rank_m, "text": image_rank_b[has_text_b]}
    result = {f"{found}_retrieval_recall@{k}": _recall(ranks[found], k) for k in ks for found in ranks}
    return result | {"mean_recall@1": sum(_recall(rank, 1) for rank in ranks.values()) / 2}


def _own_similarities(image_bd: Tensor, text_md: Tensor, image_of_text: Tensor, tile: int) -> Tensor:
    """Of each text with its image: the very number that a tile has for the two, for none is rounded."""
    pairs = zip(image_of_text.split(tile), text_md.split(tile), strict=True)
    return torch.cat([(on_grid(image_bd[image]) * on_grid(text)).sum(1) for image, text in pairs])


def _best_texts(own_m: Tensor, image_of_text: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Each image's most similar text of its own: its similarity and index, which is m if there is none.

    No other text of the image comes before it, so it alone decides whether any is among the first k.
    """
    best_b = own_m.new_full((images,), -torch.inf).scatter_reduce(0, image_of_text, own_m, "amax")
    best = (own_m == best_b[image_of_text]).nonzero().squeeze(1)
    best_text_b = image_of_text.new_full((images,), len(own_m))
    return best_b, best_text_b.scatter_reduce(0, image_of_text[best], best, "amin")


def _ahead(s: Tensor, positive: Tensor, candidate: Tensor, positives_index: Tensor) -> Tensor:
    """Which candidates come before the positive; never the positive itself."""
    if candidate.max() < positives_index.min():  # so it is in most tiles: one pass instead of four
        return s >= positive
    if candidate.min() >= positives_index.max():
        return s > positive
    return torch.where(candidate < positives_index, s >= positive, s > positive)


def on_grid(features: Tensor) -> Tensor:
    """Features as whole numbers of 2⁻²⁶, in float64."""
    return features.to(torch.float64).mul(_GRID).round_()


def _recall(rank: Tensor, k: int) -> float:
    return int((rank < k).sum()) / len(rank)


def _slices(length: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, length)) for start in range(0, length, tile))


def _numbers(part: slice, device: torch.device) -> Tensor:
    return torch.arange(part.start, part.stop, device=device)


def _check(image_bd: Tensor, text_md: Tensor, image_of_text: Tensor, ks: Sequence[int], tile: int) -> None:
    if image_bd.ndim != 2 or text_md.ndim != 2 or image_bd.shape[1] != text_md.shape[1]:
        shapes = f"{tuple(image_bd.shape)} and {tuple(text_md.shape)}"
        raise ValueError(f"image_bd and text_md have shapes {shapes}; they must be (b, d) and (m, d).")
    if not len(image_bd) or not len(text_md):
        raise ValueError(f"{len(image_bd)} images and {len(text_md)} texts: recall needs one of each.")
    if image_of_text.shape != text_md.shape[:1] or image_of_text.is_floating_point():
        raise ValueError(
            f"image_of_text is {image_of_text.dtype} of shape {tuple(image_of_text.shape)}; it must hold one "
            f"whole number for each of the {len(text_md)} texts."
        )
    lowest, highest = int(image_of_text.min()), int(image_of_text.max())
    if lowest < 0 or highest >= len(image_bd):
        raise ValueError(
            f"image_of_text goes from {lowest} to {highest}; images have the rows 0 to {len(image_bd) - 1}."
        )
    for name, features in (("image_bd", image_bd), ("text_md", text_md)):
        off = (torch.linalg.vector_norm(features, dim=1, dtype=torch.float64) - 1).abs().max().item()
        if not off <= _UNIT:  # NaN too
            raise ValueError(
                f"{name} must have rows of unit length, and one is off by {off:.3g}; "
                "normalise them: features / features.norm(dim=1, keepdim=True)."
            )
    if not ks or min(ks) < 1:
        raise ValueError(f"ks={tuple(ks)} must be positive numbers of candidates; try (1, 5, 10).")
    if tile < 1:
        raise ValueError(f"tile={tile} must be positive; try 4096.")
