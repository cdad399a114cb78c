"""The page about one run: its curves, its scores, what its model finds, and which pairs it finds hard."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path

from fastclip.run.folder import Run, without_secrets
from fastclip.tools.report.curves import curves, elsewhere
from fastclip.tools.report.estimators import about_estimators
from fastclip.tools.report.finds import Finds
from fastclip.tools.report.headline import headline
from fastclip.tools.report.samples import Samples
from fastclip.tools.report.scores import group_scores
from fastclip.tools.report.template import Page, drawn, fill


def render(
    run: Run,
    finds: Finds | None,
    *,
    images: str | None,
    no_finds: str = "",
    samples: Samples | None = None,
) -> Page:
    """The page, and what is drawn on it.

    Args:
        finds: what the model finds; None if it could not be tried.
        images: where the pictures are that were searched.
        no_finds: why there are no finds, as a sentence.
        samples: which pairs are hard, and which negatives likely none; None if it could not be told.
    """
    first, more = curves(run), elsewhere(run)
    html = fill(
        "page.html",
        run=run,
        about=_about(run),
        state=run.state(),
        last_record=_moment(run.changed),
        figures=headline(run),
        plots=drawn(first),
        elsewhere=drawn(more),
        estimators=about_estimators(run),
        bad=_bad(run),
        groups=group_scores(run.results),
        finds=finds,
        images=images,
        no_finds=no_finds,
        samples=samples,
        folder=shlex.quote(str(run.folder)),
        versions=run.facts.get("versions", {}),
    )
    return Page(html, [*first, *more])


def _about(run: Run) -> list[str]:
    """Algorithm, model, pairs, batch and epochs, as far as they are known."""
    pairs = [f"{run.num_samples:,} pairs"] if run.num_samples else []
    if run.config is None:
        return pairs
    config = run.config
    model = Path(config.model.name).stem if config.model.name.endswith(".json") else config.model.name
    epochs = f"{config.epochs:g} epoch{'s' * (config.epochs != 1)}"
    return [config.algorithm, model, *pairs, f"global batch {config.batch.size:,}", epochs]


def _bad(run: Run) -> list[tuple[str, str]]:
    """Where each pair lies that could not be used, and why; addresses without who logs in."""
    rows = run.facts.get("bad", [])
    known = [row for row in rows if isinstance(row, list) and len(row) == 3]
    return [(without_secrets(str(file)), str(reason)) for _, file, reason in known]


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
