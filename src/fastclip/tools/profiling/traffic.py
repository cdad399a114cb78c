"""How many bytes one worker sends in a step, by algorithm: the formulas of the collectives of a ring.

Letters: K workers, b local batch, B = K·b global batch, d features. `benchmarks/bytes_on_the_wire.py`
counts the same at the calls themselves. What is small and rare is left out: buffers of the towers, words
between hosts, the checks of the first step.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from fastclip.objective.algorithms import Algorithm, find_algorithm

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes of gradients that DDP sends at once
_ID_BYTES = 8


class Traffic(NamedTuple):
    """Bytes that one worker sends in a step."""

    features: float  # features of its images and texts
    feature_gradients: float  # gradients of features, which the peers send back and FastCLIP does not
    scalars: float  # ids, rows of the sample state, and a few numbers a pair
    weights: float  # gradients of the weights
    buckets: int  # in how many pieces the gradients of the weights go

    @property
    def exchange(self) -> float:
        """All but the gradients of the weights: what algorithms differ in."""
        return self.features + self.feature_gradients + self.scalars

    @property
    def total(self) -> float:
        return self.exchange + self.weights


def step_traffic(
    algorithm: str,
    *,
    workers: int,
    local_batch: int,
    features: int,
    trained_bytes: int,
    value_bytes: int = 4,
    wire_bytes: int | None = None,
) -> Traffic:
    """What each worker sends in a step.

    Args:
        trained_bytes: of all weights that have gradients.
        value_bytes: of a number in features and estimators: 4, or 8 in float64. On GPUs features leave the
            towers in float32 under autocast too.
        wire_bytes: of a number in features on the network, 2 with `loss.wire_dtype`; as they are if left out.
    """
    row, K = find_algorithm(algorithm), workers
    if K < 1 or local_batch < 1:
        raise ValueError(f"workers={workers} and local_batch={local_batch} must be at least 1.")
    sent_bytes = value_bytes if row.peer else wire_bytes or value_bytes
    side = local_batch * features * sent_bytes  # b×d of one tower
    towers = 1 if row.peer == "SigLipLoss" else 2  # SigLIP's texts alone walk past all workers
    sent, weights = towers * all_gather(K, side), all_reduce(K, trained_bytes)
    if row.peer:
        return Traffic(sent, sent, 0.0, weights, buckets(trained_bytes))
    return Traffic(sent, 0.0, _scalars(row, K, local_batch, value_bytes), weights, buckets(trained_bytes))


def _scalars(row: Algorithm, K: int, b: int, value_bytes: int) -> float:
    """Bytes of all that is neither features nor weights."""
    individual = row.temperature == "individual"
    # λ and log u of both sides (and the gradients of individual τ); two totals a worker
    shared = all_gather(K, ((6 if individual else 4) * b + 2) * value_bytes)
    if not row.fcco:
        return shared
    ids = all_gather(K, b * _ID_BYTES)
    state = all_reduce(K, K * b * (4 if individual else 2) * value_bytes)  # log u (and τ) of both sides
    return ids + state + shared


def all_gather(workers: int, own_bytes: float) -> float:
    """Sent by each worker around a ring to give this much to all others; a reduce-scatter is its mirror."""
    return (workers - 1) * own_bytes


def all_reduce(workers: int, whole_bytes: float) -> float:
    """Sent by each worker to sum so much over all."""
    return 2 * (workers - 1) / workers * whole_bytes


def buckets(trained_bytes: int) -> int:
    """In how many pieces DDP sends the gradients."""
    return 1 + ceil(max(0, trained_bytes - _FIRST_BUCKET) / _BUCKET)
