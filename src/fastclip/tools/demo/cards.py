"""Results as HTML: pictures with their captions and scores, and captions with theirs; all words escaped."""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Iterable
from typing import NamedTuple


class Card(NamedTuple):
    """A picture that was found."""

    thumbnail: bytes  # WebP; it travels within the page, so no file of the machine has an address
    words: str  # its first caption, or its name
    name: str
    score: float


def draw_cards(cards: Iterable[Card]) -> str:
    return f'<ol class="cards">{"".join(map(_card, cards))}</ol>'


def _card(card: Card) -> str:
    source = f"data:image/webp;base64,{b64encode(card.thumbnail).decode()}"
    words = escape(card.words)
    return (
        f'<li title="{escape(card.name)}"><figure><img src="{source}" alt="{words}">'
        f'<figcaption><span class="words">{words}</span><span class="score">{card.score:.3f}</span>'
        "</figcaption></figure></li>"
    )


def draw_captions(captions: Iterable[tuple[str, float]]) -> str:
    rows = (
        f'<li><span class="words">{escape(text)}</span><span class="score">{score:.3f}</span></li>'
        for text, score in captions
    )
    return f'<ol class="captions">{"".join(rows)}</ol>'


def draw_note(words: str, wrong: bool = False) -> str:
    """One line above results; a screen reader says it when it changes."""
    kind, role = ("note wrong", "alert") if wrong else ("note", "status")
    return f'<p class="{kind}" role="{role}">{escape(words)}</p>'


def escape(words: str) -> str:
    """Also braces and dollars: gradio fills templates with what it shows."""
    plain = html.escape(words, quote=True)
    for sign in "${}`":
        plain = plain.replace(sign, f"&#{ord(sign)};")
    return plain
