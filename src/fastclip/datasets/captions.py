"""Make captions from icon names: cleaned, never invented. Every word of a caption is in the name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from fastclip.datasets.iconify import IconSet

# Words of a declared style that cannot be seen in an image of 64 pixels; sizes are removed too.
UNSEEN = {"regular", "baseline", "default", "linear", "remix", "pop", "print"}
SIZE = re.compile(r"\d+(px|x\d+)?")
# A number after these is part of the image; after others it may only count variants.
COUNTED = {
    *("number", "numeric", "digit", "keycap", "letter", "dice", "die", "battery", "level", "counter"),
    *("clock", "time", "heading", "signal", "wifi", "grid", "exposure", "percentage", "rating", "looks"),
    *("brightness", "multiplier", "h", "columns", "rows", "tally", "mark", "uv", "index", "forward"),
    *("backward", "replay"),
}
TONES = ("light", "medium-light", "medium", "medium-dark", "dark")
TONE = re.compile(r"\b(medium light|medium dark|light|medium|dark) skin tone\b")


def captioner(icons: IconSet, vocabulary: Counter[str] | None = None) -> Callable[[str], str]:
    """Return a function from names of a set to captions. With a vocabulary, joined words are split."""
    names = {icon.name for icon in icons.icons}
    prefixes, suffixes = icons.styles

    def caption(name: str) -> str:
        short = _without_style(name, prefixes, suffixes)
        short = _without_variant(short, names, numbered=icons.prefix.startswith("streamline"))
        words = short.split("-")
        if vocabulary:
            words = [part for word in words for part in split_words(word, vocabulary)]
        return _flag(" ".join(words))

    return caption


def _without_style(name: str, prefixes: Collection[str], suffixes: Collection[str]) -> str:
    """`access-time-24-filled` → `access-time-filled`, for styles declared by the set."""
    for style in sorted(suffixes, key=len, reverse=True):
        if name.endswith(f"-{style}"):
            return "-".join([name.removesuffix(f"-{style}"), *_seen(style)])
    for style in sorted(prefixes, key=len, reverse=True):
        if name.startswith(f"{style}-"):
            return "-".join([*_seen(style), name.removeprefix(f"{style}-")])
    return name


def _seen(style: str) -> list[str]:
    return [word for word in style.split("-") if word not in UNSEEN and not SIZE.fullmatch(word)]


def _without_variant(name: str, names: Collection[str], numbered: bool) -> str:
    """`terminal-2` beside `terminal`, `flag-03` and `star-alt` are second drawings of one object."""
    base, _, last = name.rpartition("-")
    if not base or base.rpartition("-")[2] in COUNTED:
        return name
    second = last in set("23456789") and base in names and f"{base}-1" not in names
    padded = re.fullmatch(r"0\d", last)
    return base if second or padded or last == "alt" or (numbered and last.isdigit()) else name


def _flag(caption: str) -> str:
    """One form for the three in which emoji sets write flags: `flag for flag x`, `flag for x`, `flag x`."""
    match = re.fullmatch(r"flag for (?:flag )?(.+)", caption)
    if not match:
        return caption
    return match[1] if match[1].endswith((" flag", " flags")) else f"flag {match[1]}"


def words_of(sets: Iterable[IconSet]) -> Counter[str]:
    """Count each word in names that separate words by hyphens."""
    return Counter(word for icons in sets for icon in icons.icons for word in icon.name.split("-"))


def split_words(joined: str, vocabulary: Counter[str]) -> list[str]:
    """`uppointingredtriangle` → up pointing red triangle: the fewest known words, then the most common.

    A name that known words do not cover completely stays in one piece.
    """
    if joined in vocabulary:
        return [joined]
    parts: list[str] = []
    for piece in re.findall(r"\d+|\D+", joined):
        best: list[tuple[int, int, list[str]] | None] = [(0, 0, [])] + [None] * len(piece)
        for end in range(1, len(piece) + 1):
            for start in range(end):
                before, word = best[start], piece[start:end]
                if before is None or not (vocabulary[word] and (len(word) > 2 or word in SHORT)):
                    continue
                candidate = (before[0] + 1, before[1] - vocabulary[word], [*before[2], word])
                if best[end] is None or candidate < best[end]:  # type: ignore[operator]
                    best[end] = candidate
        complete = best[-1]
        parts += complete[2] if complete else [piece]
    return parts


SHORT = {"in", "of", "on", "at", "up", "no", "ok", "to", "ox", "id"}  # two letters that are words in names
