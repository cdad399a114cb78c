"""The state of a study, read from its folder: its arms, its runs and the state of each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fastclip.tools.study.arms import Arm
from fastclip.tools.study.definition import STUDY_FILE, Study, load_study
from fastclip.tools.study.folder import State, failure_file, run_folder, state_of_run
from fastclip.tools.study.tune import chosen_values, trial_folder, trial_name, trials


@dataclass
class StudyRun:
    """A run of a study and its state."""

    name: str
    arm: Arm
    seed: int
    values: dict[str, Any]
    """The options of this run, including tuned ones."""
    folder: Path
    state: State
    error: str
    """Why the last attempt failed, or what is wrong with the folder of an unfinished run."""


@dataclass
class StudyState:
    """A study and the state of its runs."""

    folder: Path
    study: Study
    arms: list[Arm]
    runs: list[StudyRun]
    """Arm by arm, then seed by seed."""
    tuning: list[StudyRun]
    """The runs that tuning chooses from."""

    @property
    def planned(self) -> list[StudyRun]:
        """All runs in the order of training."""
        return [*self.tuning, *self.runs]


def read_study(out: Path) -> StudyState:
    """The study in this folder; PathError if there is none.

    Runs that have not started are unfinished; a damaged run has an error.
    """
    return state_of(load_study(out / STUDY_FILE), out)


def is_study(folder: Path) -> bool:
    """Whether the folder holds a study."""
    return (folder / STUDY_FILE).is_file()


def state_of(study: Study, out: Path) -> StudyState:
    """The state of this study in this folder, which need not exist yet."""
    chosen, arms = chosen_values(out), study.all_arms()
    for arm in arms:
        arm.tuned = chosen.get(arm.name, {})

    def run(name: str, arm: Arm, folder: Path, own: dict[str, Any], tests: bool) -> StudyRun:
        state, error = state_of_run(folder, failure_file(out, name), tests)
        seed, values = own.get("seed", study.tune_seed), arm.values | arm.tuned | own
        return StudyRun(name, arm, seed, values, folder, state, error)

    runs = []
    for arm, seed in product(arms, study.seeds):
        folder = run_folder(out, arm, seed)
        runs.append(run(folder.name, arm, folder, {"seed": seed}, tests=study.tasks is not None))
    all_trials = [trial for arm in arms for trial in trials(arm)]
    tuning = [run(trial_name(one), one, trial_folder(out, one), {}, tests=False) for one in all_trials]
    return StudyState(out, study, arms, runs, tuning)
