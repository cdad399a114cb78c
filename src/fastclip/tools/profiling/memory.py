"""The memory of a rank in training, counted on the run's own parts, built on the `meta` device.

Letters: K ranks, b local batch, B = K·b global batch, d features. Weights, gradients, optimizer state and
sample state are exact. The loss's memory is counted from its code for a GPU, and estimated for open_clip's
own losses. The towers' activations are estimated. Not included: CUDA context, NCCL buffers, allocator
fragmentation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import open_clip
import torch
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, nn

from fastclip.config.resolved import Resolved
from fastclip.errors import OptionError
from fastclip.model import BatchNorm, TwoTowers, find_model
from fastclip.objective.exchange import Exchange
from fastclip.objective.kernel import Features, Similarity, similarities
from fastclip.objective.sample_state import SampleState
from fastclip.optim import build_optimizer
from fastclip.towers.design import Parts, design
from fastclip.towers.hf_text import without_mask

_TRIED_PAIRS = 2  # BatchNorm requires more than one


class Range(NamedTuple):
    """An estimate, in bytes."""

    low: int
    high: int


class Memory(NamedTuple):
    """Bytes on one rank's device in a training step."""

    weights: int  # including the towers' buffers, τ, and the average of the weights if there is one
    gradients: int
    optimizer: int
    batch: int  # images and tokens of this step and the next; images of a micro-batch, normalised
    features: int  # local, gathered, and their gradients
    loss: int  # tiles of similarities; logits of open_clip's losses (an estimate)
    state: int | None  # this rank's part of the sample state; None if the number of pairs is unknown
    activations: Range | None  # saved by the towers for the backward pass, with autocast's weight copies

    @property
    def counted(self) -> int:
        """Everything except the activations."""
        return sum(part or 0 for part in self[:-1])


class ModelSize(NamedTuple):
    """The sizes of a model that a plan needs."""

    weights: int  # bytes of all parameters
    buffers: int  # bytes
    trained: int  # bytes of the parameters that have gradients
    trained_tensors: int
    embeddings: int  # bytes of token embeddings, which autocast does not copy
    features: int
    image_size: int
    context_length: int


def towers_on_meta(config: Resolved) -> TwoTowers:
    """The run's model with shapes but no memory. Pretrained weights would change nothing."""
    plan = design(find_model(config.model.name), Parts.of(config.model))
    start: dict[str, Any] = {"init_logit_bias": -10.0 if config.loss.algorithm.logit_bias else None}
    start |= {"load_weights": False, "pretrained_text": False, "device": "meta"}
    shown = logging.root.manager.disable
    logging.disable(logging.WARNING)  # open_clip warns that weights are random; here it does not matter
    try:
        with torch.device("meta"), plan.network(), plan.arguments() as other:
            clip = open_clip.create_model(plan.name, **start, **other)
    except Exception as error:  # each tower's library raises its own
        raise OptionError(
            "model.name", config.model.name, f"cannot be built without weights: {error}"
        ) from error
    finally:
        logging.disable(shown)
    if isinstance(getattr(clip, "text", None), HFTextEncoder):
        without_mask(clip.text)
    # SyncBatchNorm has the same tensors as BatchNorm
    batch_norm: BatchNorm = "frozen" if config.model.batch_norm == "frozen" else "local"
    model = config.model
    with torch.device("meta"):  # adapters too
        towers = TwoTowers(clip, plan, plan.config, model.freeze, batch_norm, lora=model.lora)
    if not config.loss.algorithm.peer:
        towers.freeze_logit_scale()
    return towers.to(dtype_of(config)).train()


def model_size(towers: TwoTowers) -> ModelSize:
    trained = [p for p in towers.parameters() if p.requires_grad]
    return ModelSize(
        weights=_bytes(towers.parameters()),
        buffers=_bytes(towers.buffers()),
        trained=_bytes(trained),
        trained_tensors=len(trained),
        embeddings=_bytes(m.weight for m in towers.modules() if isinstance(m, nn.Embedding)),
        features=towers.model_cfg["embed_dim"],
        image_size=towers.image_size,
        context_length=towers.context_length,
    )


def activation_bytes(towers: TwoTowers) -> Range:
    """Bytes per pair that the towers save for the backward pass, in the precision of their weights.

    Low: fused attention, as on a GPU. High: attention that stores its matrix of weights.
    """
    with _fused_attention():
        low = _saved_per_pair(towers)
    return Range(low, _saved_per_pair(towers))


def _saved_per_pair(towers: TwoTowers) -> int:
    saved: dict[int, Tensor] = {}
    own = {p.untyped_storage()._cdata for p in towers.parameters()}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor  # holding it prevents its address from being reused
        return tensor

    pairs, side = _TRIED_PAIRS, towers.image_size
    images = torch.empty(pairs, 3, side, side, device="meta")
    tokens = torch.empty(pairs, towers.context_length, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        towers(images, tokens)
    return sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in own) // pairs


class _Fused(torch.autograd.Function):
    """Saves what a fused kernel saves: its inputs and its output. On meta there is nothing to compute."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out)
        return out


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Replace the attention of meta, which is unfused, by one that saves as little as a fused kernel."""
    unfused = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = lambda q, k, v, *_, **options: _Fused.apply(q, k, v)
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = unfused


def memory(
    config: Resolved,
    size: ModelSize,
    ranks: int,
    local_batch: int,
    num_pairs: int | None,
    activations: Range | None,
) -> Memory:
    """The memory of rank 0, which has the largest part of the sample state.

    Args:
        num_pairs: in the data set; None if unknown.
        activations: per pair, from `activation_bytes`; None if unknown.
    """
    row, dtype = config.loss.algorithm, dtype_of(config)
    own_tau = not row.peer and row.temperature != "individual"  # one τ, in the loss
    trained_tau = own_tau and row.temperature == "learnable"
    gradients = size.trained + trained_tau * dtype.itemsize
    averaged = 0 if config.model.ema is None else size.trained
    return Memory(
        weights=size.weights + size.buffers + own_tau * dtype.itemsize + averaged,
        gradients=gradients,
        optimizer=_optimizer_bytes(config, gradients, size.trained_tensors + trained_tau),
        batch=_batch_bytes(config, size, local_batch),
        features=_feature_bytes(config, ranks, local_batch, size.features),
        loss=_loss_bytes(config, ranks, local_batch, size.features),
        state=state_bytes(config, num_pairs, ranks),
        activations=_activations(config, size, local_batch, activations),
    )


def state_bytes(config: Resolved, num_pairs: int | None, ranks: int) -> int | None:
    """Rank 0's part of the sample state: 8 bytes per pair, 36 with individual τ."""
    row = config.loss.algorithm
    if not row.fcco:
        return 0
    if num_pairs is None:
        return None
    tau = config.loss.tau if row.temperature == "individual" else None
    state = SampleState(num_pairs, _Imagined(ranks), tau, torch.device("meta"), dtype_of(config))
    return _bytes([*state.columns.values(), state.visited])


class _Imagined(Exchange):
    """Rank 0 of a job that does not exist."""

    def __init__(self, ranks: int):
        self.group, self.world_size, self.rank = None, ranks, 0


def tile_bytes(sims: list[Similarity]) -> int:
    """The most memory that the similarities hold, including scratch space."""
    size = sims[0].row_bd.element_size()
    whole = sum(len(sim.row_bd) * len(sim.col_Bd) for sim in sims if sim.keeps)
    tiles = [sim.tile_rows * sim.tile_cols for sim in sims]
    again = max(0 if sim.keeps else tile for sim, tile in zip(sims, tiles, strict=True))
    return (whole + sum(tiles) + again) * size


def _batch_bytes(config: Resolved, size: ModelSize, b: int) -> int:
    """The next batch is copied to the device during a step. `exact` images are normalised already."""
    values, fast, dtype = 3 * size.image_size**2, config.data.decoder == "fast", dtype_of(config)
    decoded = values * (torch.uint8 if fast else torch.float32).itemsize
    normalised = values * dtype.itemsize if fast or dtype != torch.float32 else 0
    return 2 * b * (decoded + size.context_length * 8) + _at_a_time(config, b) * normalised


def _at_a_time(config: Resolved, b: int) -> int:
    """Pairs of a micro-batch; auto splits a batch only if it must."""
    micro = config.batch.micro
    return min(b, micro) if isinstance(micro, int) else b


def _optimizer_bytes(config: Resolved, trained: int, tensors: int) -> int:
    """From the state that the real optimizer has for a tiny parameter: tensors of its shape, and counters."""
    probe, optim = nn.Parameter(torch.zeros(2)), config.optim
    optimizer = build_optimizer(optim.name, [("probe", probe)], [], lr=1.0, weight_decay=0.0, **optim.options)
    state = [value for value in optimizer.state[probe].values() if isinstance(value, Tensor)]
    slots = [value for value in state if value.shape == probe.shape]
    counters = _bytes(value for value in state if value.shape != probe.shape)
    return len(slots) * trained + counters * tensors


def _feature_bytes(config: Resolved, K: int, b: int, d: int) -> int:
    """Features of both towers: local, gathered, gradients."""
    size, local, gathered = dtype_of(config).itemsize, 2 * b * d, 2 * K * b * d
    peer = config.loss.algorithm.peer
    if peer == "ClipLoss":  # gathered in pieces, concatenated, and all their gradients
        return size * (2 * local + (3 * gathered if K > 1 else 0))
    if peer == "SigLipLoss":  # other ranks' texts, saved for the backward pass
        return size * (2 * local + (gathered - local) // 2)
    wire = config.loss.wire_dtype
    sent = getattr(torch, wire).itemsize if wire else size
    received = gathered * sent if K > 1 else 0
    if sent != size:  # rounded to be sent, and back in full precision
        received += local * sent + gathered * size
    return 2 * local * size + received


def _loss_bytes(config: Resolved, K: int, b: int, d: int) -> int:
    B, dtype, peer = K * b, dtype_of(config), config.loss.algorithm.peer
    if peer == "SigLipLoss":  # labels and signed logits of each rank's texts
        return b * B * 2 * dtype.itemsize
    if peer == "ClipLoss":  # logits of both sides, and their log-softmax in full precision
        half = config.precision in ("bfloat16", "float16")
        return 2 * b * B * ((2 if half else dtype.itemsize) + dtype.itemsize)
    local, gathered = (torch.empty(rows, d, dtype=dtype, device="meta") for rows in (b, B))
    features = Features(local, local, gathered, gathered, 0)
    return tile_bytes(similarities(features, int(config.loss.tile_mib * (1 << 20))))


def _activations(config: Resolved, size: ModelSize, b: int, per_pair: Range | None) -> Range | None:
    if per_pair is None or config.model.gradient_checkpointing:
        return None
    low, high = (_at_a_time(config, b) * count for count in per_pair)
    if config.precision not in ("bfloat16", "float16"):
        return Range(low, high)
    copies = (size.weights - size.embeddings) // 2
    return Range(low // 2 + copies, high + copies)  # norms and similar stay in float32


def dtype_of(config: Resolved) -> torch.dtype:
    """The dtype of weights, features and estimators, whatever the towers compute in."""
    return torch.float64 if config.precision == "float64" else torch.float32


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
