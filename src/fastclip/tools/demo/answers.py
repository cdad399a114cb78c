"""Answer the page's queries: from a text or an uploaded image to results. Independent of gradio."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from fastclip.data.images import UnusableSample
from fastclip.tools.demo.cards import draw_captions, draw_card, draw_cards
from fastclip.tools.demo.limits import check_labels, check_query, check_top, open_upload
from fastclip.tools.search.index import Index, Match

SIDE = 256  # pixels of a thumbnail's longer side
_CACHED = 2048  # thumbnails in memory, about 20 MB
_MAX_EXAMPLE = 28  # characters


class Answers:
    """Queries over an index. Each raises RejectedInput with the sentence to show."""

    def __init__(self, index: Index, uploads: Path):
        """`uploads`: the only folder that uploaded images are read from."""
        self.index, self.uploads = index, uploads
        self._thumbnail = lru_cache(_CACHED)(lambda number: index.thumbnail(number, SIDE))

    def examples(self, count: int = 6) -> list[str]:
        """Short captions from across the collection, without commas, which separate labels."""
        short = [text for text in self.index.captions if len(text) <= _MAX_EXAMPLE and "," not in text]
        return short[:: max(1, len(short) // count)][:count]

    def images(self, text: str, top: int) -> str:
        """The images that match the text best."""
        query, top = check_query(text), check_top(top)
        return self._draw(self.index.by_text(query, top))

    def captions_and_images(self, upload: Any, top: int) -> tuple[str, str]:
        """The captions that match an image best ("" if there are none), and the most similar images."""
        image, top = open_upload(upload, self.uploads, self.index.formats), check_top(top)
        query_d = self.index.model.encode_image(image)[0]
        captions = self.index.nearest_captions(query_d, top)
        images = self._draw(self.index.nearest_pictures(query_d, top))
        return draw_captions(captions) if captions else "", images

    def probabilities(self, upload: Any, labels: str) -> dict[str, float]:
        """The probability of each label, at the model's temperature."""
        image, listed = open_upload(upload, self.uploads, self.index.formats), check_labels(labels)
        return dict(zip(listed, self.index.model.classify(image, listed)[0].tolist(), strict=True))

    def _draw(self, matches: list[Match]) -> str:
        return draw_cards(card for match in matches if (card := self._card(match)) is not None)

    def _card(self, match: Match) -> str | None:
        """None if the file was removed or damaged after it was indexed."""
        name = Path(match.name).name
        captions = self.index.pictures.pictures[match.number].captions
        try:
            image = self._thumbnail(match.number)
        except (OSError, UnusableSample):
            return None
        return draw_card(image, captions[0] if captions else name, name, match.score)
