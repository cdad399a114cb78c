"""Checkpoints of a run in trouble: `suspect` in their metadata is the reason; the others are trusted.

`training/divergence.py` decides. Nothing here needs torch.
"""

from __future__ import annotations

from pathlib import Path

from fastclip.run.folder import complete_checkpoints
from fastclip.run.state_file import DamagedCheckpoint, read_metadata


def newest_trusted(checkpoints: Path) -> Path | None:
    """The complete checkpoint with the highest step that is neither suspect nor has a damaged state.json."""
    return next(filter(_is_trusted, reversed(complete_checkpoints(checkpoints))), None)


def _is_trusted(checkpoint: Path) -> bool:
    try:
        return not read_metadata(checkpoint).get("suspect")  # earlier versions did not judge
    except DamagedCheckpoint:
        return False
