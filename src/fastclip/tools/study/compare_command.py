"""The verb `fastclip compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Any

import yaml

from fastclip.terminal import console
from fastclip.tools.study.arms import number_or_as_it_is
from fastclip.tools.study.definition import (
    STUDY_FILE,
    Study,
    grown,
    load_study,
    read_settings,
    study_from,
    study_text,
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
    """Train a grid of runs and compare them: each arm with several seeds, the same budget for all.

      fastclip compare --config emoji --vary algorithm=openclip,fastclip-v3 --vary batch.size=32,64 \\
          --seeds 0,1,2 --epochs 8 --tasks data/emoji/tasks --suite emoji --out studies/batch
      fastclip compare --study studies/batch.yaml           the same as a YAML file; options win over it
      fastclip compare --study studies/batch.yaml --list    what is done, what failed; trains nothing

    Any option of `fastclip train` may be given, for all runs. Every run is an ordinary one, in OUT/runs;
    those that are finished are never trained again, so the same command goes on after a stop, and a longer
    --seeds or --vary adds runs. A failed run is told and does not stop the others.

    Tuning gives every arm the same grid of values and chooses by pairs that are neither trained on nor
    tested:

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

    Exit codes: 0 all runs are done; 1 some failed, or a mistake; 75 stopped by SIGTERM or Ctrl-C: call again.

    Args:
        study: a study's file, or the folder of a study.
        config: the recipe or YAML file that all runs start from.
        vary: OPTION=A,B, an option and the values to compare; give it again for more options.
        seeds: every arm is trained with each; 0,1,2 if left out.
        tune: OPTION=A,B, an option and the values to choose from for each arm; may be given again.
        tune_seed: the seed of tuning's runs; 1000 if left out.
        validation__pairs: pairs that tuning is judged on.
        validation__measure: by what; mean_recall@1 if left out.
        tasks: the tests, scored with `fastclip eval` after each run.
        suite: one of fastclip eval's suites: its tasks, and its means.
        baseline: OPTION=VALUE, arms to compare others with.
        out: the study's folder; the name of its file, or studies/RECIPE, if left out.
        jobs: runs at once; one a GPU, or one a CPU core, if left out.
        list: show arms and runs, what is done and what failed; train nothing.
        json: print JSON instead of tables.
        print_config: print the study as YAML, to start a file of one's own.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs {jobs} must be at least 1; try 2.")
    given: dict[str, Any] = {"config": config, "vary": vary, "tune": tune, "baseline": baseline}
    given |= {"seeds": seeds, "tune_seed": tune_seed, "tasks": tasks, "suite": suite, "set": train_options}
    given["validation"] = {"pairs": _value(validation__pairs), "measure": validation__measure}
    file = study / STUDY_FILE if study is not None and study.is_dir() else study
    settings = _settings({} if file is None else read_settings(file), given)
    out = out or _folder(file, settings)
    asked = study_from(settings, str(study or "fastclip compare"))
    if print_config:
        print(study_text(asked), end="")
        return
    if (out / STUDY_FILE).is_file():
        try:
            asked = grown(load_study(out / STUDY_FILE), asked)
        except ValueError as error:
            raise ValueError(f"{out}: {error}") from None
    _print_list(asked, out, json) if list else _run(asked, out, jobs, json)


def _run(study: Study, out: Path, at_once: int | None, as_json: bool) -> None:
    """Train what is not trained yet, and print the tables."""
    from fastclip.tools.study.run_study import run_study

    failed = run_study(study, out, at_once)
    from fastclip.tools.study.result_tables import print_study

    print_study(out, as_json)
    if not as_json:
        print(f"\nA page with curves: fastclip report {out}")
    if failed:
        raise RuntimeError(
            f"{len(failed)} runs failed: {', '.join(failed[:5])}{' …' if len(failed) > 5 else ''}. What they "
            f"said is in {out / 'logs'}. The same command tries them again; what tuning chose stays chosen."
        )


def _settings(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A file's settings with the options laid over them."""
    if len(given["config"]) > 1:
        raise ValueError(
            f"--config {' and '.join(given['config'])}: a study starts from one. Vary options of it."
        )
    baseline = (_choices("baseline", word) for word in given["baseline"])
    whole = {name: given[name] for name in ("tune_seed", "tasks", "suite")}
    whole["config"] = given["config"][0] if given["config"] else None
    whole["baseline"] = {option: values[0] for option, values in baseline}
    whole["seeds"] = None if given["seeds"] is None else _choices("seeds", f"seeds={given['seeds']}")[1]
    added = {name: dict(_choices(name, word) for word in given[name]) for name in ("vary", "tune")}
    added["validation"] = {name: value for name, value in given["validation"].items() if value is not None}
    added["set"] = _train_options(given["set"])
    settings = settings | {name: value for name, value in whole.items() if value not in (None, {})}
    return settings | {name: (settings.get(name) or {}) | more for name, more in added.items() if more}


def _folder(file: Path | None, settings: dict[str, Any]) -> Path:
    if file is None:
        return Path("studies") / Path(str(settings.get("config", "study"))).stem
    return file.parent if file.name == STUDY_FILE else file.with_suffix("")


def _choices(name: str, word: str) -> tuple[str, list]:
    """`batch.size=32,64` as an option and its values; a value may be a list: [0.9,0.98],[0.9,0.99]."""
    option, equals, text = word.partition("=")
    if not option or not equals or not text:
        raise ValueError(f"--{name} {word} names no values; try --{name} algorithm=openclip,fastclip-v3.")
    values = _value(f"[{text}]")
    return option, values if isinstance(values, list) else text.split(",")


def _value(text: str | None) -> Any:
    """What YAML makes of a word; what is no YAML, or would become a date, is text."""
    if text is None:
        return None
    try:
        value = yaml.safe_load(text)
        dumps(value)
    except (yaml.YAMLError, TypeError):
        return text
    return number_or_as_it_is(value)


def _train_options(words: list[str]) -> dict[str, Any]:
    """`--epochs 8 --loss.tau=0.1`, by their names."""
    options: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=")
        if not name.startswith("--") or name == "--":
            raise ValueError(
                f"{word!r} belongs to no option. Several values have commas and no blanks between: "
                "--vary batch.size=32,64 --seeds 0,1,2."
            )
        text = text if equals else next(rest, "")
        if not text or (not equals and text.startswith("--")):
            raise ValueError(f"{name} needs a value.")
        options[name[2:]] = _value(text)
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
            print(f"\n{run.name}: {run.error}")
    count = Counter(run.state for run in runs)
    told = [f"{count[state]} {state}" for state in ("done", "failed", "unfinished") if count[state]]
    print(f"\n{len(runs)} runs: {', '.join(told)}")
    try:
        check_study(study)
    except ValueError as error:  # a finished study may be listed where its data are not
        print(f"Not ready to be trained: {error}")
