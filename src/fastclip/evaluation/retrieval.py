"""Image-text retrieval recall, as CLIP_benchmark and DataComp report it, in bounded memory.

Shapes: b images, m texts, d features. A query finds its positive at rank r if r candidates come before it:
the more similar ones, and equally similar ones with a lower index. Recall@k is the share of queries with a
rank below k. (CLIP_benchmark uses `topk`, which breaks ties arbitrarily.)

Ranks are counted in tiles; the b×m similarities are never in memory together. Ties must be ties in every
tile, but matrix products are rounded differently for different shapes, even for identical candidates. So
nothing is rounded here: features are put on a grid of 2⁻²⁶ (float32 has no finer one above ⅛), their products
are multiples of 2⁻⁵², and sums of those are exact in float64, in any order, while they are below 2, as they
are at unit length. Results are bitwise the same for any tile and on any device with float64; autocast and
TF32 do not affect them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastclip.errors import InputError

_GRID = 2.0**26
_UNIT = 0.01  # tolerance of unit length: features normalised in bfloat16 are within 0.4 %


@torch.no_grad()
def recalls(
    image_bd: Tensor, text_md: Tensor, image_of_text: Tensor, ks: Sequence[int] = (1, 5, 10), tile: int = 1024
) -> dict[str, float]:
    """Recall@k in both directions, and the mean of the two at k = 1.

    - `image_retrieval_recall@k`: the share of texts whose image is among the k most similar images.
    - `text_retrieval_recall@k`: the share of images with any of their texts among the k most similar texts.
      Images without texts are not counted here, but they are candidates for every text.
    - `mean_recall@1`: the mean of the two recalls at 1.

    Args:
        image_bd, text_md: features of unit length, on one device.
        image_of_text: the row of each text's image.
        ks: numbers of candidates; a k above their number means all of them.
        tile: images and texts compared at a time; tile² similarities of 8 bytes are in memory.
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
    """The similarity of each text with its image: exactly the number in a tile, since nothing is rounded."""
    pairs = zip(image_of_text.split(tile), text_md.split(tile), strict=True)
    return torch.cat([(on_grid(image_bd[image]) * on_grid(text)).sum(1) for image, text in pairs])


def _best_texts(own_m: Tensor, image_of_text: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Each image's most similar text of its own: its similarity, and its index, or m if it has no text.

    It comes before the image's other texts, so it alone decides whether any of them is among the first k.
    """
    best_b = own_m.new_full((images,), -torch.inf).scatter_reduce(0, image_of_text, own_m, "amax")
    best = (own_m == best_b[image_of_text]).nonzero().squeeze(1)
    best_text_b = image_of_text.new_full((images,), len(own_m))
    return best_b, best_text_b.scatter_reduce(0, image_of_text[best], best, "amin")


def _ahead(s: Tensor, positive: Tensor, candidate: Tensor, positives_index: Tensor) -> Tensor:
    """Which candidates come before the positive; never the positive itself."""
    if candidate.max() < positives_index.min():  # true in most tiles: one pass instead of four
        return s >= positive
    if candidate.min() >= positives_index.max():
        return s > positive
    return torch.where(candidate < positives_index, s >= positive, s > positive)


def on_grid(features: Tensor) -> Tensor:
    """Features as integer multiples of 2⁻²⁶, in float64."""
    return features.to(torch.float64).mul(_GRID).round_()


def _recall(rank: Tensor, k: int) -> float:
    return int((rank < k).sum()) / len(rank)


def _slices(length: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, length)) for start in range(0, length, tile))


def _numbers(part: slice, device: torch.device) -> Tensor:
    return torch.arange(part.start, part.stop, device=device)


def _check(image_bd: Tensor, text_md: Tensor, image_of_text: Tensor, ks: Sequence[int], tile: int) -> None:
    if image_bd.ndim != 2 or text_md.ndim != 2 or image_bd.shape[1] != text_md.shape[1]:
        shapes = f"{tuple(text_md.shape)} and image_bd {tuple(image_bd.shape)}"
        raise InputError("text_md", f"has shape {shapes}; they must be (m, d) and (b, d).")
    for name, features in (("image_bd", image_bd), ("text_md", text_md)):
        if not len(features):
            raise InputError(name, "has no rows; recall needs at least one image and one text.")
    if image_of_text.shape != text_md.shape[:1] or image_of_text.is_floating_point():
        raise InputError(
            "image_of_text",
            f"is {image_of_text.dtype} of shape {tuple(image_of_text.shape)}; it must hold one integer for "
            f"each of the {len(text_md)} texts.",
        )
    lowest, highest = int(image_of_text.min()), int(image_of_text.max())
    if lowest < 0 or highest >= len(image_bd):
        raise InputError(
            "image_of_text", f"ranges from {lowest} to {highest}; it must be in [0, {len(image_bd) - 1}]."
        )
    for name, features in (("image_bd", image_bd), ("text_md", text_md)):
        off = (torch.linalg.vector_norm(features, dim=1, dtype=torch.float64) - 1).abs().max().item()
        if not off <= _UNIT:  # NaN too
            raise InputError(
                name,
                f"must have rows of unit length, but one is off by {off:.3g}. Normalise them: "
                "features / features.norm(dim=1, keepdim=True).",
            )
    if not ks or min(ks) < 1:
        raise InputError("ks", f"is {tuple(ks)}; every k must be at least 1, e.g. (1, 5, 10).")
    if tile < 1:
        raise InputError("tile", f"is {tile}; it must be at least 1, e.g. 1024.")
