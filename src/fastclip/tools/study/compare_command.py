"""The command `fastclip compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Any

import yaml

from fastclip.config.renamed import current_name
from fastclip.config.yaml_text import read_yaml
from fastclip.errors import InputError, OptionError
from fastclip.terminal import console, say
from fastclip.tools.study.arms import parse_number
from fastclip.tools.study.definition import (
    STUDY_FILE,
    Study,
    current_options,
    extend_study,
    load_study,
    read_settings,
    study_from,
    study_text,
)


class RunsFailed(RuntimeError):
    """Some runs of the study failed; the others are done."""

    def __init__(self, runs: Sequence[str], logs: Path):
        self.runs, self.logs = runs, logs
        names = ", ".join(runs[:5]) + (" …" if len(runs) > 5 else "")
        super().__init__(
            f"{len(runs)} runs failed: {names}. Their logs are in {logs}. Run the same command to try them "
            "again; tuned values are kept."
        )


def compare(
    train_options: list[str],
    study: Path | None = None,
    config: Sequence[str] = (),
    vary: Sequence[str] = (),
    seeds: str | None = None,
    tune: Sequence[str] = (),
    tune_seed: int | None = None,
    validation__pairs: str | None = None,
    validation__measure: str | None = None,
    tasks: str | None = None,
    suite: str | None = None,
    baseline: Sequence[str] = (),
    out: Path | None = None,
    jobs: int | None = None,
    list: bool = False,
    json: bool = False,
    print_config: bool = False,
) -> None:
    """Train a grid of runs and compare them: several seeds per arm, the same budget for all.

      fastclip compare --config emoji --vary algorithm=openclip,fastclip-v3 --vary batch.size=32,64 \\
          --seeds 0,1,2 --epochs 8 --tasks data/emoji/tasks --suite emoji --out studies/batch
      fastclip compare --study studies/batch.yaml           the same from a YAML file; options override it
      fastclip compare --study studies/batch.yaml --list    show what is done and what failed; train nothing

    Options of `fastclip train` apply to all runs. Every run is an ordinary one, in OUT/runs. Finished runs
    are never repeated: run the same command again to continue after a stop, or with a longer --seeds or
    --vary to add runs. A failed run is reported and does not stop the others.

    Tuning tries the same grid of values for every arm and chooses by pairs that are used neither for training
    nor for testing:

      fastclip compare --config emoji --vary algorithm=openclip,fastclip-v3 --tune optim.lr=5e-4,1e-3,2e-3 \\
          --data.train 'data/emoji/train/{00000..00006}.tar' --validation.pairs data/emoji/train/00007.tar

    A study's file:

      config: emoji
      set: {epochs: 8, data.train: 'data/emoji/train/{00000..00006}.tar'}
      vary: {algorithm: [openclip, fastclip-v3], batch.size: [32, 64]}
      seeds: [0, 1, 2]
      tune: {optim.lr: [5e-4, 1e-3, 2e-3]}
      validation: {pairs: data/emoji/train/00007.tar, measure: mean_recall@1}
      tasks: data/emoji/tasks
      suite: emoji
      baseline: {algorithm: openclip}

    Exit codes: 0 all runs are done; 1 error, or some runs failed; 75 stopped by SIGTERM or Ctrl-C, run it
    again to continue.

    Args:
        study: a study's file, or the folder of a study.
        config: the recipe or YAML file that all runs start from.
        vary: OPTION=A,B, an option and the values to compare; repeat it for more options.
        seeds: train every arm with each of these seeds (default: 0,1,2).
        tune: OPTION=A,B, an option and the values to choose from for each arm; repeatable.
        tune_seed: the seed of tuning runs (default: 1000).
        validation__pairs: the pairs that tuning is judged on.
        validation__measure: the metric that tuning maximises (default: mean_recall@1).
        tasks: the tests, scored with `fastclip eval` after each run.
        suite: a suite of `fastclip eval`: score only its tasks, and report its means.
        baseline: OPTION=VALUE, the arms to compare others with.
        out: the study's folder (default: the name of its file, or studies/RECIPE).
        jobs: runs at the same time (default: one per GPU, or one per CPU core).
        list: show all runs and their state; train nothing.
        json: print JSON instead of tables.
        print_config: print the study as YAML, as a start for your own file.
    """
    if jobs is not None and jobs < 1:
        raise OptionError("jobs", jobs, "must be at least 1", example=2)
    given: dict[str, Any] = {"config": config, "vary": vary, "tune": tune, "baseline": baseline}
    given |= {"seeds": seeds, "tune_seed": tune_seed, "tasks": tasks, "suite": suite, "set": train_options}
    given["validation"] = {"pairs": _value(validation__pairs), "measure": validation__measure}
    file = study / STUDY_FILE if study is not None and study.is_dir() else study
    settings = _settings({} if file is None else read_settings(file), given)
    out = out or _folder(file, settings)
    plan = study_from(settings, str(study or ""))
    if print_config:
        print(study_text(plan), end="")
        return
    if (out / STUDY_FILE).is_file():
        plan = extend_study(load_study(out / STUDY_FILE), plan, out)
    _print_list(plan, out, json) if list else _run(plan, out, jobs, json)


def _run(study: Study, out: Path, at_once: int | None, as_json: bool) -> None:
    """Train the runs that are not done, and print the tables."""
    from fastclip.tools.study.run_study import run_study

    failed = run_study(study, out, at_once)
    from fastclip.tools.study.result_tables import print_study

    print_study(out, as_json)
    if not as_json:
        say(f"\nFor a page with curves: fastclip report {out}")
    if failed:
        raise RunsFailed(failed, out / "logs")


def _settings(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A file's settings, overridden by the command line."""
    if len(given["config"]) > 1:
        rule = "must be one recipe or file; use --vary to compare options"
        raise OptionError("config", " and ".join(given["config"]), rule)
    baseline = (_choices("baseline", argument) for argument in given["baseline"])
    replaced = {name: given[name] for name in ("tune_seed", "tasks", "suite")}
    replaced["config"] = given["config"][0] if given["config"] else None
    replaced["baseline"] = {option: values[0] for option, values in baseline}
    replaced["seeds"] = None if given["seeds"] is None else _choices("seeds", f"seeds={given['seeds']}")[1]
    added = {name: dict(_choices(name, argument) for argument in given[name]) for name in ("vary", "tune")}
    added["validation"] = {name: value for name, value in given["validation"].items() if value is not None}
    added["set"] = _train_options(given["set"])
    settings = settings | {name: value for name, value in replaced.items() if value not in (None, {})}
    for name, more in added.items():
        in_file = settings.get(name) or {}
        if more and isinstance(in_file, dict):  # any other type is reported with the study's other errors
            settings[name] = current_options(name, in_file) | more
    return settings


def _folder(file: Path | None, settings: dict[str, Any]) -> Path:
    if file is None:
        return Path("studies") / Path(str(settings.get("config", "study"))).stem
    return file.parent if file.name == STUDY_FILE else file.with_suffix("")


def _choices(name: str, argument: str) -> tuple[str, list]:
    """`batch.size=32,64` as an option and its values; a value may be a list: [0.9,0.98],[0.9,0.99]."""
    option, equals, text = argument.partition("=")
    if not option or not equals or not text:
        raise OptionError(name, argument, "must be OPTION=VALUES", example="algorithm=openclip,fastclip-v3")
    values = _value(f"[{text}]")
    return current_name(option), values if isinstance(values, list) else text.split(",")


def _value(text: str | None) -> Any:
    """A value as YAML reads it; invalid YAML and dates stay text."""
    if text is None:
        return None
    try:
        value = read_yaml(text)
        dumps(value)
    except (yaml.YAMLError, TypeError):
        return text
    return parse_number(value)


def _train_options(arguments: list[str]) -> dict[str, Any]:
    """`--epochs 8 --loss.tau=0.1` as a mapping."""
    options: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, text = argument.partition("=")
        if not name.startswith("--") or name == "--":
            raise InputError(
                argument,
                "does not belong to an option. Separate several values with commas and no spaces: "
                "--vary batch.size=32,64 --seeds 0,1,2.",
            )
        name, text = name[2:], text if equals else next(rest, "")
        if not text or (not equals and text.startswith("--")):
            raise OptionError(name, "", "must have a value")
        options[current_name(name)] = _value(text)
    return options


def _print_list(study: Study, out: Path, as_json: bool) -> None:
    from fastclip.tools.study.check_study import check_study
    from fastclip.tools.study.study_state import state_of

    runs = state_of(study, out).planned
    if as_json:
        names = ("name", "values", "state", "error", "folder")
        print(dumps([{name: getattr(run, name) for name in names} for run in runs], indent=2, default=str))
        return
    from fastclip.tools.study.rendering import Grid, as_table

    rows = [[r.name, r.state, " ".join(f"{name}={value}" for name, value in r.values.items())] for r in runs]
    console().print(as_table(Grid("", "", ["run", "state", "options"], 3, rows)))
    for run in runs:
        if run.error:
            say(f"\n{run.name}: {run.error}")
    count = Counter(run.state for run in runs)
    counts = [f"{count[state]} {state}" for state in ("done", "failed", "unfinished") if count[state]]
    say(f"\n{len(runs)} runs: {', '.join(counts)}")
    try:
        check_study(study)
    except ValueError as error:  # a finished study can be listed without its data
        say(f"Cannot be trained: {error}")
