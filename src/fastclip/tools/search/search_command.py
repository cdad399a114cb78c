"""The command `fastclip search`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Literal

from fastclip.errors import InputError, OptionError
from fastclip.terminal import progress, say
from fastclip.text import one_line


def search(
    model: str,
    images: str,
    text: str | None = None,
    image: Path | None = None,
    top: int = 12,
    sheet: Path = Path("found.png"),
    pretrained: str | None = None,
    checkpoint: Literal["last", "best"] = "last",
    workers: int = 2,
    formats: str | None = None,
    json: bool = False,
) -> None:
    """Find images by text, or by an image.

      fastclip search runs/emoji data/emoji/tasks/twemoji_retrieval "a red heart"
      fastclip search runs/emoji my/photos --image heart.png --top 24

    Prints the best matches with their cosine similarities, and draws a contact sheet of them. Image features
    are cached (RUN/search), and recomputed when the model or a file changes.

    Args:
        model: a run's folder, an exported folder, or an open_clip name with --pretrained.
        images: a folder of images, including subfolders and tars; or any pairs.
        text: the query.
        image: an image as the query instead of text.
        top: number of matches to show.
        sheet: file for the contact sheet of the matches.
        pretrained: weights for an open_clip name: a file, a folder or a tag.
        checkpoint: which checkpoint of a run.
        workers: loader workers.
        formats: image formats to decode besides JPEG, PNG, WebP, GIF, BMP and TIFF, separated by commas:
            avif, jpeg2000, ppm. Those of a run's data.formats are included.
        json: print JSON instead of lines.
    """
    from fastclip.config.options import split_formats

    accepted = split_formats("formats", formats)
    from fastclip.tools.search.index import Index

    query = (text or "").strip()
    if bool(query) == (image is not None):
        raise InputError(
            "text", 'or --image is required, but not both: e.g. "a red heart", or --image heart.png.'
        )
    if image is not None and not image.is_file():
        raise OptionError("image", image, "must be an existing image file")
    if top < 1:
        raise OptionError("top", top, "must be at least 1", example=12)
    with progress("encoding images", "images") as update:
        index = Index.open(model, images, pretrained, checkpoint, workers, update, formats=accepted)
    matches = index.by_text(query, top) if image is None else index.by_image(image, top)
    index.draw(matches, sheet)
    if json:
        output = [match._asdict() for match in matches]
        print(json_module.dumps({"matches": output, "sheet": str(sheet)}, indent=2))
        return
    for match in matches:
        say(f"{match.score:6.3f}  {one_line(match.name)}")
    say(f"contact sheet: {sheet}")
