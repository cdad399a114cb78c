"""The tokenizer's fast path against open_clip's own tokenizer."""

from __future__ import annotations

import pickle

import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.data.tokenize import Tokenizer

THEIRS = open_clip.get_tokenizer("ViT-B-32")
OURS = Tokenizer(THEIRS)

ODD = [
    "",
    " ",
    "A dog's toy, 3.5 x 12 cm; it's NOT here!",
    "a\tb\nc\r\nd\x00e\x1b[31mf\x7fg",
    "fish &amp; chips &lt;b&gt; AT&T &",
    "caf\u00e9 \u201cquoted\u201d \u2014 dash\u00a0space \ufb01 \u3000wide",
    "schÃ¶n broken encoding, naÃ¯ve",
    "日本語 текст עברית 🐶🐶",
    "<start_of_text> inside <end_of_text>x <END_OF_TEXT>",
    "we'll they'd I'm 'S 'RE ''s",
    "word " * 200,
    "x" * 500,
    "\x85\u2028\x1c\x1d",
]


@pytest.mark.parametrize("text", ODD)
def test_unusual_captions_have_open_clips_tokens(text):
    assert torch.equal(OURS(text), THEIRS(text))


WORDS = st.sampled_from(
    ["a", "Photo", "of", "dog's", "snow-covered", "&amp;", "<b>", "it'll", "2024", "é", "...", "\n"]
)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=90).map(" ".join)), max_size=4))
@pytest.mark.slow
def test_any_captions_have_open_clips_tokens(texts):
    assert torch.equal(OURS(texts), THEIRS(texts))


@settings(max_examples=120, deadline=None)
@given(st.text(st.characters(max_codepoint=127), max_size=80))
def test_any_ascii_caption_has_open_clips_tokens(text):
    assert torch.equal(OURS([text]), THEIRS([text]))


def test_short_context_is_truncated_as_by_open_clip():
    theirs = open_clip.get_tokenizer("ViT-B-32", context_length=5)
    assert torch.equal(
        Tokenizer(theirs)("one two three four five six"), theirs("one two three four five six")
    )


def test_other_tokenizers_are_unchanged():
    theirs = open_clip.tokenizer.SimpleTokenizer(clean="canonicalize")
    assert torch.equal(Tokenizer(theirs)("Under_scores, and dots."), theirs("Under_scores, and dots."))


def test_number_of_cached_words_is_limited():
    ours, text = Tokenizer(THEIRS, max_words=3), "one two three four five six one"
    assert torch.equal(ours(text), THEIRS(text))
    assert len(ours.words) <= 3


def test_tokenizer_can_be_pickled():
    assert torch.equal(pickle.loads(pickle.dumps(OURS))("a dog"), THEIRS("a dog"))
