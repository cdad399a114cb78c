"""A study's folder: where its runs lie, and how far each of them is.

OUT/study.yaml                     the study; `fastclip compare --study OUT` goes on with it
    runs/ARM-seedN/                ordinary run folders: metrics.jsonl, model/, evaluation/results.jsonl
    tuning/ARM/VALUES/             the runs from which values were chosen
    tuning.json                    what tuning tried and chose; see fastclip.tools.study.tune
    logs/NAME.log, NAME.failed     what each run printed, and why the last try of it failed
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastclip.run.folder import is_trained
from fastclip.tools.study.arms import Arm

State = Literal["done", "unfinished", "failed"]
SCORES_FILE = "evaluation/scores.json"
"""In a run's folder: what `fastclip eval --json` printed, once all of the study's tasks were scored."""


def run_folder(out: Path, arm: Arm, seed: int) -> Path:
    """Its name is the run's."""
    return out / "runs" / f"{arm.name}-seed{seed}"


def failure_file(out: Path, name: str) -> Path:
    """Where it is written why a run failed; it is gone once the run is tried again."""
    return out / "logs" / f"{name}.failed"


def state_of_run(folder: Path, failure: Path, tests: bool = False) -> tuple[State, str]:
    """With why its last try failed, or what is wrong with its folder; with `tests` it is scored when done."""
    error = ""
    try:
        if is_trained(folder) and (is_scored(folder) or not tests):
            return "done", ""
    except ValueError as broken:
        error = str(broken)
    if failure.is_file():
        return "failed", failure.read_text(encoding="utf-8", errors="replace").strip()
    return "unfinished", error


def is_scored(folder: Path) -> bool:
    """Whether the study's tasks were scored after the run."""
    return (folder / SCORES_FILE).is_file()
