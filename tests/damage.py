"""Damage to files, for tests of what notices it."""

from pathlib import Path

import numpy as np


def positions(path: Path, most: int = 12) -> list[int]:
    """Byte positions spread over a file, with both ends."""
    size = path.stat().st_size
    return sorted(set(np.linspace(0, size - 1, min(most, size)).astype(int).tolist())) if size else []


def flip(path: Path, position: int, bit: int = 3) -> None:
    """Flip one bit, keeping the file's size and times."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))
