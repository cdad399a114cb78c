"""What the page takes, and the sentence that a person reads about what it does not take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from PIL import Image

from fastclip.data.images import MAX_PIXELS, UnusableSample, upright_rgb

MAX_BYTES = 10 * 2**20  # of an uploaded file
MAX_LETTERS = 500  # of a query, and of a label
MAX_LABELS = 100
MAX_TOP = 48  # pictures, or captions, of one answer


class Refused(Exception):
    """What was typed or uploaded cannot be answered; the message is for the page."""


def check_query(text: str) -> str:
    """The words without the white space around them."""
    words = str(text or "").strip()
    if not words:
        raise Refused("Type what the pictures should show, for example: a red heart.")
    if len(words) > MAX_LETTERS:
        raise Refused(f"That is {len(words):,} letters long; {MAX_LETTERS} is the most.")
    return words


def check_labels(text: str) -> list[str]:
    """What stands between commas and line ends, each label once."""
    listed = [re.sub(r"\s+", " ", label).strip() for label in re.split(r"[,\n]", str(text or ""))]
    labels = list(dict.fromkeys(label for label in listed if label))
    if len(labels) < 2:
        raise Refused("Type at least two labels, separated by commas: cat, dog, bird.")
    if len(labels) > MAX_LABELS:
        raise Refused(f"Those are {len(labels):,} labels; {MAX_LABELS} is the most.")
    longest = max(map(len, labels))
    if longest > MAX_LETTERS:
        raise Refused(f"One label is {longest:,} letters long; {MAX_LETTERS} is the most.")
    return labels


def check_top(top: int) -> int:
    if not isinstance(top, int) or not 1 <= top <= MAX_TOP:
        raise Refused(f"{top} results cannot be shown; ask for 1 to {MAX_TOP}.")
    return top


def open_upload(upload: Any, folder: Path) -> Image.Image:
    """The picture that a browser uploaded into this folder; too large a one is refused before it is decoded.

    Args:
        upload: what gradio's picture field sends: a path, and more. Anyone can send anything.
    """
    if upload is None:
        raise Refused("Choose a picture first: drop one, paste one, or click to choose a file.")
    path = Path(str(upload.get("path", "") if isinstance(upload, dict) else ""))
    try:
        if not path.resolve(strict=True).is_relative_to(folder.resolve()):
            raise Refused("Only pictures that were uploaded here can be used.")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise Refused(f"The file has {size / 2**20:.1f} MB; {MAX_BYTES // 2**20} MB is the most.")
        return upright_rgb(path.read_bytes(), MAX_PIXELS)
    except UnusableSample as error:
        raise Refused(f"This picture cannot be used: {error}.") from error
    except (OSError, ValueError) as error:
        raise Refused("The uploaded picture is not here any more. Please choose it again.") from error
