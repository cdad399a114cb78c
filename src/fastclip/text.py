"""Text for messages of every layer: the closest of several names, counts and durations."""

from __future__ import annotations

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
