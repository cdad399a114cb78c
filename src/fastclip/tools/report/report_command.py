"""The verb `fastclip report`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
    from fastclip.tools.report.run_page import page_of_run
    from fastclip.tools.study.study_state import is_study

    queries = _queries(search)
    folders = [Path(run).expanduser() for run in ([runs] if isinstance(runs, Path | str) else runs)]
    studies = [folder for folder in folders if is_study(folder)]
    if len(folders) == 1 and not studies:
        page, home = page_of_run(folders[0], images, queries, checkpoint, workers), folders[0]
    else:
        for name, given in (("images", images), ("search", search), ("checkpoint", checkpoint != "last")):
            if given:
                raise ValueError(f"--{name} is for the page of one run: give one run, or leave it out.")
        page, home = _about_several(folders, studies)
    out = (out or home / "report.html").expanduser()
    write(page.html, out)
    write_pictures(page.curves, pictures_folder(out))
    print(f"The report is in {out}")


def _about_several(folders: list[Path], studies: list[Path]) -> tuple[Page, Path]:
    """The page of a study or of several runs, and the folder it belongs into."""
    from fastclip.run.folder import read_run
    from fastclip.tools.report.runs_page import render_runs
    from fastclip.tools.report.study_page import render_study
    from fastclip.tools.study.study_state import read_study

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
    from fastclip.tools.report.search_examples import MOST_QUERIES

    if search is None:
        return None
    queries = list(dict.fromkeys(text.strip() for text in search.split(";") if text.strip()))
    if not queries:
        raise ValueError('--search holds no words; give some, as in --search "a red heart; a cat".')
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"--search holds {len(queries)} texts; a page has room for {MOST_QUERIES}.")
    return queries
