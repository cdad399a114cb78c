"""Bytes that one rank sends in a step, by algorithm: the formulas of ring collectives.

Letters: K ranks, b local batch, B = K·b global batch, d features. `benchmarks/bytes_on_the_wire.py` counts
the same at the calls themselves. Small and rare transfers are not included: buffers of the towers,
control messages, the checks of the first step.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from fastclip.errors import InputError
from fastclip.objective.algorithms import Algorithm, find_algorithm

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes of gradients in one message of DDP
_ID_BYTES = 8  # of a sample's number, and of its caption's hash


class Traffic(NamedTuple):
    """Bytes that one rank sends in a step."""

    features: float  # features of its images and texts
    feature_gradients: float  # sent back by the peers, not by FastCLIP
    scalars: float  # ids, rows of the sample state, and a few numbers per pair
    weights: float  # gradients of the weights
    buckets: int  # messages in which they are sent

    @property
    def exchange(self) -> float:
        """Everything except the weight gradients: where algorithms differ."""
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
    distinct: bool = False,
) -> Traffic:
    """The bytes that each rank sends in a step.

    Args:
        workers: number of ranks.
        trained_bytes: of all weights that have gradients.
        value_bytes: per number of features and estimators: 4, or 8 in float64. On GPUs the towers return
            float32 features under autocast too.
        wire_bytes: per number of features on the network, 2 with `loss.wire_dtype`; default: value_bytes.
        distinct: whether the captions' hashes are sent too, for `loss.negatives: distinct`.
    """
    row, K = find_algorithm(algorithm), workers
    for name, value in (("workers", workers), ("local_batch", local_batch)):
        if value < 1:
            raise InputError(name, f"is {value}, but must be at least 1.")
    sent_bytes = value_bytes if row.peer else wire_bytes or value_bytes
    side = local_batch * features * sent_bytes  # b×d of one tower
    towers = 1 if row.peer == "SigLipLoss" else 2  # SigLIP sends only texts around the ring
    sent, weights = towers * all_gather(K, side), all_reduce(K, trained_bytes)
    if row.peer:
        return Traffic(sent, sent, 0.0, weights, buckets(trained_bytes))
    scalars = _scalars(row, K, local_batch, value_bytes) + distinct * all_gather(K, local_batch * _ID_BYTES)
    return Traffic(sent, 0.0, scalars, weights, buckets(trained_bytes))


def _scalars(row: Algorithm, K: int, b: int, value_bytes: int) -> float:
    """Bytes that are neither features nor weights."""
    individual = row.temperature == "individual"
    # λ and log u of both sides (and the gradients of individual τ); two totals per rank
    shared = all_gather(K, ((6 if individual else 4) * b + 2) * value_bytes)
    if not row.fcco:
        return shared
    ids = all_gather(K, b * _ID_BYTES)
    state = all_reduce(K, K * b * (4 if individual else 2) * value_bytes)  # log u (and τ) of both sides
    return ids + state + shared


def all_gather(ranks: int, own_bytes: float) -> float:
    """Sent by each rank of a ring to give its bytes to all others; a reduce-scatter sends as much."""
    return (ranks - 1) * own_bytes


def all_reduce(ranks: int, total_bytes: float) -> float:
    """Sent by each rank of a ring to sum this many bytes over all."""
    return 2 * (ranks - 1) / ranks * total_bytes


def buckets(trained_bytes: int) -> int:
    """The number of messages in which DDP sends the gradients."""
    return 1 + ceil(max(0, trained_bytes - _FIRST_BUCKET) / _BUCKET)
