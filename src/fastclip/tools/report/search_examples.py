"""Example searches with a model: images for a text, captions for an image, and which are correct."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fastclip.data.images import UnusableSample
from fastclip.tools.search.index import Index

SIDE = 96  # pixels of a thumbnail's longer side
BEST_IMAGES, BEST_CAPTIONS = 8, 5
QUERIES, SHOWN_IMAGES = 5, 6  # defaults
MAX_QUERIES = 40  # keeps the page below 2 MB
_MAX_CAPTIONS = 8  # of one image, in its alternative text


class Thumbnail(NamedTuple):
    """An image on the page."""

    source: str
    """A data URI; empty if the image can no longer be read."""
    text: str
    """The alternative text: its captions, or its name if it has none."""


class Found(NamedTuple):
    """An image or a caption that was found."""

    item: Thumbnail | str
    score: float
    own: bool
    """Whether it belongs to the query."""


class Search(NamedTuple):
    """The best images for a text, or the best captions for an image."""

    query: str | Thumbnail
    found: list[Found]
    place: int | None
    """The position, from 1, of the first result that belongs to the query; None if none does."""


class SearchExamples(NamedTuple):
    """Examples of both directions."""

    images: int
    """Images searched."""
    captions: int
    """Different captions searched."""
    by_text: list[Search]
    by_image: list[Search]


def find_examples(
    index: Index, queries: list[str] | None, progress: Callable[[int, int], None]
) -> SearchExamples:
    """Search images for these queries (default: a few of the captions), and captions for a few images."""
    captions = {number: index.pictures.pictures[number].captions for number in index.features.kept_b.tolist()}
    chosen = queries or spread(index.captions, QUERIES)
    shown = spread([number for number in captions if captions[number]], SHOWN_IMAGES)
    examples = SearchExamples(len(captions), len(index.captions), [], [])
    for done, query in enumerate(chosen, start=1):
        examples.by_text.append(_by_text(index, query, captions))
        progress(done, len(chosen) + len(shown))
    for done, number in enumerate(shown, start=1):
        with suppress(OSError, UnusableSample):  # it can no longer be read
            examples.by_image.append(_by_image(index, number, captions[number]))
        progress(len(chosen) + done, len(chosen) + len(shown))
    return examples


def spread(items: list, count: int) -> list:
    """Up to `count` items, evenly spaced; the same each time."""
    count = min(count, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]


def _by_text(index: Index, query: str, captions: dict[int, list[str]]) -> Search:
    matches = index.by_text(query, len(captions))
    owned = [query in captions[match.number] for match in matches]
    best = [
        Found(thumbnail_of(index, match.number, captions[match.number]), match.score, own)
        for match, own in zip(matches[:BEST_IMAGES], owned, strict=False)
    ]
    return Search(query, best, owned.index(True) + 1 if True in owned else None)


def _by_image(index: Index, number: int, own: list[str]) -> Search:
    matches = index.captions_for(index.image(number), len(index.captions))
    place = next(place for place, match in enumerate(matches, start=1) if match.text in own)
    best = [Found(match.text, match.score, match.text in own) for match in matches[:BEST_CAPTIONS]]
    return Search(thumbnail_of(index, number, own), best, place)


def thumbnail_of(index: Index, number: int, captions: list[str]) -> Thumbnail:
    text = "; ".join(captions[:_MAX_CAPTIONS]) or index.pictures.where(number)
    try:
        small = index.thumbnail(number, SIDE)
        return Thumbnail("data:image/webp;base64," + b64encode(small).decode(), text)
    except (OSError, UnusableSample):
        return Thumbnail("", text)
