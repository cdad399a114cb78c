"""A study from its plan to its end: checked, tuned, trained and scored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from fastclip.config.options import TrainConfig
from fastclip.tools.study.arms import Arm
from fastclip.tools.study.board import Board
from fastclip.tools.study.checks import check_study, option_words
from fastclip.tools.study.jobs import PROGRAM, STOPPED, Job, Jobs, Stopped, locked, places
from fastclip.tools.study.plan import STUDY_FILE, Study, write_study
from fastclip.tools.study.study import State, StudyRun, failure_file, is_trained, run_name, state_of
from fastclip.tools.study.tune import Trial, choose, trials


def run_study(
    study: Study, out: Path, at_once: int | None = None, program: tuple[str, ...] = PROGRAM
) -> list[str]:
    """Train and score all that is not there yet; the names of the runs that failed this time.

    Nothing is written before every arm was found fit to be trained. A stop ends the program with code 75.
    """
    configs = check_study(study)
    where = places(at_once)
    with locked(out) as lock:
        write_study(study, out / STUDY_FILE)
        with Board([row.name for row in planned(study, out)], len(where)) as board:
            jobs = Jobs(out, where, board, lock, program)
            try:
                _run_all(study, out, configs, jobs)
            except Stopped as stopped:
                board.message(f"{stopped} The same command goes on.")
                raise SystemExit(STOPPED) from None
    if jobs.stopped:
        print(f"{', '.join(jobs.stopped)}: stopped, and saved. The same command goes on.", file=sys.stderr)
        raise SystemExit(STOPPED)
    return jobs.failed


class Planned(NamedTuple):
    """A run that belongs to a study, tuning's among them."""

    name: str
    values: dict[str, object]
    state: State
    error: str
    folder: str


def planned(study: Study, out: Path) -> list[Planned]:
    """Tuning's runs, then the arms' with each seed, and how far they are."""
    state, found = state_of(study, out), []
    for arm in state.arms:
        for trial in trials(arm):
            failure, folder = failure_file(out, trial.name), trial.folder(out)
            kind, error = _trial_state(failure, folder)
            found.append(Planned(trial.name, arm.values | trial.values, kind, error, str(folder)))
    for run in state.runs:
        values = run.arm.values | run.arm.tuned | {"seed": run.seed}
        found.append(Planned(run_name(run.arm, run.seed), values, run.state, run.error, str(run.folder)))
    return found


def _trial_state(failure: Path, folder: Path) -> tuple[State, str]:
    try:
        if is_trained(folder):
            return "done", ""
    except ValueError as error:
        return "unfinished", str(error)
    if failure.is_file():
        return "failed", failure.read_text(encoding="utf-8", errors="replace").strip()
    return "unfinished", ""


def _run_all(study: Study, out: Path, configs: dict[str, TrainConfig], jobs: Jobs) -> None:
    if study.tunes:
        chosen = choose(study, out)  # an arm that has its values is not tuned again
        tried = [trial for arm in study.all_arms() for trial in trials(arm)]
        for trial in tried:
            if trial.arm.name in chosen:
                jobs.board.done(trial.name, seconds=None)
        jobs.run([_tuning_job(one, study, out, configs) for one in tried if one.arm.name not in chosen])
        choose(study, out)
    state = state_of(study, out)
    ready = [run for run in state.runs if run.arm.tuned or not study.tunes]
    for run in state.runs:
        if run not in ready and not jobs.stopped:
            _tell_untuned(run, out, jobs)
    jobs.run([_job(run.arm, run.seed, run.folder, study, configs) for run in ready])


def _tuning_job(trial: Trial, study: Study, out: Path, configs: dict[str, TrainConfig]) -> Job:
    words = option_words(trial.options(study))
    epochs = study.tune_set.get("epochs", configs[trial.arm.name].epochs)
    return Job(trial.name, trial.folder(out), words, epochs)


def _job(arm: Arm, seed: int, folder: Path, study: Study, configs: dict[str, TrainConfig]) -> Job:
    tests = [] if study.tasks is None else ["--tasks", study.tasks]
    tests += ["--suite", study.suite] if study.suite is not None else []
    words = option_words(study.options(arm, seed))
    return Job(run_name(arm, seed), folder, words, configs[arm.name].epochs, tests)


def _tell_untuned(run: StudyRun, out: Path, jobs: Jobs) -> None:
    """All that was tried for the arm failed: there is nothing to choose from."""
    name, why = run_name(run.arm, run.seed), f"no tuning run of {run.arm.name} has a score; see tuning.json"
    failure_file(out, name).write_text(why + "\n", encoding="utf-8")
    jobs.failed.append(name)
    jobs.board.failed(name, [why])
