"""Limits on what the page accepts, and the sentences it shows for rejected input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from fastclip.data.images import MAX_PIXELS, UnusableSample, upright_rgb

MAX_BYTES = 10 * 2**20  # of an uploaded file
MAX_CHARACTERS = 500  # of a query, and of a label
MAX_LABELS = 100
MAX_TOP = 48  # images or captions in one answer
NOT_UPLOADED = "Only images uploaded on this page can be used."


class RejectedInput(Exception):
    """Input that cannot be answered.

    Args:
        field: which input was rejected.
        message: what is wrong and what to do, as shown on the page.
    """

    def __init__(self, field: Literal["query", "labels", "top", "upload"], message: str):
        self.field = field
        super().__init__(message)


def check_query(text: str) -> str:
    """The query without surrounding white space."""
    query = _readable("query", text).strip()
    if not query:
        raise RejectedInput("query", "Describe what the images should show, for example: a red heart.")
    if len(query) > MAX_CHARACTERS:
        raise RejectedInput(
            "query", f"The text has {len(query):,} characters; the limit is {MAX_CHARACTERS}."
        )
    return query


def check_labels(text: str) -> list[str]:
    """The labels of a list separated by commas or line breaks, without duplicates."""
    listed = [re.sub(r"\s+", " ", label).strip() for label in re.split(r"[,\n]", _readable("labels", text))]
    labels = list(dict.fromkeys(label for label in listed if label))
    if len(labels) < 2:
        raise RejectedInput("labels", "Enter at least two labels, separated by commas: cat, dog, bird.")
    if len(labels) > MAX_LABELS:
        raise RejectedInput("labels", f"There are {len(labels):,} labels; the limit is {MAX_LABELS}.")
    longest = max(map(len, labels))
    if longest > MAX_CHARACTERS:
        raise RejectedInput("labels", f"One label has {longest:,} characters; the limit is {MAX_CHARACTERS}.")
    return labels


def _readable(field: Literal["query", "labels"], text: Any) -> str:
    """The text; rejected if it holds half a character (a lone surrogate), which no tokenizer takes."""
    read = str(text or "")
    try:
        read.encode()
    except UnicodeEncodeError as error:
        raise RejectedInput(field, "The text has a character that is not Unicode. Type it again.") from error
    return read


def check_top(top: int) -> int:
    if not isinstance(top, int) or not 1 <= top <= MAX_TOP:
        raise RejectedInput("top", f"The number of results must be from 1 to {MAX_TOP}, not {top}.")
    return top


def open_upload(
    upload: Any, folder: Path, formats: Sequence[str] = (), max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """The image that a browser uploaded to this folder; its size is checked before it is decoded.

    Args:
        upload: what gradio's image field sends: a dict with a path. Untrusted: a client can send anything.
    """
    if upload is None:
        raise RejectedInput(
            "upload", "Choose an image first: drop one, paste one, or click to choose a file."
        )
    path = Path(str(upload.get("path", "") if isinstance(upload, dict) else ""))
    try:
        if not path.resolve(strict=True).is_relative_to(folder.resolve()):
            raise RejectedInput("upload", NOT_UPLOADED)
        size = path.stat().st_size
        if size > MAX_BYTES:
            limit = MAX_BYTES // 2**20
            raise RejectedInput("upload", f"The file has {size / 2**20:.1f} MiB; the limit is {limit} MiB.")
        return upright_rgb(path.read_bytes(), max_pixels, formats)
    except UnusableSample as error:
        raise RejectedInput("upload", f"This image cannot be used: {error}.") from error
    except (OSError, ValueError) as error:
        raise RejectedInput(
            "upload", "The uploaded image is no longer available. Choose it again."
        ) from error
