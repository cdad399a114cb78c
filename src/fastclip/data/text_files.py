"""Open a table as text, and refuse one in another encoding, with the line and the likely encoding."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from os import PathLike
from typing import NamedTuple, TextIO

from fastclip.data.pairs import UTF_8, File, SourceError
from fastclip.data.plain_files import open_plain
from fastclip.data.remote import local_copy

# Encodings to guess: those of browsers. More of them would only find more that fit by chance.
_COMMON = [
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp874"),
    *("koi8_r", "cp932", "euc_jp", "gb18030", "big5", "cp949"),
]
_BLOCK = 1 << 20
_SAMPLE = 1 << 16  # bytes of lines to guess from
_SHOWN = 24  # bytes shown before and after the first that cannot be decoded


@contextmanager
def open_text(file: File, encoding: str, newline: str | None = None) -> Iterator[TextIO]:
    """Open a file as text; SourceError when a line is read that is not in this encoding.

    A UTF-8 file is refused under another encoding, which would read "Ã©" for "é".
    """
    path = local_copy(file.path, file.version)
    if encoding != UTF_8 and _is_utf8(path):
        advice = "Omit --data.encoding (training) or --encoding (data commands)."
        raise SourceError(file.path, f"is valid UTF-8 and would be garbled in {encoding}. {advice}")
    try:
        with open_plain(path) as raw, TextIOWrapper(raw, with_mark(encoding), newline=newline) as stream:
            yield stream
    except UnicodeError:
        raise _undecodable(file.path, path, encoding) from None


def with_mark(encoding: str) -> str:
    """The encoding for a file: of UTF-8, a byte order mark at the start is not part of the text."""
    return "utf-8-sig" if encoding == UTF_8 else encoding


def _is_utf8(path: str | PathLike[str]) -> bool:
    """Whether a file is valid UTF-8, and not just ASCII."""
    decoder, is_ascii = codecs.getincrementaldecoder(UTF_8)(), True
    try:
        with open(path, "rb") as stream:
            while block := stream.read(_BLOCK):
                is_ascii &= decoder.decode(block).isascii()
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return not is_ascii


class _BadLine(NamedTuple):
    """The first line that cannot be decoded."""

    number: int
    text: bytes
    """The bytes around the first bad one."""
    sample: bytes
    """This line and later ones that are not ASCII, to guess the encoding from."""
    exception: bool
    """Most of the lines that are not ASCII can be decoded."""


def _undecodable(name: str, path: str | PathLike[str], encoding: str) -> SourceError:
    """The error of a file that is not in this encoding."""
    line = _first_bad_line(path, encoding)
    shown = line.text.decode("ascii", "backslashreplace")
    problem = f", line {line.number}: “{shown}” is not {encoding.upper()}"
    likely = None if line.exception else likely_encoding(line.sample)
    if line.exception:
        advice = "Most of its lines are, so this one may be damaged: correct it, or save the file again."
    elif likely is None:
        advice = "Pass the file's encoding with --data.encoding, e.g. latin-1, or convert it to UTF-8."
    else:
        advice = (
            f"In {likely} it reads “{line.text.decode(likely, 'ignore')}”: if that is right, pass "
            f"--data.encoding {likely} (training) or --encoding {likely} (data commands), or convert it."
        )
    return SourceError(name, f"{problem}. {advice}")


def _first_bad_line(path: str | PathLike[str], encoding: str) -> _BadLine:
    decoder = codecs.getincrementaldecoder(encoding)()
    good, bad, number, line = 0, 0, 0, b""
    found, text, sample = 0, b"", b""
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                good += not decoder.decode(line).isascii()
            except UnicodeDecodeError as error:
                decoder.reset()
                bad += 1
                if not found:
                    start = max(0, error.start - _SHOWN)
                    found, text = number, error.object[start : error.end + _SHOWN].strip()
            if found and not line.isascii():
                sample += line
            if found and (len(sample) > _SAMPLE or number > found + _SAMPLE):
                break
    if not found:  # the file ends within a character
        return _BadLine(number, line[-_SHOWN:], line, exception=good > 0)
    return _BadLine(found, text, sample, exception=good > bad)


def likely_encoding(sample: bytes) -> str | None:
    """Guess the encoding of text that is not UTF-8; of several that fit equally well, cp1252."""
    from charset_normalizer import from_bytes

    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    matches = list(from_bytes(sample, cp_isolation=_COMMON))  # best first
    for match in matches:
        equally = (match.chaos, match.coherence) == (matches[0].chaos, matches[0].coherence)
        if equally and "cp1252" in match.could_be_from_charset:
            return "cp1252"
    return matches[0].encoding if matches else None
