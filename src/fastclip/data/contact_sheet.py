"""Contact sheets: images with up to three lines of text under each, in one PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from fastclip.errors import PathError

CELL, TEXT = 160, 46  # pixels: side of an image's square, height of the text below it
_MARGIN, _LINE = 6, 12


def draw_contact_sheet(cells: Sequence[tuple[Image.Image | None, str]], path: Path, columns: int = 6) -> None:
    """Draw images (None: white) from left to right and top to bottom, in at most `columns` columns."""
    columns = max(1, min(columns, len(cells)))
    rows = max(1, -(-len(cells) // columns))
    sheet = Image.new("RGB", (columns * CELL, rows * (CELL + TEXT)), "white")
    draw = ImageDraw.Draw(sheet)
    for slot, (image, text) in enumerate(cells):
        x, y = slot % columns * CELL, slot // columns * (CELL + TEXT)
        if image is not None:
            scale = (CELL - 2 * _MARGIN) / max(image.size)
            shown = image.resize(
                [max(1, round(side * scale)) for side in image.size], Image.Resampling.BICUBIC
            )
            left, top = x + (CELL - shown.width) // 2, y + (CELL - shown.height) // 2
            draw.rectangle((left - 1, top - 1, left + shown.width, top + shown.height), outline="lightgrey")
            sheet.paste(shown, (left, top))
        for number, line in enumerate(_lines(text)[:3]):
            draw.text((x + _MARGIN, y + CELL + _LINE * number), line, fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        sheet.save(path)
    except ValueError as error:  # the extension
        raise PathError(path, f"cannot be written: {error}. Use a name such as sheet.png.") from error


def _lines(text: str, width: int = 26) -> list[str]:
    """Wrap to the width of a cell, in characters that the built-in font has."""
    plain = text.encode("latin-1", errors="replace").decode("latin-1")
    return [line for part in plain.splitlines() for line in textwrap.wrap(part, width)]
