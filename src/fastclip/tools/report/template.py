"""Fills the templates of pages: everything from a run is escaped, and a name that is missing is an error."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fastclip import __version__
from fastclip.tools.report.curves import Curve
from fastclip.tools.report.headline import percent
from fastclip.tools.report.plots import draw


class Page(NamedTuple):
    """A page, and what is drawn on it."""

    html: str
    curves: list[Curve]


def fill(template: str, **values: object) -> str:
    """A page as text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    return environment.get_template(template).render(**values, version=__version__)


def drawn(curves: Iterable[Curve]) -> list[tuple[Curve, Markup]]:
    """Curves with their drawings."""
    return [(curve, Markup(draw(curve))) for curve in curves]
