"""The verb `fastclip search`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Literal

from fastclip.terminal import progress


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
    json: bool = False,
) -> None:
    """Find pictures by words, or by a picture.

      fastclip search runs/emoji data/emoji/tasks/twemoji_retrieval "a red heart"
      fastclip search runs/emoji my/photos --image heart.png --top 24

    Prints the best matches with their scores, which are cosines, and draws a contact sheet of them. The
    pictures' features are kept (RUN/search), and made again when the model or a file changes.

    Args:
        model: a run's folder, an exported folder, or an open_clip name with --pretrained.
        images: a folder of pictures, also in tars and in folders within; or any pairs.
        text: what to look for.
        image: a picture to look for instead: the pictures most like it.
        top: how many to show.
        sheet: where the contact sheet of the best goes.
        pretrained: weights for an open_clip name: a file, a folder or a tag.
        checkpoint: which checkpoint of a run.
        workers: processes that decode images.
        json: print JSON instead of lines.
    """
    from fastclip.tools.search.index import Index

    words = (text or "").strip()
    if bool(words) == (image is not None):
        raise ValueError('What to look for? Give words, as in "a red heart", or a picture with --image.')
    if image is not None and not image.is_file():
        raise ValueError(f"--image {image} is not a file.")
    if top < 1:
        raise ValueError(f"--top {top} must be at least 1; try 12.")
    with progress("encoding pictures", "images") as update:
        index = Index.open(model, images, pretrained, checkpoint, workers, update)
    found = index.by_text(words, top) if image is None else index.by_image(image, top)
    index.draw(found, sheet)
    if json:
        matches = [match._asdict() for match in found]
        print(json_module.dumps({"matches": matches, "sheet": str(sheet)}, indent=2))
        return
    for match in found:
        print(f"{match.score:6.3f}  {match.name}")
    print(f"contact sheet: {sheet}")
