"""Results as HTML: words cannot become markup, pictures become small."""

from html.parser import HTMLParser

import pytest

from fastclip.tools.demo.cards import draw_captions, draw_card, draw_cards, draw_note
from tests.tools.demo.collection import EVIL


class Reader(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.words = [], {}, []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes[tag] = dict(attributes)

    def handle_data(self, data):
        self.words.append(data)


def test_a_card_shows_picture_words_and_score():
    seen = Reader(draw_cards([draw_card(b"webp", "a red heart", "17.png", 0.31449)]))
    assert seen.tags == ["ol", "li", "figure", "img", "figcaption", "span", "span"]
    assert seen.words == ["a red heart", "0.314"]
    assert seen.attributes["li"] == {"title": "17.png"}
    assert seen.attributes["img"] == {"src": "data:image/webp;base64,d2VicA==", "alt": "a red heart"}


@pytest.mark.parametrize("draw", [draw_note, lambda words: draw_captions([(words, 0.5)])])
def test_markup_in_words_stays_words(draw):
    seen = Reader(draw(EVIL))
    assert "img" not in seen.tags
    assert seen.words[0] == EVIL


def test_markup_in_captions_and_names_stays_words():
    html = draw_cards([draw_card(b"", EVIL, f'"{EVIL}', 0.5)])
    seen = Reader(html)
    assert seen.tags.count("img") == 1
    assert seen.attributes["img"]["alt"] == seen.words[0] == EVIL
    assert seen.attributes["li"]["title"] == f'"{EVIL}'
    assert not {"$", "{", "}", "`"} & set(html)  # nor can a template see them


def test_a_refusal_is_an_alert():
    assert Reader(draw_note("no", wrong=True)).attributes["p"] == {"class": "note wrong", "role": "alert"}
