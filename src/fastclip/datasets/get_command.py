"""The command `fastclip data get`."""

from __future__ import annotations

from pathlib import Path

from fastclip.config.collections import COLLECTIONS
from fastclip.terminal import say


def get(name: str, out: Path | None = None, jobs: int | None = None) -> None:
    """Download or generate image-text pairs and evaluation tasks.

    After an interruption, run the same command again to resume.

    Args:
        name: COLLECTIONS.
        out: folder to write. Default: data/NAME.
        jobs: processes that render. Default: one per core.
    """
    from fastclip import datasets

    folder = datasets.get(name, out or Path("data") / name, jobs=jobs)
    say(f"{folder} is ready. Train on {folder / 'train'}, evaluate on {folder / 'tasks'}.")


get.__doc__ = str(get.__doc__).replace("COLLECTIONS", "; ".join(map(str, COLLECTIONS.values())))
