"""How much memory a worker needs in training: counted on the run's own parts, built on the `meta` device.

Letters: K workers, b local batch, B = K·b global batch, d features. Weights, gradients, the optimizer's and
the samples' state are exact; what the loss holds is counted from its code for a GPU, and is an estimate for
open_clip's own losses. The towers' activations are an estimate. The device's own needs are not in it:
CUDA's context, NCCL's buffers, what allocators waste.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import open_clip
import torch
from torch import Tensor, nn

from fastclip.config.resolved import Resolved
from fastclip.model import BatchNorm, TwoTowers, find_model
from fastclip.objective.exchange import Exchange
from fastclip.objective.kernel import Features, Similarity, similarities
from fastclip.objective.sample_state import SampleState
from fastclip.optim import build_optimizer

_TRIED_PAIRS = 2  # BatchNorm wants more than one


class Range(NamedTuple):
    """An estimate, in bytes."""

    low: int
    high: int


class Memory(NamedTuple):
    """Bytes on one worker's device in a training step."""

    weights: int  # with the towers' buffers, and τ
    gradients: int
    optimizer: int
    batch: int  # images and tokens
    features: int  # local and gathered, and their gradients
    loss: int  # similarities, tile by tile; logits of open_clip's losses (an estimate)
    state: int | None  # this worker's part of the samples' state; None if the number of pairs is not known
    activations: Range | None  # what the towers keep for the backward pass, with autocast's copies of weights

    @property
    def counted(self) -> int:
        """All but the activations."""
        return sum(part or 0 for part in self[:-1])


class ModelSize(NamedTuple):
    """What a plan has to know of a model."""

    weights: int  # bytes of all parameters
    buffers: int  # bytes
    trained: int  # bytes of the parameters that have gradients
    trained_tensors: int
    embeddings: int  # bytes of the tables of tokens, which autocast does not copy
    features: int
    image_size: int
    context_length: int


def towers_on_meta(config: Resolved) -> TwoTowers:
    """The run's model, with shapes and without memory. Weights to start from would change nothing."""
    name = find_model(config.model.name)
    start: dict[str, Any] = {"init_logit_bias": -10.0 if config.loss.algorithm.logit_bias else None}
    start |= {"load_weights": False, "pretrained_text": False, "device": "meta"}
    shown = logging.root.manager.disable
    logging.disable(logging.WARNING)  # open_clip warns that weights are random; here there are none
    try:
        with torch.device("meta"):
            clip = open_clip.create_model(name, **start)
    except Exception as error:  # each tower's library has its own
        raise ValueError(
            f"model.name={config.model.name!r} cannot be built without weights: {error}"
        ) from error
    finally:
        logging.disable(shown)
    # SyncBatchNorm has the same tensors as BatchNorm
    batch_norm: BatchNorm = "frozen" if config.model.batch_norm == "frozen" else "local"
    towers = TwoTowers(clip, name, open_clip.get_model_config(name), config.model.freeze, batch_norm)
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
    """What the towers keep of one pair for the backward pass, in the precision of their weights.

    Its ends are attention without its matrix of weights, as a GPU's fused kernels keep it, and with it.
    """
    with _fused_attention():
        low = _kept_of_a_pair(towers)
    return Range(low, _kept_of_a_pair(towers))


def _kept_of_a_pair(towers: TwoTowers) -> int:
    kept: dict[int, Tensor] = {}
    own = {p.untyped_storage()._cdata for p in towers.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor  # which also keeps the address from being used again
        return tensor

    pairs, side = _TRIED_PAIRS, towers.image_size
    images = torch.empty(pairs, 3, side, side, device="meta")
    tokens = torch.empty(pairs, towers.context_length, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        towers(images, tokens)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own) // pairs


class _Fused(torch.autograd.Function):
    """Keeps what a fused kernel keeps: its inputs and its output. There is nothing to compute on meta."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out)
        return out


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention on meta is the unfused one: there is no kernel to choose."""
    unfused = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = lambda q, k, v, *_, **options: _Fused.apply(q, k, v)
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = unfused


def memory(
    config: Resolved, size: ModelSize, workers: int, local_batch: int, pairs: int | None, a_pair: Range | None
) -> Memory:
    """What one worker needs; the first, which has the largest part of the samples' state.

    `pairs` of the data, and the activations of `a_pair` (by `activation_bytes`), are None if unknown.
    """
    row, dtype = config.loss.algorithm, dtype_of(config)
    own_tau = not row.peer and row.temperature != "individual"  # one τ, in the loss
    trained_tau = own_tau and row.temperature == "learnable"
    gradients = size.trained + trained_tau * dtype.itemsize
    pair = 3 * size.image_size**2 * dtype.itemsize + size.context_length * 8
    return Memory(
        weights=size.weights + size.buffers + own_tau * dtype.itemsize,
        gradients=gradients,
        optimizer=_optimizer_bytes(config, gradients, size.trained_tensors + trained_tau),
        batch=local_batch * pair,
        features=_feature_bytes(config, workers, local_batch, size.features),
        loss=_loss_bytes(config, workers, local_batch, size.features),
        state=state_bytes(config, pairs, workers),
        activations=_activations(config, size, local_batch, a_pair),
    )


def state_bytes(config: Resolved, pairs: int | None, workers: int) -> int | None:
    """The first worker's part of what is remembered of each pair: 8 bytes a pair, 36 with individual τ."""
    row = config.loss.algorithm
    if not row.fcco:
        return 0
    if pairs is None:
        return None
    tau = config.loss.tau if row.temperature == "individual" else None
    state = SampleState(pairs, _Imagined(workers), tau, torch.device("meta"), dtype_of(config))
    return _bytes([*state.columns.values(), state.visited])


class _Imagined(Exchange):
    """So many workers, of which this is the first."""

    def __init__(self, workers: int):
        self.group, self.world_size, self.rank = None, workers, 0


def tile_bytes(sims: list[Similarity]) -> int:
    """What the similarities hold at most, their working memory included."""
    size = sims[0].row_bd.element_size()
    whole = sum(len(sim.row_bd) * len(sim.col_Bd) for sim in sims if sim.keeps)
    tiles = [sim.tile_rows * sim.tile_cols for sim in sims]
    again = max(0 if sim.keeps else tile for sim, tile in zip(sims, tiles, strict=True))
    return (whole + sum(tiles) + again) * size


def _optimizer_bytes(config: Resolved, trained: int, tensors: int) -> int:
    """By what the real optimizer keeps of a parameter of two numbers: tensors of its shape, and counters."""
    probe, optim = nn.Parameter(torch.zeros(2)), config.optim
    optimizer = build_optimizer(optim.name, [("probe", probe)], [], lr=1.0, weight_decay=0.0, **optim.options)
    kept = [value for value in optimizer.state[probe].values() if isinstance(value, Tensor)]
    slots = [value for value in kept if value.shape == probe.shape]
    counters = _bytes(value for value in kept if value.shape != probe.shape)
    return len(slots) * trained + counters * tensors


def _feature_bytes(config: Resolved, K: int, b: int, d: int) -> int:
    """Of both towers: local, gathered, gradients."""
    size, local, everyone = dtype_of(config).itemsize, 2 * b * d, 2 * K * b * d
    peer = config.loss.algorithm.peer
    if peer == "ClipLoss":  # gathered in pieces, put together; and the gradients of all of them
        return size * (2 * local + (3 * everyone if K > 1 else 0))
    if peer == "SigLipLoss":  # other workers' texts, kept for the backward pass
        return size * (2 * local + (everyone - local) // 2)
    wire = config.loss.wire_dtype
    sent = getattr(torch, wire).itemsize if wire else size
    gathered = everyone * sent if K > 1 else 0
    if sent != size:  # rounded for the journey, and back in full precision
        gathered += local * sent + everyone * size
    return 2 * local * size + gathered


def _loss_bytes(config: Resolved, K: int, b: int, d: int) -> int:
    B, dtype, peer = K * b, dtype_of(config), config.loss.algorithm.peer
    if peer == "SigLipLoss":  # of each worker's texts: labels, and logits with their signs
        return b * B * 2 * dtype.itemsize
    if peer == "ClipLoss":  # logits of both sides, and their log-softmax in full precision
        half = config.precision in ("bfloat16", "float16")
        return 2 * b * B * ((2 if half else dtype.itemsize) + dtype.itemsize)
    local, everyone = (torch.empty(rows, d, dtype=dtype, device="meta") for rows in (b, B))
    return tile_bytes(similarities(Features(local, local, everyone, everyone, 0), config.loss.tile_bytes))


def _activations(config: Resolved, size: ModelSize, b: int, a_pair: Range | None) -> Range | None:
    if a_pair is None or config.model.gradient_checkpointing:
        return None
    low, high = (min(b, config.batch.micro or b) * count for count in a_pair)
    if config.precision not in ("bfloat16", "float16"):
        return Range(low, high)
    copies = (size.weights - size.embeddings) // 2
    return Range(low // 2 + copies, high + copies)  # norms and the like stay in float32


def dtype_of(config: Resolved) -> torch.dtype:
    """Of weights, features and estimators, whatever the towers compute in."""
    return torch.float64 if config.precision == "float64" else torch.float32


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
