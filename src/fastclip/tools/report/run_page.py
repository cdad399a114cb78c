"""The page of one run: training curves, scores, search examples and hard pairs."""

from __future__ import annotations

import logging
import shlex
from datetime import datetime
from math import log
from pathlib import Path
from typing import Literal

from fastclip.data.pairs import COMMON_COLUMNS
from fastclip.evaluation.feature_cache import model_key
from fastclip.model import TwoTowers
from fastclip.run.folder import Run, evaluation_pairs, find_checkpoint, read_run, without_secrets
from fastclip.run.load import load_towers
from fastclip.terminal import progress
from fastclip.tools.report.curves import curves, curves_by_samples_and_time
from fastclip.tools.report.hard_pairs import HardPairs, find_hard_pairs
from fastclip.tools.report.key_figures import key_figures, known
from fastclip.tools.report.output import Page, drawn, fill
from fastclip.tools.report.scores import group_scores
from fastclip.tools.report.search_examples import SearchExamples, find_examples
from fastclip.tools.search.index import Index

logger = logging.getLogger(__name__)
Checkpoint = Literal["last", "best"]


def page_of_run(
    folder: Path, images: str | None, queries: list[str] | None, checkpoint: Checkpoint, workers: int
) -> Page:
    """Read a run and try its model on these images (default: the ones that it was evaluated on)."""
    run = read_run(folder)
    if checkpoint == "best":
        find_checkpoint(run.folder, "best")  # raises if there is none
    paths, columns = evaluation_pairs(run.folder) if images is None else ([images], COMMON_COLUMNS)
    index, examples, hard_pairs, reason = None, None, None, ""
    try:
        if not paths:
            raise ValueError("The run has no evaluate.pairs. Pass --images.")
        with progress("encoding images", "images") as update:
            index = Index.open(str(folder), paths, None, checkpoint, workers, update, columns)
        with progress("encoding captions", "captions") as update:
            index.caption_features(update)
        with progress("searching", "queries") as update:
            searched = find_examples(index, queries, update)
        with progress("comparing pairs", "pairs") as update:
            examples, hard_pairs = searched, find_hard_pairs(index, update)
    except (OSError, ValueError, RuntimeError) as error:
        if images is not None and run.metadata:
            raise
        reason = str(error)
        logger.warning("The page has no search examples. %s", reason)
    if run.metadata and run.results:
        _note_stale_scores(run, checkpoint, None if index is None else index.model.towers)
    images = ", ".join(paths)
    return render(run, examples, images=images, why_no_examples=reason, hard_pairs=hard_pairs)


def render(
    run: Run,
    examples: SearchExamples | None,
    *,
    images: str | None,
    why_no_examples: str = "",
    hard_pairs: HardPairs | None = None,
) -> Page:
    """The page and the curves on it.

    Args:
        examples: None if the model could not search.
        images: where the searched images are.
        why_no_examples: the reason, as a sentence.
        hard_pairs: None if they are unknown.
    """
    first, more = curves(run), curves_by_samples_and_time(run)
    html = fill(
        "run.html",
        run=run,
        about=_about(run),
        state=run.state(),
        last_record=run.changed and datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M"),
        figures=key_figures(run),
        plots=drawn(first),
        more_plots=drawn(more),
        estimators=about_estimators(run),
        bad=_bad(run),
        groups=group_scores(run.results),
        examples=examples,
        images=images,
        why_no_examples=why_no_examples,
        hard_pairs=hard_pairs,
        folder=shlex.quote(str(run.folder)),
        versions=run.metadata.get("versions", {}),
    )
    return Page(html, [*first, *more])


def about_estimators(run: Run) -> list[str]:
    """The age of the estimators log u, as sentences: a sample's is updated only when the sample is visited.

    Empty for algorithms without estimators.
    """
    if run.config is None or run.num_samples is None or not run.config.loss.algorithm.fcco:
        return []
    steps = run.num_samples / run.config.batch.size
    sentences = [
        "Each pair is visited once per epoch, which updates its estimator. "
        f"The average interval between visits is {_steps(steps)}."
    ]
    if run.config.data.shuffle == "full":
        longest = _steps(2 * steps)
        sentences.append(f"The longest is {longest}: from first in one epoch to last in the next.")
    gamma = next(reversed(known(run.records, "gamma")), 0.0)
    if gamma >= 1:
        sentences.append("At γ = 1 an estimator depends only on the last visit.")
    elif gamma > 0:
        half = log(0.5) / log(1 - gamma)
        sentences.append(
            f"At γ = {gamma:.3g} a visit contributes {100 * gamma:.3g} % of the estimator; the weight of "
            f"earlier visits halves every {half:.1f} visits, or about {_steps(half * steps)}."
        )
    for unvisited in known(run.records, "unvisited")[-1:]:
        some = f"{100 * unvisited:.3g} % of the pairs have not been visited yet and have no estimator."
        sentences.append(some if unvisited > 0 else "Every pair has been visited.")
    return sentences


def _note_stale_scores(run: Run, checkpoint: Checkpoint, towers: TwoTowers | None) -> None:
    """Add a note if the run was trained further after it was scored. `towers`: its model, if loaded."""
    try:
        key = model_key(towers or load_towers(run.folder, checkpoint=checkpoint), None)
    except (OSError, ValueError, RuntimeError) as error:
        run.missing.append(f"The {checkpoint} checkpoint cannot be loaded: {error}")
        return
    stale = sum(result.model not in ("", key) for result in run.results)
    if stale:
        run.missing.append(
            f"{stale:,} of {len(run.results):,} scores do not belong to the {checkpoint} checkpoint, or were "
            "computed in another precision. Run `fastclip eval` to update them."
        )


def _about(run: Run) -> list[str]:
    """Algorithm, model, pairs, batch and epochs, as far as known."""
    pairs = [f"{run.num_samples:,} pairs"] if run.num_samples else []
    if run.config is None:
        return pairs
    config = run.config
    model = Path(config.model.name).stem if config.model.name.endswith(".json") else config.model.name
    epochs = f"{config.epochs:g} epoch{'s' * (config.epochs != 1)}"
    return [config.algorithm, model, *pairs, f"global batch {config.batch.size:,}", epochs]


def _bad(run: Run) -> list[tuple[str, str]]:
    """The file of each pair that could not be used, without credentials, and the reason."""
    rows = run.metadata.get("bad", [])
    known = [row for row in rows if isinstance(row, list) and len(row) == 3]
    return [(without_secrets(str(file)), str(reason)) for _, file, reason in known]


def _steps(count: float) -> str:
    return f"{round(count):,} step{'s' * (round(count) != 1)}"
