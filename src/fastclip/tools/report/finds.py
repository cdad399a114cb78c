"""What a model finds: pictures for words and captions for pictures, with the right ones marked."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fastclip.data.images import BadImage, thumbnail, upright_rgb
from fastclip.tools.search.index import Index

SIDE = 96  # pixels of a thumbnail's longer side
BEST_PICTURES, BEST_CAPTIONS = 8, 5
QUERIES, SHOWN_PICTURES = 5, 6  # chosen where nobody asks for others
MOST_QUERIES = 40  # keep the page below 2 MB
_MANY = 8  # lines of a picture's captions that are enough to know it by


class Thumbnail(NamedTuple):
    """A picture on the page."""

    source: str
    """A data URI; empty if the picture cannot be read any more."""
    words: str
    """Its captions, or else its name: for who does not see it."""


class FoundPicture(NamedTuple):
    thumbnail: Thumbnail
    score: float
    own: bool
    """The query is its caption."""


class FoundCaption(NamedTuple):
    text: str
    score: float
    own: bool
    """It is the picture's."""


@dataclass
class ByText:
    """The best pictures for words."""

    query: str
    pictures: list[FoundPicture]
    place: int | None
    """Of the first picture that has the query as its caption, from 1; None if no picture has."""


@dataclass
class ByPicture:
    """The best captions for a picture."""

    thumbnail: Thumbnail
    captions: list[FoundCaption]
    place: int
    """Of its own caption, from 1."""


@dataclass
class Finds:
    """Both directions."""

    pictures: int
    """In which was searched."""
    captions: int
    by_text: list[ByText] = field(default_factory=list)
    by_picture: list[ByPicture] = field(default_factory=list)


def find(index: Index, queries: list[str] | None, progress: Callable[[int, int], None]) -> Finds:
    """Search for these queries, or for some of the captions; and for captions of some pictures."""
    told = {number: index.pictures.pictures[number].captions for number in index.features.kept_b.tolist()}
    chosen = queries or spread(index.captions, QUERIES)
    shown = spread([number for number in told if told[number]], SHOWN_PICTURES)
    finds = Finds(len(told), len(index.captions))
    total = len(chosen) + len(shown)
    for query in chosen:
        finds.by_text.append(_by_text(index, query, told))
        progress(len(finds.by_text), total)
    for number in shown:
        found = _by_picture(index, number, told[number])
        finds.by_picture += [] if found is None else [found]
        progress(len(finds.by_text) + len(finds.by_picture), total)
    return finds


def spread(things: list, count: int) -> list:
    """So many of them, evenly from the first to the last; the same each time."""
    count = min(count, len(things))
    return [things[(2 * i + 1) * len(things) // (2 * count)] for i in range(count)]


def _by_text(index: Index, query: str, told: dict[int, list[str]]) -> ByText:
    matches = index.by_text(query, len(told))
    places = [place for place, match in enumerate(matches, start=1) if query in told[match.number]]
    best = [
        FoundPicture(thumbnail_of(index, m.number, told[m.number]), m.score, query in told[m.number])
        for m in matches[:BEST_PICTURES]
    ]
    return ByText(query, best, places[0] if places else None)


def _by_picture(index: Index, number: int, own: list[str]) -> ByPicture | None:
    """None if the picture cannot be read any more."""
    try:
        image = upright_rgb(index.pictures.image(number))
    except (OSError, BadImage):
        return None
    matches = index.captions_for(image, len(index.captions))
    place = next(place for place, match in enumerate(matches, start=1) if match.text in own)
    best = [FoundCaption(m.text, m.score, m.text in own) for m in matches[:BEST_CAPTIONS]]
    return ByPicture(thumbnail_of(index, number, own), best, place)


def thumbnail_of(index: Index, number: int, captions: list[str]) -> Thumbnail:
    words = "; ".join(captions[:_MANY]) or index.pictures.where(number)
    try:
        small = thumbnail(index.pictures.image(number), SIDE)
        return Thumbnail("data:image/webp;base64," + b64encode(small).decode(), words)
    except (OSError, BadImage):
        return Thumbnail("", words)
