"""The page about one run: its curves, its scores, what its model finds, and which pairs it finds hard."""

from __future__ import annotations

import shlex
from datetime import datetime
from math import log
from pathlib import Path

from fastclip.config.resolved import loss_settings
from fastclip.run.folder import Run, without_secrets
from fastclip.tools.report.curves import curves, elsewhere
from fastclip.tools.report.finds import Finds
from fastclip.tools.report.headline import headline, known
from fastclip.tools.report.output import Page, drawn, fill
from fastclip.tools.report.samples import Samples
from fastclip.tools.report.scores import group_scores


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


def about_estimators(run: Run) -> list[str]:
    """How old the estimators log u are: a sample's is renewed only when the sample comes again.

    No sentences for algorithms without estimators.
    """
    if run.config is None or run.num_samples is None or not loss_settings(run.config).algorithm.fcco:
        return []
    steps = run.num_samples / run.config.batch.size
    told = [
        f"A pair is seen once an epoch: its estimator waits {_steps(steps)} for the next visit on average."
    ]
    if run.config.data.shuffle == "full":
        told.append(f"At most it waits {_steps(2 * steps)}: first in one epoch, last in the next.")
    gamma = next(reversed(known(run.records, "gamma")), 0.0)
    if gamma >= 1:
        told.append("At γ = 1 an estimator holds nothing but its last visit.")
    elif gamma > 0:
        half = log(0.5) / log(1 - gamma)
        told.append(
            f"At γ = {gamma:.3g} each visit brings {100 * gamma:.3g} % of an estimator, and what it held "
            f"before halves in {half:.1f} visits, which are about {_steps(half * steps)}."
        )
    for unvisited in known(run.records, "unvisited")[-1:]:
        left = f"{100 * unvisited:.3g} % of the pairs have not been visited yet, and have no estimator."
        told.append(left if unvisited > 0 else "Every pair has been visited.")
    return told


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


def _steps(count: float) -> str:
    return f"{round(count):,} step{'s' * (round(count) != 1)}"
