"""The two tiled passes over the similarities: pure tensor functions, with no autograd and no communication.

Shapes: b local batch, B global batch, d features. Row k of the local features is row `offset + k` of the
global ones. Sides: 1 contrasts an image with texts (s_ij over j), 2 a text with images (s_ji over j).

Nothing of size b×B is needed at once: pass A and pass B walk over tiles of the similarity. Tiles are kept
between the passes if all of them fit into `tile_bytes`, and computed again if not. When b = B, one similarity
serves both sides (rows for side 1, columns for side 2); otherwise each side has its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt, log
from typing import NamedTuple

import torch
from torch import Tensor

# One tile's size. A tile is touched about ten times: a CPU wants it in its cache, a GPU wants few launches.
_TILE_BYTES_CPU = 1 << 20
_TILE_BYTES_GPU = 1 << 26


class Features(NamedTuple):
    """L2-normalised features of the local batch and of the global batch, float32 or float64."""

    image_bd: Tensor
    text_bd: Tensor
    image_Bd: Tensor
    text_Bd: Tensor
    offset: int

    @property
    def whole(self) -> bool:
        """Whether the local batch is the global batch."""
        return self.image_bd.shape[0] == self.image_Bd.shape[0]


class Inner(NamedTuple):
    """What pass A finds for each local sample and side: both b×2."""

    log_g: Tensor  # log of the mean over j≠i of exp(a_ij), a_ij = (s_ij − s_ii)/τ_i
    mean_a: Tensor  # mean of a_ij under the softmax of a_i over j≠i


class Tile(NamedTuple):
    """Similarities of `rows` of the local batch with `cols` of the global batch."""

    rows: slice
    cols: slice
    s: Tensor

    def diagonal(self, offset: int) -> Tensor:
        """A view of the positive pairs inside this tile (often empty)."""
        return self.s.diagonal(offset + self.rows.start - self.cols.start)


class Similarity:
    """The tiles of one similarity matrix, kept after the first walk if they fit into the budget."""

    def __init__(self, row_bd: Tensor, col_Bd: Tensor, offset: int, budget: int):
        self.row_bd, self.col_Bd, self.offset = row_bd, col_Bd, offset
        b, B, size = row_bd.shape[0], col_Bd.shape[0], row_bd.element_size()
        self.keeps = b * B * size <= budget
        tile_bytes = _TILE_BYTES_CPU if row_bd.device.type == "cpu" else _TILE_BYTES_GPU
        elements = max(1, min(tile_bytes, budget) // size)
        self.tile_rows = min(b, isqrt(elements))
        self.tile_cols = min(B, elements // self.tile_rows)
        self._kept: deque[Tile] = deque()
        self._scratch = row_bd.new_empty(self.tile_rows * self.tile_cols)

    def tiles(self) -> Iterator[Tile]:
        """Walk over the tiles; the caller may overwrite each until it asks for the next."""
        if self._kept:
            while self._kept:
                yield self._kept.popleft()  # a kept tile is read once more, then its memory is free
            return
        reused = None if self.keeps else torch.empty_like(self._scratch)
        b, B = self.row_bd.shape[0], self.col_Bd.shape[0]
        for r in range(0, b, self.tile_rows):
            rows = slice(r, min(r + self.tile_rows, b))
            for c in range(0, B, self.tile_cols):
                cols = slice(c, min(c + self.tile_cols, B))
                shape = (rows.stop - rows.start, cols.stop - cols.start)
                s = self.row_bd.new_empty(shape) if reused is None else _view(reused, shape)
                torch.mm(self.row_bd[rows], self.col_Bd[cols].T, out=s)
                tile = Tile(rows, cols, s)
                yield tile
                if self.keeps:
                    self._kept.append(tile)

    def scratch(self, shape: torch.Size) -> Tensor:
        """Working memory of one tile, the same each time."""
        return _view(self._scratch, shape)


def similarities(features: Features, tile_bytes: int) -> list[Similarity]:
    """One similarity for both sides when b = B, else one for each; `tile_bytes` is the budget for all."""
    f = features
    if f.whole:
        return [Similarity(f.image_bd, f.text_Bd, f.offset, tile_bytes)]
    return [
        Similarity(f.image_bd, f.text_Bd, f.offset, tile_bytes // 2),
        Similarity(f.text_bd, f.image_Bd, f.offset, tile_bytes // 2),
    ]


def inner_estimates(features: Features, sims: list[Similarity], tau_b2: Tensor) -> Inner:
    """Pass A. Inner functions g of the local samples over the global batch (Proc. contrastive_loss)."""
    inverse_b2 = tau_b2.reciprocal()
    sums = [_SoftmaxSums(features.image_bd, inverse_b2[:, side]) for side in (0, 1)]
    for side, sim in enumerate(sims):
        for tile in sim.tiles():
            diagonal, scratch = tile.diagonal(sim.offset), sim.scratch(tile.s.shape)
            sums[side].add(tile.s, scratch, diagonal, tile.rows, dim=1)
            if features.whole:
                sums[1].add(tile.s, scratch, diagonal, tile.cols, dim=0)
    s_ii = positive_similarity(features)
    log_sum, mean_x = (
        torch.stack(pair, dim=1) for pair in zip(*(total.result() for total in sums), strict=True)
    )
    shift_b2 = s_ii[:, None] * inverse_b2
    negatives = features.image_Bd.shape[0] - 1
    return Inner(log_sum - shift_b2 - log(negatives), mean_x - shift_b2)


def positive_similarity(features: Features) -> Tensor:
    """s_ii of each local pair."""
    return torch.linalg.vecdot(features.image_bd, features.text_bd)


class _SoftmaxSums:
    """Streaming log Σ exp(x) and Σ softmax(x)·x of each sample, x = s/τ, over all tiles but the diagonal."""

    def __init__(self, like_bd: Tensor, inverse_b: Tensor):
        b = like_bd.shape[0]
        self.inverse = inverse_b
        self.peak = like_bd.new_full((b,), torch.finfo(like_bd.dtype).min)
        self.total = like_bd.new_zeros(b)
        self.weighted = like_bd.new_zeros(b)

    def add(self, s: Tensor, scratch: Tensor, diagonal: Tensor, who: slice, dim: int) -> None:
        """Take in one tile whose samples `who` lie across `dim`'s other dimension."""
        inverse = self.inverse[who]
        diagonal.fill_(
            -torch.inf
        )  # the positive is no negative: it has no part in the maximum and weighs nothing
        # −2 lies below every similarity; it stands in for the maximum of a line that holds only its positive.
        peak = s.amax(dim).clamp(min=-2.0) * inverse
        torch.addcmul(-peak.unsqueeze(dim), s, inverse.unsqueeze(dim), out=scratch).exp_()
        diagonal.zero_()  # 0·(−inf) would be NaN in the weighted sum
        total = scratch.sum(dim)
        weighted = scratch.mul_(s).sum(dim) * inverse
        highest = torch.maximum(self.peak[who], peak)
        old, new = (self.peak[who] - highest).exp(), (peak - highest).exp()
        self.total[who] = self.total[who] * old + total * new
        self.weighted[who] = self.weighted[who] * old + weighted * new
        self.peak[who] = highest

    def result(self) -> tuple[Tensor, Tensor]:
        return self.peak + self.total.log(), self.weighted / self.total


def feature_gradients(
    features: Features,
    sims: list[Similarity],
    tau_B2: Tensor,
    lambda_B2: Tensor,
    positive_b: Tensor,
    scale: float,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Pass B. Gradients of the local features (eqs. sogclr:gradw, fastclipv0:gradw, isogclr:gradw).

    M_kl = exp(s_kl/τ1_k − λ1_k) + exp(s_kl/τ2_l − λ2_l) for k≠l, and M_kk = −positive_k;
    image gradient_k = scale·Σ_l M_kl·text_l, text gradient_k = scale·Σ_l M_lk·image_l.
    `needs` tells which of the two towers wants its gradient.
    """
    f = features
    local = slice(f.offset, f.offset + f.image_bd.shape[0])
    inverse_B2 = tau_B2.reciprocal()
    image_grad = torch.zeros_like(f.image_bd) if needs[0] else None
    text_grad = torch.zeros_like(f.text_bd) if needs[1] else None
    for side, sim in enumerate(sims):
        if not (any(needs) if f.whole else needs[side]):
            continue
        row, col = side, 1 - side
        for rows, cols, s in sim.tiles():
            m, scratch = s, sim.scratch(s.shape)
            torch.addcmul(-lambda_B2[cols, col], s, inverse_B2[cols, col], out=scratch).exp_()
            row_inverse, row_lambda = inverse_B2[local, row][rows, None], lambda_B2[local, row][rows, None]
            torch.addcmul(-row_lambda, s, row_inverse, out=m).exp_().add_(scratch)
            diagonal = Tile(rows, cols, m).diagonal(sim.offset)
            first = max(cols.start - sim.offset, rows.start)  # the first local sample on this tile's diagonal
            diagonal.copy_(positive_b[first : first + diagonal.shape[0]]).neg_()
            row_grad = text_grad if side else image_grad
            if row_grad is not None:
                row_grad[rows].addmm_(m, sim.col_Bd[cols], alpha=scale)
            if f.whole and text_grad is not None:
                text_grad[cols].addmm_(m.T, sim.row_bd[rows], alpha=scale)
    return image_grad, text_grad


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """True float32 products whatever the caller allows: no autocast, no TF32, no reduced-precision matmul."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    allowed = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, allowed, strict=True):
            backend.fp32_precision = precision


def _view(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: shape[0] * shape[1]].view(shape)
