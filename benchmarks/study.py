"""Saves a finished study under results/studies: its numbers as JSON, its tables and its plots.

    python -m benchmarks.study batch-32     after fastclip compare --study studies/batch-32.yaml

`make study NAME=batch-32` does both.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from benchmarks.record import RESULTS, save
from fastclip.tools.report.output import pictures_folder
from fastclip.tools.report.report_command import report
from fastclip.tools.study.rendering import as_markdown
from fastclip.tools.study.result_tables import study_tables
from fastclip.tools.study.study_state import read_study

STUDIES = Path("studies")
PICTURES = ("against-*.png", "course-mean-recall-1-*.png")  # docs/results.md may show these


def main() -> None:
    parser = argparse.ArgumentParser(description="Save a finished study under results/studies.")
    parser.add_argument("name", help="the name of a file in studies/, without .yaml")
    name = parser.parse_args().name
    folder, saved = STUDIES / name, RESULTS / "studies" / name
    state = read_study(folder)
    unfinished = [run.folder.name for run in state.runs if run.state != "done"]
    if unfinished:
        raise SystemExit(f"{len(unfinished)} runs of {folder} are not done, e.g. {unfinished[0]}.")
    tables = study_tables(state)
    shutil.rmtree(saved, ignore_errors=True)
    saved.mkdir(parents=True)
    save(f"studies/{name}/figures", state.study.seeds, tables, _commands(name))
    (saved / "tables.md").write_text(as_markdown(tables), encoding="utf-8")
    page = folder / "report.html"
    report(folder, page)
    for pattern in PICTURES:
        for plot in sorted(pictures_folder(page).glob(pattern)):
            shutil.copy(plot, saved)


def _commands(name: str) -> str:
    return f"fastclip compare --study studies/{name}.yaml; python -m benchmarks.study {name}"


if __name__ == "__main__":
    main()
