"""The verb `fastclip data get`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def get(name: Literal["emoji", "icons", "scenes"], out: Path | None = None, jobs: int | None = None) -> None:
    """Get image-text pairs and evaluation tasks. It can be interrupted and called again.

    Args:
        name: emoji, coloured emoji of five sets, to be tested on five others (a minute; needs npm);
            icons, some 346,000 icons, to be tested on sets held out whole (ten minutes; needs npm);
            scenes, captioned coloured shapes, generated in seconds (needs nothing).
        out: folder to write; data/NAME if left out.
        jobs: processes that render; all cores if left out.
    """

    from fastclip import datasets

    folder = datasets.get(name, out or Path("data") / name, jobs=jobs)
    print(f"{folder} is ready. Train on {folder / 'train'}, test on {folder / 'tasks'}.")
