"""Results as HTML: images with captions and scores, and captions with scores; all text is escaped."""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Iterable

from fastclip.text import printable


def draw_cards(cards: Iterable[str]) -> str:
    """A list of the cards of `draw_card`."""
    return f'<ol class="cards">{"".join(cards)}</ol>'


def draw_card(thumbnail: bytes, text: str, name: str, score: float) -> str:
    """One result. Its thumbnail (WebP) is embedded, so no file of the machine needs a URL."""
    source = f"data:image/webp;base64,{b64encode(thumbnail).decode()}"
    return (
        f'<li title="{escape(name)}"><figure><img src="{source}" alt="{escape(text)}">'
        f"<figcaption>{_scored(text, score)}</figcaption></figure></li>"
    )


def draw_captions(captions: Iterable[tuple[str, float]]) -> str:
    rows = (f"<li>{_scored(text, score)}</li>" for text, score in captions)
    return f'<ol class="captions">{"".join(rows)}</ol>'


def _scored(text: str, score: float) -> str:
    return f'<span class="words">{escape(text)}</span><span class="score">{score:.3f}</span>'


def draw_note(text: str, wrong: bool = False) -> str:
    """The line above results; screen readers announce it when it changes."""
    kind, role = ("note wrong", "alert") if wrong else ("note", "status")
    return f'<p class="{kind}" role="{role}">{escape(text)}</p>'


def escape(text: str) -> str:
    """Escape HTML, control characters, and also ${}`, which gradio would evaluate as a template."""
    escaped = html.escape(printable(text), quote=True)
    for sign in "${}`":
        escaped = escaped.replace(sign, f"&#{ord(sign)};")
    return escaped
