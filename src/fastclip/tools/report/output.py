"""Puts a page and its pictures on the disk, each whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fastclip.files import aside
from fastclip.terminal import progress
from fastclip.tools.report.curves import Curve
from fastclip.tools.report.plots import draw_png


def pictures_folder(out: Path) -> Path:
    """Beside the page, by its name: RUN/report for RUN/report.html."""
    return out.with_suffix("") if out.suffix else out.with_name(f"{out.name}-pictures")


def write_pictures(curves: list[Curve], folder: Path) -> None:
    """Every curve as a PNG of its own."""
    with progress("drawing", "pictures") as update:
        for done, curve in enumerate(curves, start=1):
            write(draw_png(curve), folder / f"{curve.key}.png")
            update(done, len(curves))


def write(page: str | bytes, out: Path) -> None:
    """Put a file where it belongs; what was there stays until the new one is complete on the disk."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; give a file, e.g. {out / 'report.html'}.")
    part = aside(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            # JSON may hold half a letter
            file.write(page.encode("utf-8", errors="replace") if isinstance(page, str) else page)
            file.flush()
            os.fsync(file.fileno())
        part.replace(out)
    except OSError as error:
        raise OSError(
            f"{out} cannot be written: {error.strerror}. Choose another --out, or free some space."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink()
