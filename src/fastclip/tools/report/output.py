"""Fill page templates, and write pages and plots atomically.

All values are escaped, with control characters made visible; a name that a template uses but does not get is
an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fastclip import __version__
from fastclip.errors import OptionError
from fastclip.files import temporary_path
from fastclip.terminal import progress
from fastclip.text import printable
from fastclip.tools.report.curves import Curve
from fastclip.tools.report.key_figures import percent
from fastclip.tools.report.plots import draw, draw_png
from fastclip.tools.study.rendering import Best


class Page(NamedTuple):
    """A page and the curves on it."""

    html: str
    curves: list[Curve]


def fill(template: str, **values: object) -> str:
    """Render a template."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # Markup is our own
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    environment.tests["best"] = lambda cell: isinstance(cell, Best)
    return environment.get_template(template).render(**values, version=__version__)


def drawn(curves: Iterable[Curve]) -> list[tuple[Curve, Markup]]:
    """Curves with their plots as SVG."""
    return [(curve, Markup(draw(curve))) for curve in curves]


def pictures_folder(out: Path) -> Path:
    """The folder of a page's plots: RUN/report for RUN/report.html."""
    return out.with_suffix("") if out.suffix else out.with_name(f"{out.name}-pictures")


def write_plots(curves: list[Curve], folder: Path) -> None:
    """Write each curve as a PNG."""
    with progress("drawing", "plots") as update:
        for done, curve in enumerate(curves, start=1):
            write(draw_png(curve), folder / f"{curve.key}.png")
            update(done, len(curves))


def write(page: str | bytes, out: Path) -> None:
    """Write a file; an existing one stays until the new one is complete on disk."""
    if out.is_dir():
        raise OptionError("out", out, "must be a file, not a folder", example=out / "report.html")
    part = temporary_path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            # JSON may contain lone surrogates
            file.write(page.encode("utf-8", errors="replace") if isinstance(page, str) else page)
            file.flush()
            os.fsync(file.fileno())
        part.replace(out)
    except OSError as error:
        raise OSError(
            f"{out} cannot be written: {error.strerror}. Choose another --out, or free disk space."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink()
