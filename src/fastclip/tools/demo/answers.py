"""What the page answers: from words, or an uploaded picture, to results; nothing here knows of gradio."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from fastclip.data.images import UnusableSample, thumbnail
from fastclip.tools.demo.cards import draw_captions, draw_card, draw_cards
from fastclip.tools.demo.limits import check_labels, check_query, check_top, open_upload
from fastclip.tools.search.index import Index, Match

SIDE = 256  # pixels of a thumbnail's longer side
_KEPT = 2048  # thumbnails in memory, about 20 MB
_EXAMPLE = 28  # letters of the longest example


class Answers:
    """Answers about the pictures of an index. Each raises Refused with the sentence to show."""

    def __init__(self, index: Index, uploads: Path):
        """`uploads`: the only folder from which uploaded pictures are read."""
        self.index, self.uploads = index, uploads
        self._thumbnail = lru_cache(_KEPT)(lambda number: thumbnail(index.pictures.image(number), SIDE))

    def examples(self, count: int = 6) -> list[str]:
        """Short captions from all over the collection, without commas: labels are separated by them."""
        short = [text for text in self.index.captions if len(text) <= _EXAMPLE and "," not in text]
        return short[:: max(1, len(short) // count)][:count]

    def pictures(self, text: str, top: int) -> str:
        """The pictures that fit the words best."""
        return self._draw(self.index.by_text(check_query(text), check_top(top)))

    def captions_and_pictures(self, upload: Any, top: int) -> tuple[str, str]:
        """The captions that fit a picture best, "" if there are none; and the pictures most like it."""
        picture, top = open_upload(upload, self.uploads), check_top(top)
        query_d = self.index.model.encode_image(picture)[0]
        captions = self.index.nearest_captions(query_d, top)
        pictures = self._draw(self.index.nearest_pictures(query_d, top))
        return draw_captions(captions) if captions else "", pictures

    def probabilities(self, upload: Any, labels: str) -> dict[str, float]:
        """Of each label, at the model's own temperature."""
        picture, listed = open_upload(upload, self.uploads), check_labels(labels)
        return dict(zip(listed, self.index.model.classify(picture, listed)[0].tolist(), strict=True))

    def _draw(self, matches: list[Match]) -> str:
        return draw_cards(card for match in matches if (card := self._card(match)) is not None)

    def _card(self, match: Match) -> str | None:
        """None if the file was taken away, or damaged, since the index was made."""
        name = Path(match.name).name
        captions = self.index.pictures.pictures[match.number].captions
        try:
            picture = self._thumbnail(match.number)
        except (OSError, UnusableSample):
            return None
        return draw_card(picture, captions[0] if captions else name, name, match.score)
