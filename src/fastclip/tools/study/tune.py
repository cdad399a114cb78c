"""Tuning: the same number of trials for every arm, judged on validation pairs; tests are never opened.

`tuning.json` in the study's folder holds the results:

    {"measure": "mean_recall@1", "pairs": …, "seed": 1000,
     "set": {…},                                                               only for tuning runs
     "arms": [{"arm": NAME, "values": {…}, "chosen": {"optim.lr": 0.001},      null until all were tried
               "tried": [{"values": {"optim.lr": 0.001}, "run": "tuning/NAME/lr0.001",
                          "score": 0.41,                                       null if there is none
                          "error": ""}, …]}, …]}

A choice is never revised: the arm's runs are trained with it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastclip.files import atomic_write
from fastclip.run.folder import METRICS, number
from fastclip.run.metrics_file import read_metrics
from fastclip.tools.study.arms import Arm, grid, identity, slug
from fastclip.tools.study.definition import Study, current_options
from fastclip.tools.study.folder import failure_file, state_of_run

TUNING_FILE = "tuning.json"
_NEVER = 1e9  # epochs between evaluations: only the one at the end is left
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what reading the file may raise


def trials(arm: Arm) -> list[Arm]:
    """The arm with each combination of values to try, in the order of the file; empty without tuning."""
    return [replace(arm, tuned=values) for values in grid(arm.tune)] if arm.tune else []


def trial_name(trial: Arm) -> str:
    return f"tuning-{trial.name}-{slug(trial.tuned)}"


def trial_folder(out: Path, trial: Arm) -> Path:
    return out / "tuning" / trial.name / slug(trial.tuned)


def trial_options(study: Study, trial: Arm) -> dict[str, object]:
    """The arm's options, except that only the validation pairs are evaluated, once at the end."""
    evaluation = {
        "evaluate.pairs": study.validation["pairs"],
        "evaluate.tasks": None,
        "evaluate.best": study.measure,
        "evaluate.every_epochs": _NEVER,
    }
    return study.options(trial, study.tune_seed) | study.tune_set | evaluation


def choose(study: Study, out: Path) -> dict[str, dict[str, object]]:
    """Write tuning.json and return the chosen values by arm; arms with unfinished trials are missing.

    The highest score wins, and the first of equal ones. A failed trial has no score and cannot win.
    """
    before, arms = chosen_values(out), []
    for arm in study.all_arms():
        tried = [_tried(trial, study, out) for trial in trials(arm)]
        chosen = before.get(arm.name)
        scored = [one for one in tried if one["score"] is not None]
        if chosen is None and scored and all(one["score"] is not None or one["error"] for one in tried):
            chosen = max(scored, key=lambda one: one["score"])["values"]
        arms.append({"arm": arm.name, "values": arm.values, "chosen": chosen, "tried": tried})
    settings = {"measure": study.measure, "pairs": study.validation["pairs"], "seed": study.tune_seed}
    found = settings | {"set": study.tune_set, "arms": arms}
    atomic_write(out / TUNING_FILE, json.dumps(found, indent=2) + "\n")
    return chosen_values(out)


def chosen_values(out: Path) -> dict[str, dict[str, object]]:
    """The values that tuning chose, by arm; arms without a choice are missing."""
    try:
        return {arm["arm"]: current_options("chosen", arm["chosen"]) for arm in _arms(out) if arm["chosen"]}
    except _DAMAGED:
        return {}


def read_trials(out: Path, missing: list[str]) -> list[dict]:
    """Every trial of every arm; empty without tuning. Problems are added to `missing`."""
    if not (out / TUNING_FILE).exists():
        return []
    try:
        found: list[dict[str, Any]] = [
            {
                "arm": str(arm["arm"]),
                "values": current_options("values", one["values"]),
                "score": number(one.get("score")),
                "chosen": bool(arm["chosen"]) and identity(one["values"]) == identity(arm["chosen"]),
                "error": str(one.get("error") or ""),
            }
            for arm in _arms(out)
            for one in arm["tried"]
        ]
    except _DAMAGED as error:
        missing.append(f"{TUNING_FILE} cannot be read, so tuning is not shown ({error!r}).")
        return []
    for one in found:
        if one["error"]:
            last = one["error"].strip().splitlines()[-1]
            missing.append(f"Tuning {one['arm']} with {json.dumps(one['values'])} failed: {last}")
    return found


def _arms(out: Path) -> list[dict]:
    return json.loads((out / TUNING_FILE).read_text(encoding="utf-8", errors="replace"))["arms"]


def _tried(trial: Arm, study: Study, out: Path) -> dict:
    folder, score = trial_folder(out, trial), None
    state, error = state_of_run(folder, failure_file(out, trial_name(trial)))
    if state == "done":
        try:
            evaluated = [one for one in read_metrics(folder / METRICS) if "evaluation" in one]
            score = evaluated[-1]["evaluation"].get(study.measure) if evaluated else None
            error = "" if score is not None else f"{study.measure} is not a finite number at the end"
        except (OSError, ValueError) as damaged:
            error = str(damaged)
    return {"values": trial.tuned, "run": str(folder.relative_to(out)), "score": score, "error": error}
