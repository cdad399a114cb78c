"""A study's folder, read again: its arms, its runs and how far each of them is.

OUT/study.yaml                     the study; `fastclip compare --study OUT` goes on with it
    runs/ARM-seedN/                ordinary run folders: metrics.jsonl, model/, evaluation/results.jsonl
    tuning/ARM/VALUES/             the runs from which values were chosen
    tuning.json                    what tuning tried and chose; see fastclip.tools.study.tune
    logs/NAME.log, NAME.failed     what each run printed, and why the last try of it failed
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fastclip.config.options import whole_batches
from fastclip.tools.study.arms import Arm
from fastclip.tools.study.plan import STUDY_FILE, Study, load_study

State = Literal["done", "unfinished", "failed"]
TUNING_FILE = "tuning.json"
SCORES_FILE = "evaluation/scores.json"
"""In a run's folder: what `fastclip eval --json` printed, once all of the study's tasks were scored."""


@dataclass
class StudyRun:
    """A run of a study, and how far it is."""

    arm: Arm
    seed: int
    folder: Path
    state: State
    error: str = ""
    """Why the last try failed; or what is wrong with the folder of an unfinished run."""


@dataclass
class StudyState:
    """A study as its folder tells it."""

    folder: Path
    arms: list[Arm]
    runs: list[StudyRun]
    """Arm by arm, each with its seeds. Tuning's runs are not among them."""
    baseline: dict[str, object]
    """The values of the arms that others are compared with; empty if the study names none."""
    suite: str | None
    settings: dict
    """All that study.yaml holds."""


def read_study(out: Path) -> StudyState:
    """The study in this folder; ValueError if there is none. A broken or missing run never fails: it tells.

    Before any run has started all of them are there, as unfinished.
    """
    return state_of(load_study(out / STUDY_FILE), out)


def is_study(folder: Path) -> bool:
    """Whether `read_study` has something to read there."""
    return (folder / STUDY_FILE).is_file()


def state_of(study: Study, out: Path) -> StudyState:
    """How far this study is in this folder, which need not exist yet."""
    chosen = chosen_values(out)
    arms = study.all_arms()
    for arm in arms:
        arm.tuned = chosen.get(arm.name, {})
    runs = [_read(arm, seed, study, out) for arm in arms for seed in study.seeds]
    return StudyState(out, arms, runs, study.baseline, study.suite, asdict(study))


def run_name(arm: Arm, seed: int) -> str:
    return f"{arm.name}-seed{seed}"


def run_folder(out: Path, arm: Arm, seed: int) -> Path:
    return out / "runs" / run_name(arm, seed)


def failure_file(out: Path, name: str) -> Path:
    """Where it is written why a run failed; it is gone once the run is tried again."""
    return out / "logs" / f"{name}.failed"


def chosen_values(out: Path) -> dict[str, dict[str, object]]:
    """What tuning chose, by the arm's name; arms without a choice are not there."""
    try:
        arms = json.loads((out / TUNING_FILE).read_text(encoding="utf-8"))["arms"]
        return {arm["arm"]: dict(arm["chosen"]) for arm in arms if arm["chosen"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def is_trained(folder: Path) -> bool:
    """Whether a run's newest checkpoint is of its last step, and its model was exported.

    ValueError if the checkpoint cannot be read.
    """
    saved = (path for path in folder.glob("checkpoints/step-*/state.json") if not path.parent.suffix)
    newest = max(saved, key=lambda path: int(path.parent.name.removeprefix("step-")), default=None)
    if newest is None:
        return False
    try:
        facts = json.loads(newest.read_bytes())["facts"]
        config = facts["config"]
        last = whole_batches(config["epochs"], facts["num_samples"], config["batch"]["size"])
        return facts["step"] >= last and (folder / "model").is_dir()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{newest} cannot be read ({error!r}): remove {newest.parent}.") from error


def is_scored(folder: Path) -> bool:
    """Whether the study's tasks were scored after the run."""
    return (folder / SCORES_FILE).is_file()


def _read(arm: Arm, seed: int, study: Study, out: Path) -> StudyRun:
    folder = run_folder(out, arm, seed)
    run = StudyRun(arm, seed, folder, "unfinished")
    try:
        if is_trained(folder) and (study.tasks is None or is_scored(folder)):
            run.state = "done"
            return run
    except ValueError as error:
        run.error = str(error)
    failed = failure_file(out, run_name(arm, seed))
    if failed.is_file():
        run.state, run.error = "failed", failed.read_text(encoding="utf-8", errors="replace").strip()
    return run
