"""The verb `fastclip data get`."""

from __future__ import annotations

from pathlib import Path

from fastclip.config.collections import COLLECTIONS


def get(name: str, out: Path | None = None, jobs: int | None = None) -> None:
    """Get image-text pairs and evaluation tasks. It can be interrupted and called again.

    Args:
        name: COLLECTIONS.
        out: folder to write; data/NAME if left out.
        jobs: processes that render; all cores if left out.
    """
    from fastclip import datasets

    folder = datasets.get(name, out or Path("data") / name, jobs=jobs)
    print(f"{folder} is ready. Train on {folder / 'train'}, test on {folder / 'tasks'}.")


get.__doc__ = str(get.__doc__).replace("COLLECTIONS", "; ".join(map(str, COLLECTIONS.values())))
