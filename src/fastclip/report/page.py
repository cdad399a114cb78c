"""Lays out a report: one HTML file that needs no other, written whole or not at all."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fastclip import __version__
from fastclip.report.curves import curves
from fastclip.report.finds import Finds
from fastclip.report.headline import headline, percent
from fastclip.report.plots import draw
from fastclip.report.run import Run
from fastclip.report.scores import group_scores


def render(run: Run, finds: Finds | None, *, images: str | None, no_finds: str = "") -> str:
    """The page as text.

    Args:
        finds: what the model finds; None if it could not be tried.
        images: where the pictures are that were searched.
        no_finds: why there are no finds, as a sentence.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    return environment.get_template("page.html").render(
        run=run,
        about=_about(run),
        state=run.state(),
        last_record=_moment(run.changed),
        figures=headline(run),
        plots=[(curve, Markup(draw(curve))) for curve in curves(run)],
        groups=group_scores(run.results),
        finds=finds,
        images=images,
        no_finds=no_finds,
        folder=shlex.quote(str(run.folder)),
        versions=run.facts.get("versions", {}),
        version=__version__,
    )


def write(page: str, out: Path) -> None:
    """Put the page where it belongs; what was there stays until the new one is complete on the disk."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; give a file, e.g. {out / 'report.html'}.")
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(page.encode("utf-8", errors="replace"))  # JSON may hold half a letter
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


def _about(run: Run) -> list[str]:
    """Algorithm, model, pairs, batch and epochs, as far as they are known."""
    pairs = [f"{run.num_samples:,} pairs"] if run.num_samples else []
    if run.config is None:
        return pairs
    config = run.config
    model = Path(config.model.name).stem if config.model.name.endswith(".json") else config.model.name
    epochs = f"{config.epochs:g} epoch{'s' * (config.epochs != 1)}"
    return [config.algorithm, model, *pairs, f"global batch {config.batch.size:,}", epochs]


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
