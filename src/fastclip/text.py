"""Text for messages of every layer: the closest of several names, counts, durations, safe text of others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, names: Iterable[str], cutoff: float = 0.4) -> str | None:
    """Return the closest of the names, or None if none is close."""
    return next(iter(get_close_matches(str(name), list(names), n=1, cutoff=cutoff)), None)


def did_you_mean(name: object, names: Iterable[str], cutoff: float = 0.4) -> str:
    """ " Did you mean NAME?" with the closest of the names, to append to a sentence; "" if none is close."""
    near = nearest(name, names, cutoff)
    return f" Did you mean {near}?" if near else ""


def counted(number: int, noun: str) -> str:
    """1 pair, 2,086 pairs."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """The two largest units: 45 s, 2 min 10 s, 3 h 5 min, 2 d 4 h; – if unknown."""
    if seconds is None:
        return "–"
    s = round(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if s >= size:
            return f"{s // size} {unit} {s % size // part} {below}"
    return f"{s} s"


def printable(text: object) -> str:
    """Text as a terminal may show it: control characters become visible escapes such as \\x1b.

    Names and captions come from others: a terminal obeys an escape sequence, an override of the writing
    direction makes a name look like another, and half a character (a lone surrogate) cannot be printed. Line
    breaks and tabs stay. Safe to apply twice.
    """
    return _UNPRINTABLE.sub(lambda found: _escape(found[0]), str(text))


def one_line(text: object) -> str:
    """The same, with line breaks and tabs escaped too."""
    return re.sub(r"[\n\t]", lambda found: _escape(found[0]), printable(text))


def markdown(text: object) -> str:
    """Text as plain words of a Markdown document: no markup, no HTML, no new line or table cell."""
    return _MARKUP.sub(r"\\\g<0>", one_line(text))


def code_span(text: object) -> str:
    """Text in backticks, in a Markdown document or in a cell of its tables."""
    return "`" + one_line(text).replace("`", "'").replace("|", "¦") + "`"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


# C0 except tab and line feed, DEL and C1, line separators, overrides of direction, lone surrogates
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKUP = re.compile(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])")  # _ within a word is no markup
