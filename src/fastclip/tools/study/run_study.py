"""Run a study: check, tune, train and score."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from fastclip.config.resolved import Resolved
from fastclip.terminal import say
from fastclip.tools.study.arms import Arm
from fastclip.tools.study.check_study import check_study, option_arguments
from fastclip.tools.study.definition import STUDY_FILE, Study, write_study
from fastclip.tools.study.folder import failure_file
from fastclip.tools.study.jobs import PROGRAM, STOPPED, Job, Jobs, Stopped, locked, places
from fastclip.tools.study.live_status import LiveStatus
from fastclip.tools.study.study_state import StudyRun, state_of
from fastclip.tools.study.tune import choose, trial_folder, trial_name, trial_options, trials


def run_study(
    study: Study,
    out: Path,
    at_once: int | None = None,
    program: tuple[str, ...] = PROGRAM,
    show: Callable[[list[str], int], LiveStatus] = LiveStatus,
) -> list[str]:
    """Train and score what is not done; return the names of the runs that failed.

    Nothing is written before every arm has passed the checks. A signal to stop exits with code 75.
    """
    configs = check_study(study)
    where = places(at_once)
    with locked(out) as lock:
        write_study(study, out / STUDY_FILE)
        with show([run.name for run in state_of(study, out).planned], len(where)) as status:
            jobs = Jobs(out, where, status, lock, program)
            try:
                _run_all(study, out, configs, jobs)
            except Stopped as stopped:
                status.message(f"{stopped} Run the same command to continue.")
                raise SystemExit(STOPPED) from None
    if jobs.stopped:
        names = ", ".join(jobs.stopped)
        say(f"{names}: stopped and saved. Run the same command to continue.", file=sys.stderr)
        raise SystemExit(STOPPED)
    return sorted(jobs.failed)  # the same order, whichever ended first


def _run_all(study: Study, out: Path, configs: dict[str, Resolved], jobs: Jobs) -> None:
    if study.tunes:
        chosen = choose(study, out)  # tuned arms are not tuned again
        all_trials = [trial for arm in study.all_arms() for trial in trials(arm)]
        for trial in all_trials:
            if trial.name in chosen:
                jobs.status.done(trial_name(trial), seconds=None)
        jobs.run([_tuning_job(one, study, out, configs) for one in all_trials if one.name not in chosen])
        choose(study, out)
    ready = []
    for run in state_of(study, out).runs:
        if run.arm.tuned or not study.tunes:
            ready.append(_job(run, study, configs))
        elif not jobs.stopped:
            _fail_untuned(run, out, jobs)
    jobs.run(ready)


def _tuning_job(trial: Arm, study: Study, out: Path, configs: dict[str, Resolved]) -> Job:
    epochs = study.tune_set.get("epochs", configs[trial.name].epochs)
    arguments = option_arguments(trial_options(study, trial))
    return Job(trial_name(trial), trial_folder(out, trial), arguments, epochs)


def _job(run: StudyRun, study: Study, configs: dict[str, Resolved]) -> Job:
    tests = [] if study.tasks is None else ["--tasks", study.tasks]
    tests += ["--suite", study.suite] if study.suite is not None else []
    arguments = option_arguments(study.options(run.arm, run.seed))
    return Job(run.name, run.folder, arguments, configs[run.arm.name].epochs, tests)


def _fail_untuned(run: StudyRun, out: Path, jobs: Jobs) -> None:
    """Every trial of the arm failed: there is nothing to choose from."""
    why = f"no tuning run of {run.arm.name} has a score; see tuning.json"
    failure_file(out, run.name).write_text(why + "\n", encoding="utf-8")
    jobs.failed.append(run.name)
    jobs.status.failed(run.name, [why])
