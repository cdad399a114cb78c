"""Captions to tokens: open_clip's tokenizer, with plain captions put together from words it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from open_clip.tokenizer import SimpleTokenizer, get_clean_fn
from torch import Tensor

MAX_WORDS = 1 << 18  # remembered words; some 60 MB in each loader process at the very most


class Tokenizer:
    """Gives what the open_clip tokenizer it wraps gives, bit for bit, several times faster on plain captions.

    CLIP's own tokenizer repairs encodings and HTML before it cuts a caption, and no token crosses white
    space. So a caption of printable ASCII without '&', where nothing can need repair, is the tokens of its
    words one after another. Other captions, and other tokenizers, take open_clip's own way.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.context_length: int = tokenizer.context_length
        self.by_words = (
            type(tokenizer) is SimpleTokenizer
            and tokenizer.clean_fn is get_clean_fn("lower")
            and tokenizer.reduction_fn is None
        )
        self.words: dict[str, list[int]] = {}

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """Tokens of one caption or several, (captions, context_length), int64."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not self.by_words or not texts:
            return self.tokenizer(texts)
        return torch.tensor([self._row(text) for text in texts])

    def __getstate__(self) -> dict:
        return self.__dict__ | {"words": {}}  # each process remembers its own

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
            found = words.get(word)
            if found is None:
                if len(words) >= MAX_WORDS:
                    words.clear()
                found = words[word] = self.tokenizer.encode(word)
            tokens += found
        return tokens
