"""The verb `fastclip compare`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from fastclip.options import VerbParser
from fastclip.tools.study.arms import number_or_as_it_is
from fastclip.tools.study.plan import (
    STUDY_FILE,
    Study,
    grown,
    load_study,
    read_settings,
    study_from,
    study_text,
)

_DESCRIPTION = """\
Train a grid of runs and compare them: each arm with several seeds, the same budget for all.

  fastclip compare --config emoji --vary algorithm=openclip,fastclip-v3 --vary batch.size=32,64 \\
      --seeds 0,1,2 --epochs 8 --tasks data/emoji/tasks --suite emoji --out studies/batch
  fastclip compare --study studies/batch.yaml           the same as a YAML file; options win over it
  fastclip compare --study studies/batch.yaml --list    what is done, what failed; trains nothing

Any option of `fastclip train` may be given, for all runs. Every run is an ordinary one, in OUT/runs; those
that are finished are never trained again, so the same command goes on after a stop, and a longer --seeds or
--vary adds runs. A failed run is told and does not stop the others.

Tuning gives every arm the same grid of values and chooses by pairs that are neither trained on nor tested:

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

Exit codes: 0 all runs are done; 1 some failed, or a mistake; 75 stopped by SIGTERM or Ctrl-C: call again."""


def compare(words: list[str]) -> None:
    """Read the options, train what is not trained yet, and print the tables."""
    given, rest = _parser().parse_known_args(words)
    settings, out = _settings(given, rest)
    study = study_from(settings, given.study or "fastclip compare")
    if given.print_config:
        print(study_text(study), end="")
        return
    if (out / STUDY_FILE).is_file():
        try:
            study = grown(load_study(out / STUDY_FILE), study)
        except ValueError as error:
            raise ValueError(f"{out}: {error}") from None
    if given.list:
        _print_list(study, out, given.json)
        return
    from fastclip.tools.study.run import run_study

    failed = run_study(study, out, given.jobs)
    from fastclip.tools.study.tables import print_study

    print_study(out, given.json)
    if not given.json:
        print(f"\nA page with curves: fastclip report {out}")
    if failed:
        raise RuntimeError(
            f"{len(failed)} runs failed: {', '.join(failed[:5])}{' …' if len(failed) > 5 else ''}. What they "
            f"said is in {out / 'logs'}. The same command tries them again; what tuning chose stays chosen."
        )


def _parser() -> ArgumentParser:
    parser = VerbParser(
        "compare", "--config RECIPE --vary OPTION=VALUE,VALUE … [--OPTION VALUE …]", _DESCRIPTION
    )
    add = parser.add_argument
    add("--study", metavar="FILE", help="a study's file, or the folder of a study")
    add("--config", action="append", help="the recipe or YAML file that all runs start from")
    vary = "an option and the values to compare; give it again for more options"
    add("--vary", metavar="OPTION=A,B", action="append", default=[], help=vary)
    add("--seeds", metavar="0,1,2", help="every arm is trained with each (default: 0,1,2)")
    tune = "an option and the values to choose from for each arm; may be given again"
    add("--tune", metavar="OPTION=A,B", action="append", default=[], help=tune)
    add("--tune_seed", type=int, metavar="1000", help="the seed of tuning's runs (default: 1000)")
    add("--validation.pairs", dest="pairs", metavar="PAIRS", help="pairs that tuning is judged on")
    add("--validation.measure", dest="measure", metavar="NAME", help="by what (default: mean_recall@1)")
    add("--tasks", metavar="FOLDER", help="the tests, scored with `fastclip eval` after each run")
    add("--suite", help="datacomp, emoji or icons: its tasks, and its means")
    add("--baseline", metavar="OPTION=VALUE", action="append", default=[], help="arms to compare others with")
    add("--out", help="the study's folder (default: the name of its file, or studies/RECIPE)")
    add("--jobs", type=int, metavar="N", help="runs at once (default: one a GPU, or one a CPU core)")
    add("--list", action="store_true", help="show arms and runs, what is done and what failed; train nothing")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--print_config", action="store_true", help="print the study as YAML, to start a file of one's own")
    return parser


def _settings(given: Namespace, rest: list[str]) -> tuple[dict[str, Any], Path]:
    """The settings of the file with the options laid over them, and the study's folder."""
    file = None if given.study is None else Path(given.study)
    if file is not None and file.is_dir():
        file = file / STUDY_FILE
    settings = {} if file is None else read_settings(file)
    if given.config is not None and len(given.config) > 1:
        raise ValueError(
            f"--config {' and '.join(given.config)}: a study starts from one. Vary options of it."
        )
    settings |= {} if given.config is None else {"config": given.config[0]}
    for name in ("tune_seed", "tasks", "suite"):
        if getattr(given, name) is not None:
            settings[name] = getattr(given, name)
    for name in ("vary", "tune"):
        choices = dict(_choices(name, word) for word in getattr(given, name))
        if choices:
            settings[name] = (settings.get(name) or {}) | choices
    if given.seeds is not None:
        settings["seeds"] = _choices("seeds", f"seeds={given.seeds}")[1]
    baseline = {option: values[0] for option, values in (_choices("baseline", b) for b in given.baseline)}
    if baseline:
        settings["baseline"] = baseline
    validation = {"pairs": _value(given.pairs), "measure": given.measure}
    if validation := {name: value for name, value in validation.items() if value is not None}:
        settings["validation"] = (settings.get("validation") or {}) | validation
    if options := _train_options(rest):
        settings["set"] = (settings.get("set") or {}) | options
    if given.jobs is not None and given.jobs < 1:
        raise ValueError(f"--jobs {given.jobs} must be at least 1; try 2.")
    return settings, _folder(given, file, settings)


def _folder(given: Namespace, file: Path | None, settings: dict[str, Any]) -> Path:
    if given.out is not None:
        return Path(given.out)
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
        json.dumps(value)
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
    from fastclip.tools.study.checks import check_study
    from fastclip.tools.study.study import state_of

    runs = state_of(study, out).planned
    if as_json:
        names = ("name", "values", "state", "error", "folder")
        shown = [{name: getattr(run, name) for name in names} for run in runs]
        print(json.dumps(shown, indent=2, default=str))
        return
    from rich.console import Console

    from fastclip.tools.study.rendering import Grid, as_table

    rows = [[r.name, r.state, " ".join(f"{name}={value}" for name, value in r.values.items())] for r in runs]
    table = as_table(Grid("", "", ["run", "state", "options"], 3, rows))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
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
