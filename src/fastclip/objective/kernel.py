"""The two tiled passes over the similarities: pure tensor functions, with no autograd and no communication.

Shapes: b local batch, B global batch, d features. Row k of the local features is row `offset + k` of the
global ones. Sides: 1 contrasts an image with texts (s_ij over j), 2 a text with images (s_ji over j).

The b×B matrix is never needed as a whole: pass A and pass B iterate over tiles of the similarity. Tiles are
cached between the passes if all of them fit into `tile_bytes`, and recomputed if not. When b = B, one
similarity serves both sides (rows for side 1, columns for side 2); otherwise each side has its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

# One tile's size. A tile is accessed about ten times: it should fit a CPU's cache; a GPU needs few launches.
_TILE_BYTES_CPU = 1 << 20
_TILE_BYTES_GPU = 1 << 26
EXCLUDED = -1e4  # so far below any similarity that exp((s − …)/τ) is 0, but finite: 0·EXCLUDED is 0


class Features(NamedTuple):
    """L2-normalised features of the local batch and of the global batch, float32 or float64.

    Samples with the same `code_B` are not negatives of each other; None: all other samples are negatives.
    """

    image_bd: Tensor
    text_bd: Tensor
    image_Bd: Tensor
    text_Bd: Tensor
    offset: int
    code_B: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether the local batch is the global batch."""
        return self.image_bd.shape[0] == self.image_Bd.shape[0]


class Inner(NamedTuple):
    """The results of pass A for each local sample."""

    s_ii: Tensor  # b, similarity of the pair itself
    log_g: Tensor  # b×2, log of the mean over j≠i of exp(a_ij), a_ij = (s_ij − s_ii)/τ_i
    mean_a: Tensor  # b×2, mean of a_ij under the softmax of a_i over j≠i


class Tile(NamedTuple):
    """Similarities of `rows` of the local batch with `cols` of the global one; each pass overwrites them."""

    rows: slice
    cols: slice
    s: Tensor

    def diagonal(self, offset: int) -> Tensor:
        """A view of the positive pairs inside this tile (often empty)."""
        return self.s.diagonal(offset + self.rows.start - self.cols.start)


class Similarity:
    """The tiles of one similarity matrix, cached after the first pass if they fit into the budget.

    Samples with equal codes have the similarity EXCLUDED.
    """

    def __init__(self, row_bd: Tensor, col_Bd: Tensor, offset: int, budget: int, code_B: Tensor | None):
        self.row_bd, self.col_Bd, self.offset, self.code_B = row_bd, col_Bd, offset, code_B
        b, B, size = row_bd.shape[0], col_Bd.shape[0], row_bd.element_size()
        self.keeps = b * B * size <= budget
        tile_bytes = _TILE_BYTES_CPU if row_bd.device.type == "cpu" else _TILE_BYTES_GPU
        elements = max(1, min(tile_bytes, budget) // size)
        self.tile_rows = min(b, isqrt(elements))
        self.tile_cols = min(B, elements // self.tile_rows)
        self._kept: deque[Tile] = deque()
        self._scratch = row_bd.new_empty(self.tile_rows * self.tile_cols)

    def tiles(self) -> Iterator[Tile]:
        """Iterate over the tiles; the caller may overwrite a tile until it takes the next one."""
        if self._kept:
            while self._kept:
                yield self._kept.popleft()  # a cached tile is read once more, then its memory is free
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
                if self.code_B is not None:
                    row_code = self.code_B[self.offset + rows.start : self.offset + rows.stop, None]
                    s.masked_fill_(row_code == self.code_B[cols], EXCLUDED)
                tile = Tile(rows, cols, s)
                yield tile
                if self.keeps:
                    self._kept.append(tile)

    def scratch(self, shape: torch.Size) -> Tensor:
        """Working memory of one tile, reused each time."""
        return _view(self._scratch, shape)


def similarities(features: Features, tile_bytes: int) -> list[Similarity]:
    """One similarity for both sides when b = B, else one for each; `tile_bytes` is the total budget."""
    f = features
    if f.whole:
        return [Similarity(f.image_bd, f.text_Bd, f.offset, tile_bytes, f.code_B)]
    return [
        Similarity(f.image_bd, f.text_Bd, f.offset, tile_bytes // 2, f.code_B),
        Similarity(f.text_bd, f.image_Bd, f.offset, tile_bytes // 2, f.code_B),
    ]


def inner_estimates(
    features: Features, sims: list[Similarity], tau_b2: Tensor, log_negatives: float | Tensor
) -> Inner:
    """Pass A. Inner functions g of the local samples over the global batch (Proc. contrastive_loss).

    `log_negatives` is log(B−1), or of each local sample (b×1) the log of its own number.
    """
    inverse_b2 = tau_b2.reciprocal()
    sums = [_SoftmaxSums(inverse_b2[:, side]) for side in (0, 1)]
    for side, sim in enumerate(sims):
        for tile in sim.tiles():
            diagonal, scratch = tile.diagonal(sim.offset), sim.scratch(tile.s.shape)
            sums[side].add(tile.s, scratch, diagonal, tile.rows, dim=1)
            if features.whole:
                sums[1].add(tile.s, scratch, diagonal, tile.cols, dim=0)
    s_ii = torch.linalg.vecdot(features.image_bd, features.text_bd)
    log_sum, mean_a = zip(*(total.result(s_ii) for total in sums), strict=True)
    return Inner(s_ii, torch.stack(log_sum, dim=1) - log_negatives, torch.stack(mean_a, dim=1))


class _SoftmaxSums:
    """Streaming log Σ exp(a) and Σ softmax(a)·a of each sample, a = (s − s_ii)/τ, without the diagonal.

    Differences are taken between similarities, before the division by τ, where float32 is most exact.
    """

    def __init__(self, inverse_b: Tensor):
        self.inverse = inverse_b
        self.peak = torch.full_like(inverse_b, -2.0)  # the largest s so far; initially below any s
        self.total = torch.zeros_like(inverse_b)  # Σ exp((s − peak)/τ)
        self.weighted = torch.zeros_like(inverse_b)  # Σ exp((s − peak)/τ)·s

    def add(self, s: Tensor, scratch: Tensor, diagonal: Tensor, samples: slice, dim: int) -> None:
        """Add one tile of these samples; their negatives are along `dim`."""
        inverse = self.inverse[samples]
        diagonal.fill_(-torch.inf)  # the positive is excluded: no part in the maximum, no weight
        peak = torch.maximum(self.peak[samples], s.amax(dim))
        torch.sub(s, peak.unsqueeze(dim), out=scratch).mul_(inverse.unsqueeze(dim)).exp_()
        diagonal.zero_()  # 0·(−inf) would be NaN in the weighted sum
        faded = ((self.peak[samples] - peak) * inverse).exp()
        self.total[samples] = self.total[samples] * faded + scratch.sum(dim)
        self.weighted[samples] = self.weighted[samples] * faded + scratch.mul_(s).sum(dim)
        self.peak[samples] = peak

    def result(self, s_ii: Tensor) -> tuple[Tensor, Tensor]:
        log_sum = (self.peak - s_ii) * self.inverse + self.total.log()
        return log_sum, (self.weighted / self.total - s_ii) * self.inverse


def feature_gradients(
    features: Features,
    sims: list[Similarity],
    tau_B2: Tensor,
    lambda_B2: Tensor,
    scale: float,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Pass B. Gradients of the local features (eqs. sogclr:gradw, fastclipv0:gradw, isogclr:gradw).

    p1_kl = exp((s_kl − λ1_k)/τ1_k) and p2_lk = exp((s_kl − λ2_l)/τ2_l) weight image k with text l≠k;
    image gradient_k = scale·(Σ_l (p1_kl + p2_lk)·text_l − r_k·text_k), and likewise for the text, with
    r_k = Σ_l (p1_kl + p2_kl). r sums exactly the p used above: a gradient is the small difference of two
    nearly equal terms. `needs` says which of the two towers requires a gradient.
    """
    f = features
    local = slice(f.offset, f.offset + f.image_bd.shape[0])
    inverse_B2 = tau_B2.reciprocal()
    gradients = [torch.zeros_like(f.image_bd) if need else None for need in needs]
    weight_b = torch.zeros_like(f.image_bd[:, 0])  # r
    for side, sim in enumerate(sims):
        row_lambda, row_inverse = lambda_B2[local, side, None], inverse_B2[local, side, None]
        col_lambda, col_inverse = lambda_B2[:, 1 - side], inverse_B2[:, 1 - side]
        for tile in sim.tiles():
            rows, cols, s = tile
            tile.diagonal(sim.offset).fill_(-torch.inf)
            by_col = torch.sub(s, col_lambda[cols], out=sim.scratch(s.shape)).mul_(col_inverse[cols]).exp_()
            by_row = s.sub_(row_lambda[rows]).mul_(row_inverse[rows]).exp_()
            weight_b[rows] += by_row.sum(1)
            if f.whole:
                weight_b[cols] += by_col.sum(0)
            both = by_row.add_(by_col)
            if (gradient := gradients[side]) is not None:
                gradient[rows].addmm_(both, sim.col_Bd[cols], alpha=scale)
            if f.whole and (gradient := gradients[1]) is not None:
                gradient[cols].addmm_(both.T, sim.row_bd[rows], alpha=scale)
    for gradient, partner_bd in zip(gradients, (f.text_bd, f.image_bd), strict=True):
        if gradient is not None:
            gradient.addcmul_(weight_b[:, None], partner_bd, value=-scale)
    return gradients[0], gradients[1]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """True float32 products whatever the caller's settings: no autocast, TF32 or reduced-precision matmul.

    A backend that inherited a lower precision has it set explicitly afterwards; an exact one is not touched.
    """
    matmuls = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    lowered = [(matmul, matmul.fp32_precision) for matmul in matmuls]
    lowered = [(matmul, precision) for matmul, precision in lowered if precision not in ("ieee", "none")]
    try:
        for matmul, _ in lowered:
            matmul.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for matmul, precision in lowered:
            matmul.fp32_precision = precision


def _view(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: shape[0] * shape[1]].view(shape)
