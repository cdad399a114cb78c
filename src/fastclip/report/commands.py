"""The verb `fastclip report`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastclip.progress import progress

if TYPE_CHECKING:
    from fastclip.report.finds import Finds
    from fastclip.report.run import Run
    from fastclip.training.runs import EvaluationPairs

log = logging.getLogger(__name__)


def report(
    run: Path,
    out: Path | None = None,
    images: str | None = None,
    search: str | None = None,
    checkpoint: Literal["last", "best"] = "last",
    workers: int = 2,
) -> None:
    """Write a page about a run: its curves, its scores, and what its model finds.

      fastclip report runs/emoji-fastclip-v3
      fastclip report runs/mine --images my/photos --search "a red heart; a cat"

    The page is one file without links to any other: open it in a browser, send it, keep it. It can be made
    while the run goes on. Scores come from `fastclip eval`; without them the page says how to get them.

    Args:
        run: the run's folder.
        out: the file to write; RUN/report.html if left out.
        images: pictures to search in: a folder, tars, or any pairs; the run's own evaluate.pairs if left out.
        search: what to look for, separated by ";"; if left out, five captions of the pictures.
        checkpoint: which checkpoint of the run looks for it.
        workers: processes that decode images.
    """
    from fastclip.report.page import render, write
    from fastclip.report.run import read_run
    from fastclip.training.runs import EvaluationPairs, evaluation_pairs, find_checkpoint

    queries = _queries(search)
    found = read_run(run)
    if checkpoint == "best":
        find_checkpoint(found.folder, "best")  # says so if there is none
    where = EvaluationPairs([images]) if images is not None else evaluation_pairs(found.folder)
    finds, reason = None, ""
    if found.facts and found.results:
        _tell_old_scores(found, checkpoint)
    if not where.paths:
        reason = "The run's config names no pictures (evaluate.pairs)."
    else:
        try:
            finds = _find(found, where, queries, checkpoint, workers)
        except (OSError, ValueError, RuntimeError) as error:
            if images is not None and found.facts:
                raise
            reason = str(error)
    if reason:
        log.warning("The page shows nothing that the model finds: %s", reason)
    out = (out or found.folder / "report.html").expanduser()
    write(render(found, finds, images=", ".join(where.paths), no_finds=reason), out)
    print(f"The report is in {out}")


def _queries(search: str | None) -> list[str] | None:
    from fastclip.report.finds import MOST_QUERIES

    if search is None:
        return None
    queries = list(dict.fromkeys(text.strip() for text in search.split(";") if text.strip()))
    if not queries:
        raise ValueError('--search holds no words; give some, as in --search "a red heart; a cat".')
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"--search holds {len(queries)} texts; a page has room for {MOST_QUERIES}.")
    return queries


def _tell_old_scores(run: Run, checkpoint: Literal["last", "best"]) -> None:
    """A run may have gone on since it was scored."""
    from fastclip.evaluation.kept import model_key
    from fastclip.loading import load_towers

    try:
        key = model_key(load_towers(run.folder, checkpoint=checkpoint), None)
    except (OSError, ValueError, RuntimeError) as error:
        run.missing.append(f"The {checkpoint} checkpoint cannot be loaded: {error}")
        return
    old = sum(result.model not in ("", key) for result in run.results)
    if old:
        run.missing.append(
            f"{old:,} of {len(run.results):,} scores are of other weights than the {checkpoint} "
            "checkpoint's, or in another precision; `fastclip eval` scores again."
        )


def _find(
    run: Run,
    where: EvaluationPairs,
    queries: list[str] | None,
    checkpoint: Literal["last", "best"],
    workers: int,
) -> Finds:
    from fastclip.evaluation.search import Index
    from fastclip.report.finds import find

    with progress("encoding pictures", "images") as update:
        index = Index.open(str(run.folder), where.paths, None, checkpoint, workers, update, where.columns)
    with progress("encoding captions", "captions") as update:
        index.encode_captions(update)
    with progress("searching", "queries") as update:
        return find(index, queries, update)
