"""What is found is what the index gives, and what belongs together is marked."""

import base64
import io
from types import SimpleNamespace

import torch
from PIL import Image

from fastclip.tools.report.search_examples import SearchExamples, find, spread
from fastclip.tools.search.index import CaptionMatch, Match
from tests.data.collections import encode


class FakeIndex:
    """Pictures of one colour each; scores fall with the distance between a query and a caption's number."""

    def __init__(self, captions, broken=()):
        self.told, self.broken = captions, broken
        self.captions = list(dict.fromkeys(caption for own in captions for caption in own))
        self.features = SimpleNamespace(kept_b=torch.arange(len(captions)))
        places = [SimpleNamespace(captions=own) for own in captions]
        self.pictures = SimpleNamespace(pictures=places, image=self.image, where=lambda n: f"{n}.png")

    def image(self, number):
        if number in self.broken:
            raise FileNotFoundError(number)
        return encode(Image.new("RGB", (200, 100), (number, 0, 0)))

    def by_text(self, text, top):
        """The second fits best, then the third …, and the first is the last."""
        order = [*range(1, len(self.told)), 0][:top]
        return [Match(number, f"{number}.png", 1 - place / 100) for place, number in enumerate(order)]

    def captions_for(self, image, top):
        return [CaptionMatch(text, 1 - place / 100) for place, text in enumerate(self.captions[:top])]


def search(index, queries=None):
    return find(index, queries, lambda done, total: None)


def captions(n):
    return [[f"caption {i}"] for i in range(n)]


def test_pictures_whose_caption_is_the_query_are_marked():
    told = captions(20)
    told[3].append("a cat")
    told[5] = ["a cat"]
    (found,) = search(FakeIndex(told), ["a cat"]).by_text
    assert [place for place, picture in enumerate(found.found, start=1) if picture.own] == [3, 5]
    assert [picture.score for picture in found.found[:2]] == [1.0, 0.99]
    assert found.place == 3


def test_the_place_is_told_even_beyond_what_is_shown():
    (found,) = search(FakeIndex(captions(20)), ["caption 0"]).by_text
    assert not any(picture.own for picture in found.found)
    assert found.place == 20


def test_words_that_are_no_caption_have_no_place():
    (found,) = search(FakeIndex(captions(20)), ["something else"]).by_text
    assert found.place is None


def test_without_queries_captions_are_chosen_the_same_each_time():
    first, second = search(FakeIndex(captions(50))), search(FakeIndex(captions(50)))
    assert [found.query for found in first.by_text] == [f"caption {i}" for i in (5, 15, 25, 35, 45)]
    assert first == second


def test_captions_for_pictures_mark_the_true_one():
    found = search(FakeIndex(captions(12))).by_picture
    assert len(found) == 6
    assert [caption.own for caption in found[0].found] == [False, True, False, False, False]
    assert (found[0].place, found[-1].place) == (2, 12)
    assert not any(caption.own for caption in found[-1].found)


def test_pictures_without_captions_are_found_by_words_only():
    assert search(FakeIndex([[] for _ in range(9)])) == SearchExamples(9, 0, [], [])
    found = search(FakeIndex([[] for _ in range(9)]), ["a cat"])
    assert found.by_picture == []
    assert found.by_text[0].found[0].what.words == "1.png"


def test_a_picture_that_is_gone_leaves_an_empty_tile():
    index = FakeIndex(captions(20), broken=range(20))
    found = search(index, ["caption 4"])
    assert {picture.what.source for picture in found.by_text[0].found} == {""}
    assert found.by_picture == []


def test_thumbnails_travel_inside_the_page():
    source = search(FakeIndex(captions(20)), ["caption 4"]).by_text[0].found[0].what.source
    kind, _, code = source.partition(",")
    assert kind == "data:image/webp;base64"
    assert Image.open(io.BytesIO(base64.b64decode(code))).format == "WEBP"


def test_a_spread_choice_reaches_from_end_to_end_without_repeats():
    assert spread(list(range(10)), 5) == [1, 3, 5, 7, 9]
    assert spread([1, 2], 5) == [1, 2]
    assert spread([], 5) == []
