"""Names are suggested, durations read well, and text of others is made safe."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.text import code_span, did_you_mean, duration, markdown, one_line, printable


def test_the_closest_name_is_suggested_if_any_is_close():
    assert did_you_mean("adam", ["adamw", "lion"]) == " Did you mean adamw?"
    assert did_you_mean("zzz", ["adamw", "lion"]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (130, "2 min 10 s"),
        (11_100, "3 h 5 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


CONTROL = [
    "\x00",
    "\x07",
    "\x08",
    "\x0d",
    "\x1b[2J",
    "\x7f",
    "\x9b31m",
    "\u202e",
    "\u2066",
    "\u2028",
    "\udc80",
]


@pytest.mark.parametrize("bad", CONTROL)
def test_control_characters_become_visible(bad):
    shown = printable(f"a{bad}b")
    assert shown.startswith("a\\")
    assert shown.endswith("b")
    assert bad[0] not in shown
    assert printable(shown) == shown
    shown.encode()  # also to a terminal


def test_ordinary_text_is_unchanged():
    for text in ("a red heart", "größe\t1\n2", "猫 🐈‍⬛", "قلب أحمر", "\\x1b", "a_b|c"):
        assert printable(text) == text
    assert one_line("a\n\tb") == r"a\n\tb"


@given(st.text(st.characters(categories=None)))
def test_no_text_controls_a_terminal(text):
    assert all(sign in "\n\t" or unicodedata.category(sign) not in ("Cc", "Cs") for sign in printable(text))
    assert len(one_line(text).splitlines()) <= 1


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("twemoji_words", "twemoji_words"),
        ("_x_", r"\_x\_"),
        ("**a** `b`", r"\*\*a\*\* \`b\`"),
        ("[a](http://x) ![b](c)", r"\[a\](http://x) !\[b\](c)"),
        ("<script>&lt;", r"\<script\>\&lt;"),
        ("a|b\n# c", r"a\|b\\n# c"),
        ("\x1b[31m", r"\\x1b\[31m"),
    ],
)
def test_markdown_has_no_markup(text, escaped):
    assert markdown(text) == escaped


def test_a_code_span_ends_at_its_end():
    assert code_span("a`b|c\nd") == r"`a'b¦c\nd`"
