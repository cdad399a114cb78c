"""Search examples are the index's results, with the correct ones marked."""

import base64
import io
from types import SimpleNamespace

import torch
from PIL import Image

from fastclip.tools.report.search_examples import SearchExamples, find_examples, spread
from fastclip.tools.search.index import CaptionMatch, Index, Match
from tests.data.collections import encode


class FakeIndex:
    """Images of one colour each, and search results in a fixed order."""

    formats, image, thumbnail = (), Index.image, Index.thumbnail

    def __init__(self, captions, unreadable=()):
        self.captions_of, self.unreadable = captions, unreadable
        self.captions = list(dict.fromkeys(caption for own in captions for caption in own))
        self.features = SimpleNamespace(kept_b=torch.arange(len(captions)))
        places = [SimpleNamespace(captions=own) for own in captions]
        self.pictures = SimpleNamespace(pictures=places, image=self.data, where=lambda n: f"{n}.png")

    def data(self, number):
        if number in self.unreadable:
            raise FileNotFoundError(number)
        return encode(Image.new("RGB", (200, 100), (number, 0, 0)))

    def by_text(self, text, top):
        """The second image is best, then the third …; the first is last."""
        order = [*range(1, len(self.captions_of)), 0][:top]
        return [Match(number, f"{number}.png", 1 - place / 100) for place, number in enumerate(order)]

    def captions_for(self, image, top):
        return [CaptionMatch(text, 1 - place / 100) for place, text in enumerate(self.captions[:top])]


def search(index, queries=None):
    return find_examples(index, queries, lambda done, total: None)


def captions(n):
    return [[f"caption {i}"] for i in range(n)]


def test_images_with_the_query_as_a_caption_are_marked():
    with_cats = captions(20)
    with_cats[3].append("a cat")
    with_cats[5] = ["a cat"]
    (result,) = search(FakeIndex(with_cats), ["a cat"]).by_text
    assert [place for place, image in enumerate(result.found, start=1) if image.own] == [3, 5]
    assert [image.score for image in result.found[:2]] == [1.0, 0.99]
    assert result.place == 3


def test_place_is_known_even_if_the_image_is_not_shown():
    (result,) = search(FakeIndex(captions(20)), ["caption 0"]).by_text
    assert not any(image.own for image in result.found)
    assert result.place == 20


def test_a_query_that_is_not_a_caption_has_no_place():
    (result,) = search(FakeIndex(captions(20)), ["something else"]).by_text
    assert result.place is None


def test_default_queries_are_captions_and_the_same_each_time():
    first, second = search(FakeIndex(captions(50))), search(FakeIndex(captions(50)))
    assert [result.query for result in first.by_text] == [f"caption {i}" for i in (5, 15, 25, 35, 45)]
    assert first == second


def test_the_correct_caption_of_an_image_is_marked():
    results = search(FakeIndex(captions(12))).by_image
    assert len(results) == 6
    assert [caption.own for caption in results[0].found] == [False, True, False, False, False]
    assert (results[0].place, results[-1].place) == (2, 12)
    assert not any(caption.own for caption in results[-1].found)


def test_images_without_captions_are_searched_by_text_only():
    assert search(FakeIndex([[] for _ in range(9)])) == SearchExamples(9, 0, [], [])
    examples = search(FakeIndex([[] for _ in range(9)]), ["a cat"])
    assert examples.by_image == []
    assert examples.by_text[0].found[0].item.text == "1.png"


def test_an_unreadable_image_has_no_thumbnail():
    examples = search(FakeIndex(captions(20), unreadable=range(20)), ["caption 4"])
    assert {image.item.source for image in examples.by_text[0].found} == {""}
    assert examples.by_image == []


def test_thumbnails_are_embedded_as_webp():
    source = search(FakeIndex(captions(20)), ["caption 4"]).by_text[0].found[0].item.source
    kind, _, code = source.partition(",")
    assert kind == "data:image/webp;base64"
    assert Image.open(io.BytesIO(base64.b64decode(code))).format == "WEBP"


def test_spread_chooses_evenly_and_without_repeats():
    assert spread(list(range(10)), 5) == [1, 3, 5, 7, 9]
    assert spread([1, 2], 5) == [1, 2]
    assert spread([], 5) == []
