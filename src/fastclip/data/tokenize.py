"""Captions to tokens: open_clip's tokenizer with a cache of words, which speeds it up; and where they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from open_clip.tokenizer import SimpleTokenizer, get_clean_fn
from torch import Tensor

_MULTIPLE = 8  # of tokens that captions are cut to; less in a short context
MAX_WORDS = 1 << 18  # cached words: at most about 60 MB in each loader worker


class TextEnds(NamedTuple):
    """Where captions end, for a text tower that does not need their padding.

    Shapes: b captions, T tokens.
    """

    rule: Literal["highest", "first", "padding"]
    """At the highest token, at the first `token`, or before padding with `token`."""
    token: int
    longest: int
    """Tokens that the tower takes at most."""

    def lengths(self, tokens_bT: Tensor) -> list[int]:
        """Tokens of each caption, including its end; the tokens must be on the host."""
        if self.rule == "padding":
            place_T = torch.arange(1, tokens_bT.shape[1] + 1, device=tokens_bT.device)
            return ((tokens_bT != self.token) * place_T).amax(dim=1).clamp(min=1).tolist()
        ends_bT = tokens_bT if self.rule == "highest" else torch.eq(tokens_bT, self.token).int()
        return (ends_bT.argmax(dim=1) + 1).tolist()

    def rounded(self, length: int) -> int:
        """A length rounded up, in a context of 77 to a multiple of 8: few shapes, and quick ones on GPUs."""
        multiple = max(1, min(_MULTIPLE, self.longest // 8))
        return min(-(-length // multiple) * multiple, self.longest)

    def cut(self, tokens_bT: Tensor, lengths: Sequence[int]) -> Tensor:
        """The tokens without what no caption of the batch needs."""
        return tokens_bT[:, : self.rounded(max(lengths))].contiguous()


class Tokenizer:
    """Wraps an open_clip tokenizer: the same tokens, several times faster on plain captions.

    CLIP's own tokenizer repairs encodings and HTML before it splits a caption, and no token crosses white
    space. So the tokens of a caption of printable ASCII without '&', which needs no repair, are those of its
    words in sequence. Other captions and other tokenizers go through open_clip unchanged.
    """

    def __init__(self, tokenizer: Any, max_words: int = MAX_WORDS):
        self.tokenizer, self.max_words = tokenizer, max_words
        self.context_length: int = tokenizer.context_length
        self.by_words = (
            type(tokenizer) is SimpleTokenizer
            and tokenizer.clean_fn is get_clean_fn("lower")
            and tokenizer.reduction_fn is None
        )
        self.words: dict[str, list[int]] = {}

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """Tokenize one caption or several: int64, (captions, context_length)."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not self.by_words or not texts:
            return self.tokenizer(texts)
        return torch.tensor([self._row(text) for text in texts])

    def __getstate__(self) -> dict:
        return self.__dict__ | {"words": {}}  # each process has its own cache

    def _row(self, text: str) -> list[int]:
        first, last = self.tokenizer.sot_token_id, self.tokenizer.eot_token_id
        room = self.context_length - 2
        tokens = self._encode(text)[:room]
        return [first, *tokens, last, *[0] * (room - len(tokens))]

    def _encode(self, text: str) -> list[int]:
        if not text.isascii() or not text.isprintable() or "&" in text:
            return self.tokenizer.encode(text)
        words = self.words
        tokens: list[int] = []
        for word in text.lower().split():
            word_tokens = words.get(word)
            if word_tokens is None:
                if len(words) >= self.max_words:
                    words.clear()
                word_tokens = words[word] = self.tokenizer.encode(word)
            tokens += word_tokens
        return tokens
