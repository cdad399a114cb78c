"""What a model finds: pictures for words and captions for pictures, with the right ones marked."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fastclip.data.images import UnusableSample, thumbnail, upright_rgb
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


class Found(NamedTuple):
    """A picture or a caption."""

    what: Thumbnail | str
    score: float
    own: bool
    """It belongs to what was searched with."""


class Search(NamedTuple):
    """The best pictures for words, or the best captions for a picture."""

    query: str | Thumbnail
    found: list[Found]
    place: int | None
    """Of the first that belongs to the query among all, from 1; None if none does."""


class SearchExamples(NamedTuple):
    """Both directions."""

    pictures: int
    """In which was searched."""
    captions: int
    by_text: list[Search]
    by_picture: list[Search]


def find(index: Index, queries: list[str] | None, progress: Callable[[int, int], None]) -> SearchExamples:
    """Search for these queries, or for some of the captions; and for captions of some pictures."""
    told = {number: index.pictures.pictures[number].captions for number in index.features.kept_b.tolist()}
    chosen = queries or spread(index.captions, QUERIES)
    shown = spread([number for number in told if told[number]], SHOWN_PICTURES)
    finds = SearchExamples(len(told), len(index.captions), [], [])
    for done, query in enumerate(chosen, start=1):
        finds.by_text.append(_by_text(index, query, told))
        progress(done, len(chosen) + len(shown))
    for done, number in enumerate(shown, start=1):
        with suppress(OSError, UnusableSample):  # it cannot be read any more
            finds.by_picture.append(_by_picture(index, number, told[number]))
        progress(len(chosen) + done, len(chosen) + len(shown))
    return finds


def spread(things: list, count: int) -> list:
    """So many of them, evenly from the first to the last; the same each time."""
    count = min(count, len(things))
    return [things[(2 * i + 1) * len(things) // (2 * count)] for i in range(count)]


def _by_text(index: Index, query: str, told: dict[int, list[str]]) -> Search:
    matches = index.by_text(query, len(told))
    places = (place for place, match in enumerate(matches, start=1) if query in told[match.number])
    best = [
        Found(thumbnail_of(index, match.number, told[match.number]), match.score, query in told[match.number])
        for match in matches[:BEST_PICTURES]
    ]
    return Search(query, best, next(places, None))


def _by_picture(index: Index, number: int, own: list[str]) -> Search:
    matches = index.captions_for(upright_rgb(index.pictures.image(number)), len(index.captions))
    place = next(place for place, match in enumerate(matches, start=1) if match.text in own)
    best = [Found(match.text, match.score, match.text in own) for match in matches[:BEST_CAPTIONS]]
    return Search(thumbnail_of(index, number, own), best, place)


def thumbnail_of(index: Index, number: int, captions: list[str]) -> Thumbnail:
    words = "; ".join(captions[:_MANY]) or index.pictures.where(number)
    try:
        small = thumbnail(index.pictures.image(number), SIDE)
        return Thumbnail("data:image/webp;base64," + b64encode(small).decode(), words)
    except (OSError, UnusableSample):
        return Thumbnail("", words)
