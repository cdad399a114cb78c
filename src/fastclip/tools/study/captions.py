"""How often equal captions meet in a batch: a contrastive loss takes the one for a negative of the other."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln

from fastclip.config.options import TrainConfig, whole_batches
from fastclip.data.images import BadImage
from fastclip.data.manifest import Manifest, Place, open_manifest
from fastclip.data.order import Order

MOST_PAIRS = 5_000_000
_AT_ONCE = 1 << 20  # places in the order of a run that are looked at together


class EqualCaptions(NamedTuple):
    """Of a run's order."""

    actual: float
    """The share of the samples of a global batch that have another one with their caption in it: the mean
    over all steps of the run."""
    expected: float
    """The same share where each batch is drawn by chance."""
    repeated: float
    """The share of the collection's samples whose caption others have too."""
    captions: int
    """Different ones."""
    samples: int


def equal_captions(
    config: TrainConfig, progress: Callable[[int, int], None] | None = None
) -> EqualCaptions | None:
    """Counted exactly, over the very batches of the run; None for collections of over 5 million pairs."""
    data = config.data
    if data.train is None:
        raise ValueError("data.train is missing: there are no captions to count.")
    manifest = open_manifest(data.train, image_column=data.image_column, caption_column=data.caption_column)
    if len(manifest) > MOST_PAIRS:
        return None
    code_n = caption_codes(manifest, progress)
    n, batch = len(manifest), config.batch.size
    steps = whole_batches(config.epochs, n, batch)
    # The order is one stream: k batches are one batch k times as large
    together = max(1, min(steps, _AT_ONCE // batch))
    order = Order(n, together * batch, config.seed, data.shuffle, manifest.block_ends(), data.window)
    met = 0
    for first in range(0, steps, together):
        code_sB = code_n[order.global_batch(first // together).ids].reshape(together, batch)
        met += count_equal(code_sB[: steps - first])
    size_c = np.bincount(code_n)
    repeated = float(size_c[size_c > 1].sum() / n)
    return EqualCaptions(met / (steps * batch), expected_share(size_c, batch), repeated, len(size_c), n)


def caption_codes(manifest: Manifest, progress: Callable[[int, int], None] | None = None) -> np.ndarray:
    """A number for each sample: equal for equal captions, as training reads them."""
    seen: dict[bytes, int] = {}
    code_n = np.empty(len(manifest), dtype=np.int64)
    for sample in range(len(manifest)):
        try:
            caption = manifest.caption_at(Place(*manifest.rows[sample].item()))
        except BadImage:  # empty: another sample takes its place, and nobody shares it
            caption = f"\0{sample}"
        code_n[sample] = seen.setdefault(blake2b(caption.encode(), digest_size=16).digest(), len(seen))
        if progress is not None and sample % 4096 == 0:
            progress(sample, len(manifest))
    return code_n


def count_equal(code_sB: np.ndarray) -> int:
    """Samples that have another one with their code in the same row."""
    ordered = np.sort(code_sB, axis=1)
    same = ordered[:, 1:] == ordered[:, :-1]
    edge = np.zeros((len(ordered), 1), dtype=bool)
    return int((np.hstack([same, edge]) | np.hstack([edge, same])).sum())


def expected_share(size_c: np.ndarray, batch: int) -> float:
    """Of a batch drawn by chance from captions that have so many samples each.

    The others of a sample with c of its caption are batch − 1 draws from the rest; C(n−c, B−1) / C(n−1, B−1)
    is the chance that none of its c − 1 likes is among them.
    """
    n = int(size_c.sum())
    sizes, counts = np.unique(size_c, return_counts=True)
    possible = n - sizes >= batch - 1
    log_none = _log_choose(n - sizes[possible], batch - 1) - _log_choose(np.array(n - 1), batch - 1)
    none = np.zeros(len(sizes))
    none[possible] = np.exp(log_none)
    return float((sizes * counts * (1 - none)).sum() / n)


def _log_choose(n: np.ndarray, k: int) -> np.ndarray:
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
