"""Results as HTML: text never becomes markup."""

from html.parser import HTMLParser

import pytest

from fastclip.tools.demo.cards import draw_captions, draw_card, draw_cards, draw_note
from tests.tools.demo.collection import EVIL


class Reader(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts = [], {}, []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes[tag] = dict(attributes)

    def handle_data(self, data):
        self.texts.append(data)


def test_a_card_shows_image_text_and_score():
    parsed = Reader(draw_cards([draw_card(b"webp", "a red heart", "17.png", 0.31449)]))
    assert parsed.tags == ["ol", "li", "figure", "img", "figcaption", "span", "span"]
    assert parsed.texts == ["a red heart", "0.314"]
    assert parsed.attributes["li"] == {"title": "17.png"}
    assert parsed.attributes["img"] == {"src": "data:image/webp;base64,d2VicA==", "alt": "a red heart"}


@pytest.mark.parametrize("draw", [draw_note, lambda text: draw_captions([(text, 0.5)])])
def test_markup_in_text_is_escaped(draw):
    parsed = Reader(draw(EVIL))
    assert "img" not in parsed.tags
    assert parsed.texts[0] == EVIL


def test_control_characters_are_visible():
    assert Reader(draw_note("a\x1b[2J\u202eb\udc80")).texts == [r"a\x1b[2J\u202eb\udc80"]


def test_markup_in_captions_and_names_is_escaped():
    html = draw_cards([draw_card(b"", EVIL, f'"{EVIL}', 0.5)])
    parsed = Reader(html)
    assert parsed.tags.count("img") == 1
    assert parsed.attributes["img"]["alt"] == parsed.texts[0] == EVIL
    assert parsed.attributes["li"]["title"] == f'"{EVIL}'
    assert not {"$", "{", "}", "`"} & set(html)  # nor is there anything for a template


def test_an_error_is_an_alert():
    assert Reader(draw_note("no", wrong=True)).attributes["p"] == {"class": "note wrong", "role": "alert"}
