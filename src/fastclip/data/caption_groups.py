"""Which captions count as equal, for `loss.negatives: distinct`."""

from __future__ import annotations

from unicodedata import normalize

from xxhash import xxh3_64_intdigest


def caption_group(caption: str) -> int:
    """A signed 64-bit number that captions share if they differ only in case, white space or Unicode form.

    Unicode form: NFKC, so that a full-width letter equals a plain one, and é equals e with an accent.
    """
    plain = " ".join(normalize("NFKC", normalize("NFKC", caption).casefold()).split())
    number = xxh3_64_intdigest(plain.encode("utf-8", "surrogatepass"))
    return number - (1 << 64) if number >> 63 else number
