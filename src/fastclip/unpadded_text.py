"""Text features without computing padding: captions sorted by length, in chunks cut to their longest.

With a causal mask and pooling at the end token, or with an attention mask, what follows a caption's end does
not change its features, so leaving it out is exact. `find` checks this for a tower before it is used.

Shapes: b captions, T tokens, d features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from fastclip.data.tokenize import TextEnds
from fastclip.objective.sample_state import on_device

log = logging.getLogger(__name__)

# What one more chunk costs, in tokens: launching the layers' kernels. Constants, as a resumed run must choose
# the same chunks. A CPU's was measured with ViT-B-32 (benchmarks/unpadded_text.py); a GPU's is an estimate.
CHUNK_COST = {"cpu": 64, "cuda": 2048}
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of features relative to their length


class Chunk(NamedTuple):
    """Consecutive captions in the order of their lengths, cut to `length` tokens."""

    start: int
    stop: int
    length: int


class Plan(NamedTuple):
    """How a batch of captions is encoded."""

    order: list[int]
    """The captions by length, shortest first; equal ones in their own order."""
    chunks: list[Chunk]


def plan_chunks(rounded: Sequence[int], cost: int) -> Plan:
    """The chunks with the fewest tokens in all, where each chunk costs `cost` tokens more.

    `rounded` are the captions' lengths, with few different values.
    """
    order = sorted(range(len(rounded)), key=rounded.__getitem__)
    # Chunks end where the length changes: ends[i] captions have one of the i smallest sizes
    sizes = sorted(set(rounded))
    ends = [0, *(sum(one <= size for one in rounded) for size in sizes)]
    best: list[tuple[int, list[int]]] = [(0, [0])]  # by number of sizes: tokens, and where chunks end
    for last, size in enumerate(sizes, start=1):
        options = (
            (tokens + (ends[last] - ends[first]) * size + cost, [*path, last])
            for first, (tokens, path) in enumerate(best)
        )
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    path = best[-1][1]
    return Plan(order, [Chunk(ends[a], ends[b], sizes[b - 1]) for a, b in pairwise(path)])


class _Tower(Protocol):
    """A text tower that can be used without padding."""

    ends: TextEnds

    def encode(self, tokens_bT: Tensor, chunks: list[Chunk], last_b: Tensor) -> Tensor:
        """Features of captions that are sorted by length; `last_b` are the positions of their last tokens."""


class _Causal:
    """open_clip's own text tower, inside `CLIP` or as the text tower of `CustomTextCLIP`."""

    def __init__(self, tower: Any, ends: TextEnds):
        self.tower, self.ends = tower, ends

    def encode(self, tokens_bT: Tensor, chunks: list[Chunk], last_b: Tensor) -> Tensor:
        tower, cast = self.tower, self.tower.transformer.get_cast_dtype()
        parts = [tokens_bT[chunk.start : chunk.stop, : chunk.length] for chunk in chunks]
        # One look-up for all: each has a gradient of the whole table's size
        embedded = tower.token_embedding(torch.cat([part.flatten() for part in parts])).to(cast)
        pooled = []
        for chunk, part in zip(chunks, embedded.split([part.numel() for part in parts]), strict=True):
            rows, length = chunk.stop - chunk.start, chunk.length
            x = part.view(rows, length, -1) + tower.positional_embedding[:length].to(cast)
            x = tower.transformer(x, attn_mask=tower.attn_mask[:length, :length])
            pooled.append(x[torch.arange(rows, device=x.device), last_b[chunk.start : chunk.stop]])
        return self._projected(tower.ln_final(torch.cat(pooled)))

    def _projected(self, x: Tensor) -> Tensor:
        projection = self.tower.text_projection
        if projection is None:
            return x
        return projection(x) if isinstance(projection, nn.Linear) else x @ projection


class _Masked:
    """A Hugging Face encoder, which masks padding by its token."""

    def __init__(self, tower: HFTextEncoder, ends: TextEnds):
        self.tower, self.ends = tower, ends

    def encode(self, tokens_bT: Tensor, chunks: list[Chunk], last_b: Tensor) -> Tensor:
        return torch.cat([self.tower(tokens_bT[c.start : c.stop, : c.length]) for c in chunks])


class UnpaddedText:
    """Encodes captions without their padding."""

    def __init__(self, tower: _Tower):
        self.tower, self.ends = tower, tower.ends

    def encode(self, tokens_bT: Tensor, lengths: Sequence[int]) -> Tensor:
        """Features of the captions, equal to the padded tower's up to rounding; not normalised.

        `lengths` are those of `TextEnds`; the tokens may be cut.
        """
        cost = CHUNK_COST.get(tokens_bT.device.type, CHUNK_COST["cuda"])
        plan = plan_chunks([self.ends.rounded(length) for length in lengths], cost)
        places = sorted(range(len(plan.order)), key=plan.order.__getitem__)  # back to the caller's order
        last = [lengths[i] - 1 for i in plan.order]
        order_b, last_b, place_b = (
            on_device(torch.tensor(numbers, device="cpu"), tokens_bT.device)
            for numbers in (plan.order, last, places)
        )
        return self.tower.encode(tokens_bT[order_b], plan.chunks, last_b)[place_b]


def find(clip: Any, context_length: int) -> UnpaddedText | None:
    """The model's text tower without padding, if that is exact; None, with a line in the log, if not."""
    tower, why = _find_tower(clip, context_length)
    if tower is not None:
        unpadded = UnpaddedText(tower)
        error, allowed = (0.0, 0.0) if clip.logit_scale.is_meta else largest_error(clip, unpadded)
        if error <= allowed:
            log.info("Captions are encoded without padding: features differ by at most %.0e.", error)
            return unpadded
        why = f"features depend on it, by {error:.0e}"
    log.info("Captions are encoded with padding: %s.", why)
    return None


def _find_tower(clip: Any, context_length: int) -> tuple[_Tower | None, str]:
    """The tower in a form that needs no padding, or why there is none."""
    text = getattr(clip, "text", None)
    if isinstance(text, HFTextEncoder):
        if text.output_tokens:
            return None, "the encoder returns its tokens too"
        if text.config.pad_token_id is None:
            return None, "the encoder's config names no padding token"
        return _Masked(text, TextEnds("padding", text.config.pad_token_id, context_length)), ""
    tower = clip if text is None else text
    if text is not None and not isinstance(text, TextTransformer):
        return None, f"{type(text).__name__} may read it"
    if getattr(tower, "attn_mask", None) is None:
        return None, "attention is not causal, and reads it"
    if getattr(tower, "cls_emb", None) is not None:
        return None, "a class token follows it"
    own = "text_" if text is None else ""  # CLIP has the attributes of TextTransformer with this prefix
    pool = getattr(tower, f"{own}pool_type")
    if pool == "argmax":
        return _Causal(tower, TextEnds("highest", tower.vocab_size - 1, tower.context_length)), ""
    if pool == "eos":
        return _Causal(tower, TextEnds("first", getattr(tower, f"{own}eos_id"), tower.context_length)), ""
    return None, f"the features are those of the {pool} position"


@torch.no_grad()
def largest_error(clip: Any, unpadded: UnpaddedText) -> tuple[float, float]:
    """How far features of random captions are from the padded ones in eval mode, and how far they may be."""
    device, ends, tokens_bT = clip.logit_scale.device, unpadded.ends, _random_captions(unpadded.ends)
    modes = [(module, module.training) for module in clip.modules()]
    clip.eval()
    try:
        padded_bd, ours = clip.encode_text(tokens_bT.to(device)), []
        for tokens_1T in tokens_bT.split(1):  # one at a time: together they might not be cut
            length = ends.lengths(tokens_1T)
            ours.append(unpadded.encode(ends.cut(tokens_1T, length).to(device), length))
    finally:
        for module, training in modes:
            module.training = training
    error_bd = (torch.cat(ours) - padded_bd) / padded_bd.norm(dim=-1, keepdim=True)
    return float(error_bd.abs().max()), _TOLERANCE.get(padded_bd.dtype, 1e-2)


def _random_captions(ends: TextEnds) -> Tensor:
    """Tokens of captions of all kinds of lengths, but none of the whole context."""
    generator = torch.Generator("cpu").manual_seed(0)
    longest, padding = ends.longest, ends.token if ends.rule == "padding" else 0
    lengths = sorted({2, 3, longest // 4, longest // 2, longest - 1} & set(range(2, longest))) or [longest]
    words = [token for token in range(1, 12) if token != ends.token]  # in every vocabulary
    drawn_bT = torch.randint(0, len(words), (len(lengths), longest), generator=generator, device="cpu")
    tokens_bT = torch.tensor(words, device="cpu")[drawn_bT]
    for row, length in enumerate(lengths):
        tokens_bT[row, length:] = padding
        if ends.rule != "padding":
            tokens_bT[row, length - 1] = ends.token
    return tokens_bT
