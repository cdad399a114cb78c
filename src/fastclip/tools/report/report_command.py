"""The command `fastclip report`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastclip.errors import InputError, OptionError, PathError
from fastclip.terminal import say

if TYPE_CHECKING:
    from fastclip.tools.report.output import Page


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

    The page of a run shows its training curves, scores, search examples and hard pairs. The page of several
    runs overlays their curves. The page of a study has its tables, the curves of its arms as means over
    seeds, and what is missing. Each page is one self-contained HTML file, and its plots are also written
    beside it as PNGs. Runs may still be training.

    Args:
        runs: the folder of a run, of several runs, or of a study.
        out: the file to write (default: report.html in the run's or study's folder; for several runs, in
            their common parent folder).
        images: images to search: a folder, tars, or any pairs (default: the run's evaluate.pairs).
        search: queries for the search examples, separated by ";" (default: five of the images' captions).
        checkpoint: the checkpoint of the run to search with.
        workers: loader workers.
    """
    from fastclip.tools.report.output import pictures_folder, write, write_plots
    from fastclip.tools.report.run_page import page_of_run
    from fastclip.tools.study.study_state import is_study

    queries = _queries(search)
    folders = [Path(run).expanduser() for run in ([runs] if isinstance(runs, Path | str) else runs)]
    studies = [folder for folder in folders if is_study(folder)]
    if len(folders) == 1 and not studies:
        page, home = page_of_run(folders[0], images, queries, checkpoint, workers), folders[0]
    else:
        for option, value in (("images", images), ("search", search), ("checkpoint", checkpoint)):
            if value not in (None, "", "last"):
                rule = "applies only to the page of a single run"
                raise OptionError(option, value, rule, advice=f"Pass one run, or omit --{option}.")
        page, home = _about_several(folders, studies)
    out = (out or home / "report.html").expanduser()
    write(page.html, out)
    write_plots(page.curves, pictures_folder(out))
    say(f"Report written to {out}")


def _about_several(folders: list[Path], studies: list[Path]) -> tuple[Page, Path]:
    """The page of a study or of several runs, and the folder to write it to by default."""
    from fastclip.run.folder import read_run
    from fastclip.tools.report.runs_page import render_runs
    from fastclip.tools.report.study_page import render_study
    from fastclip.tools.study.study_state import read_study

    if not folders:
        raise InputError("runs", "is empty. Pass the folder of a run, of several runs, or of a study.")
    if studies and len(folders) > 1:
        raise PathError(studies[0], "is a study, which has its own page. Pass it alone, or pass only runs.")
    if studies:
        return render_study(read_study(studies[0])), studies[0]
    distinct = list({os.path.abspath(folder): folder for folder in folders}.values())
    home = Path(os.path.commonpath([Path(os.path.abspath(folder)).parent for folder in distinct]))
    return render_runs([read_run(folder) for folder in distinct]), home


def _queries(search: str | None) -> list[str] | None:
    from fastclip.tools.report.search_examples import MAX_QUERIES

    if search is None:
        return None
    queries = list(dict.fromkeys(text.strip() for text in search.split(";") if text.strip()))
    if not queries:
        raise OptionError("search", search, "must contain a query", example='"a red heart; a cat"')
    if len(queries) > MAX_QUERIES:
        rule = f"has {len(queries)} queries but must have at most {MAX_QUERIES}"
        raise OptionError("search", f"{search[:60]}…", rule)
    return queries
