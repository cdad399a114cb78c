"""Results as HTML: pictures with their captions and scores, and captions with theirs; all words escaped."""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Iterable


def draw_cards(cards: Iterable[str]) -> str:
    """Of `draw_card`."""
    return f'<ol class="cards">{"".join(cards)}</ol>'


def draw_card(thumbnail: bytes, words: str, name: str, score: float) -> str:
    """A picture (WebP) travels within the page, so no file of the machine has an address."""
    source = f"data:image/webp;base64,{b64encode(thumbnail).decode()}"
    return (
        f'<li title="{escape(name)}"><figure><img src="{source}" alt="{escape(words)}">'
        f"<figcaption>{_scored(words, score)}</figcaption></figure></li>"
    )


def draw_captions(captions: Iterable[tuple[str, float]]) -> str:
    rows = (f"<li>{_scored(text, score)}</li>" for text, score in captions)
    return f'<ol class="captions">{"".join(rows)}</ol>'


def _scored(words: str, score: float) -> str:
    return f'<span class="words">{escape(words)}</span><span class="score">{score:.3f}</span>'


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
