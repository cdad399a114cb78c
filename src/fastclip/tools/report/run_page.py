"""The page about one run: its curves, its scores, what its model finds, and which pairs it finds hard."""

from __future__ import annotations

import logging
import shlex
from datetime import datetime
from math import log
from pathlib import Path
from typing import Literal

from fastclip.evaluation.feature_cache import model_key
from fastclip.model import TwoTowers
from fastclip.run.folder import Run, evaluation_pairs, find_checkpoint, read_run, without_secrets
from fastclip.run.load import load_towers
from fastclip.terminal import progress
from fastclip.tools.report.curves import curves, elsewhere
from fastclip.tools.report.hard_pairs import Samples, look_at_samples
from fastclip.tools.report.key_figures import headline, known
from fastclip.tools.report.output import Page, drawn, fill
from fastclip.tools.report.scores import group_scores
from fastclip.tools.report.search_examples import SearchExamples, find
from fastclip.tools.search.index import Index

logger = logging.getLogger(__name__)
Checkpoint = Literal["last", "best"]


def page_of_run(
    folder: Path, images: str | None, queries: list[str] | None, checkpoint: Checkpoint, workers: int
) -> Page:
    """Read a run and try its model on pictures: these, or those that the run was evaluated on."""
    run = read_run(folder)
    if checkpoint == "best":
        find_checkpoint(run.folder, "best")  # says so if there is none
    paths, columns = evaluation_pairs(run.folder) if images is None else ([images], (None, None))
    index, finds, samples, reason = None, None, None, ""
    try:
        if not paths:
            raise ValueError("The run's config names no pictures (evaluate.pairs).")
        with progress("encoding pictures", "images") as update:
            index = Index.open(str(folder), paths, None, checkpoint, workers, update, columns)
        with progress("encoding captions", "captions") as update:
            index.caption_features(update)
        with progress("searching", "queries") as update:
            found = find(index, queries, update)
        with progress("looking for hard pairs", "pairs") as update:
            finds, samples = found, look_at_samples(index, update)
    except (OSError, ValueError, RuntimeError) as error:
        if images is not None and run.metadata:
            raise
        reason = str(error)
        logger.warning("The page shows nothing that the model finds: %s", reason)
    if run.metadata and run.results:
        _tell_old_scores(run, checkpoint, None if index is None else index.model.towers)
    return render(run, finds, images=", ".join(paths), no_finds=reason, samples=samples)


def render(
    run: Run,
    finds: SearchExamples | None,
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
        "run.html",
        run=run,
        about=_about(run),
        state=run.state(),
        last_record=run.changed and datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M"),
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
        versions=run.metadata.get("versions", {}),
    )
    return Page(html, [*first, *more])


def about_estimators(run: Run) -> list[str]:
    """How old the estimators log u are: a sample's is renewed only when the sample comes again.

    No sentences for algorithms without estimators.
    """
    if run.config is None or run.num_samples is None or not run.config.loss.algorithm.fcco:
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


def _tell_old_scores(run: Run, checkpoint: Checkpoint, towers: TwoTowers | None) -> None:
    """A run may have gone on since it was scored; its model is loaded if nobody has done so."""
    try:
        key = model_key(towers or load_towers(run.folder, checkpoint=checkpoint), None)
    except (OSError, ValueError, RuntimeError) as error:
        run.missing.append(f"The {checkpoint} checkpoint cannot be loaded: {error}")
        return
    old = sum(result.model not in ("", key) for result in run.results)
    if old:
        run.missing.append(
            f"{old:,} of {len(run.results):,} scores are of other weights than the {checkpoint} "
            "checkpoint's, or in another precision; `fastclip eval` scores again."
        )


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
    rows = run.metadata.get("bad", [])
    known = [row for row in rows if isinstance(row, list) and len(row) == 3]
    return [(without_secrets(str(file)), str(reason)) for _, file, reason in known]


def _steps(count: float) -> str:
    return f"{round(count):,} step{'s' * (round(count) != 1)}"
