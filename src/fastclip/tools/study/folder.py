"""A study's folder: where its runs are, and the state of each.

OUT/study.yaml                     the study; `fastclip compare --study OUT` continues it
    runs/ARM-seedN/                ordinary run folders: metrics.jsonl, model/, evaluation/results.jsonl
    tuning/ARM/VALUES/             runs that tuning chooses from
    tuning.json                    the trials and the chosen values; see fastclip.tools.study.tune
    logs/NAME.log, NAME.failed     the output of each run, and why its last attempt failed
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastclip.run.folder import is_trained
from fastclip.tools.study.arms import Arm

State = Literal["done", "unfinished", "failed"]
SCORES_FILE = "evaluation/scores.json"
"""In a run's folder: the output of `fastclip eval --json` on the study's tasks."""


def run_folder(out: Path, arm: Arm, seed: int) -> Path:
    """The folder of a run; its last part is the run's name."""
    return out / "runs" / f"{arm.name}-seed{seed}"


def failure_file(out: Path, name: str) -> Path:
    """The file that says why a run failed; deleted when the run is tried again."""
    return out / "logs" / f"{name}.failed"


def state_of_run(folder: Path, failure: Path, tests: bool = False) -> tuple[State, str]:
    """The state and the error: why the last attempt failed, or what is wrong with the folder.

    With `tests`, a run is done only once it is scored.
    """
    error = ""
    try:
        if is_trained(folder) and (is_scored(folder) or not tests):
            return "done", ""
    except ValueError as damaged:
        error = str(damaged)
    if failure.is_file():
        return "failed", failure.read_text(encoding="utf-8", errors="replace").strip()
    return "unfinished", error


def is_scored(folder: Path) -> bool:
    """Whether the study's tasks have been scored."""
    return (folder / SCORES_FILE).is_file()
