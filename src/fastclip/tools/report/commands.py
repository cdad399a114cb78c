"""The verb `fastclip report`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastclip.progress import progress

if TYPE_CHECKING:
    from fastclip.model import TwoTowers
    from fastclip.run.folder import Run
    from fastclip.tools.report.finds import Finds
    from fastclip.tools.report.output import Page
    from fastclip.tools.report.samples import Samples
    from fastclip.tools.search.index import Index

log = logging.getLogger(__name__)
Checkpoint = Literal["last", "best"]


def report(
    runs: list[Path] | Path,
    out: Path | None = None,
    images: str | None = None,
    search: str | None = None,
    checkpoint: Literal["last", "best"] = "last",
    workers: int = 2,
) -> None:
    """Write a page about a run, about several runs side by side, or about a study.

      fastclip report runs/emoji-fastclip-v3
      fastclip report runs/mine --images my/photos --search "a red heart; a cat"
      fastclip report runs/emoji-openclip runs/emoji-fastclip-v3
      fastclip report studies/batch

    A run's page has its curves, its scores, what its model finds, and which pairs it finds hard. The page of
    several runs lays their curves over each other. A study's page has its tables, its arms' curves as means
    over seeds, and what is missing. Each is one file without links to any other: open it in a browser, send
    it, keep it. Its plots lie beside it as PNGs. It can be made while runs go on.

    Args:
        runs: a run's folder, several of them, or the folder of a study.
        out: the file to write; report.html in the folder if left out, or in the one that holds all runs.
        images: pictures to search in: a folder, tars, or any pairs; a run's own evaluate.pairs if left out.
        search: what to look for, separated by ";"; if left out, five captions of the pictures.
        checkpoint: which checkpoint of the run looks for it.
        workers: processes that decode images.
    """
    from fastclip.tools.report.output import pictures_folder, write, write_pictures

    queries = _queries(search)
    folders = [Path(run).expanduser() for run in ([runs] if isinstance(runs, Path | str) else runs)]
    if len(folders) == 1 and not _is_study(folders[0]):
        page, home = _about_run(folders[0], images, queries, checkpoint, workers), folders[0]
    else:
        for name, given in (("images", images), ("search", search), ("checkpoint", checkpoint != "last")):
            if given:
                raise ValueError(f"--{name} is for the page of one run: give one run, or leave it out.")
        page, home = _about_several(folders)
    out = (out or home / "report.html").expanduser()
    write(page.html, out)
    write_pictures(page.curves, pictures_folder(out))
    print(f"The report is in {out}")


def _is_study(folder: Path) -> bool:
    from fastclip.tools.study.study import is_study

    return is_study(folder)


def _about_run(
    folder: Path, images: str | None, queries: list[str] | None, checkpoint: Checkpoint, workers: int
) -> Page:
    """The page of one run."""
    from fastclip.run.folder import EvaluationPairs, evaluation_pairs, find_checkpoint, read_run
    from fastclip.tools.report.page import render
    from fastclip.tools.search.index import Index

    found = read_run(folder)
    if checkpoint == "best":
        find_checkpoint(found.folder, "best")  # says so if there is none
    where = EvaluationPairs([images]) if images is not None else evaluation_pairs(found.folder)
    index, finds, samples, reason = None, None, None, ""
    if not where.paths:
        reason = "The run's config names no pictures (evaluate.pairs)."
    else:
        try:
            with progress("encoding pictures", "images") as update:
                index = Index.open(str(folder), where.paths, None, checkpoint, workers, update, where.columns)
            finds, samples = _find(index, queries)
        except (OSError, ValueError, RuntimeError) as error:
            if images is not None and found.facts:
                raise
            reason = str(error)
    if found.facts and found.results:
        _tell_old_scores(found, checkpoint, None if index is None else index.model.towers)
    if reason:
        log.warning("The page shows nothing that the model finds: %s", reason)
    return render(found, finds, images=", ".join(where.paths), no_finds=reason, samples=samples)


def _about_several(folders: list[Path]) -> tuple[Page, Path]:
    """The page of a study or of several runs, and the folder it belongs into."""
    from fastclip.run.folder import read_run
    from fastclip.tools.report.runs_page import render_runs
    from fastclip.tools.report.study_page import render_study
    from fastclip.tools.study.study import read_study

    studies = [folder for folder in folders if _is_study(folder)]
    if not folders:
        raise ValueError("Which run? Give its folder, several of them, or a study's.")
    if studies and len(folders) > 1:
        raise ValueError(
            f"{studies[0]} is a study: it has a page of its own. Give it alone, or give runs only."
        )
    if studies:
        return render_study(read_study(studies[0])), studies[0]
    found = list({os.path.abspath(folder): folder for folder in folders}.values())
    home = Path(os.path.commonpath([Path(os.path.abspath(folder)).parent for folder in found]))
    return render_runs([read_run(folder) for folder in found]), home


def _queries(search: str | None) -> list[str] | None:
    from fastclip.tools.report.finds import MOST_QUERIES

    if search is None:
        return None
    queries = list(dict.fromkeys(text.strip() for text in search.split(";") if text.strip()))
    if not queries:
        raise ValueError('--search holds no words; give some, as in --search "a red heart; a cat".')
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"--search holds {len(queries)} texts; a page has room for {MOST_QUERIES}.")
    return queries


def _tell_old_scores(run: Run, checkpoint: Checkpoint, towers: TwoTowers | None) -> None:
    """A run may have gone on since it was scored; its model is loaded if nobody has done so."""
    from fastclip.evaluation.kept import model_key
    from fastclip.run.load import load_towers

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


def _find(index: Index, queries: list[str] | None) -> tuple[Finds, Samples | None]:
    """What the model finds, and what it finds hard."""
    from fastclip.tools.report.finds import find
    from fastclip.tools.report.samples import look_at_samples

    with progress("encoding captions", "captions") as update:
        index.caption_features(update)
    with progress("searching", "queries") as update:
        finds = find(index, queries, update)
    with progress("looking for hard pairs", "pairs") as update:
        return finds, look_at_samples(index, update)
