"""The definition of a study: a checked dataclass, read from and written to a YAML file."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from fastclip.config.renamed import current_name
from fastclip.config.yaml_text import read_yaml
from fastclip.errors import OptionError, PathError
from fastclip.files import atomic_write
from fastclip.text import did_you_mean
from fastclip.tools.study.arms import Arm, grid, identity, name_arms, parse_number

STUDY_FILE = "study.yaml"
OWN = {
    "seed": "Use --seeds 0,1,2, or seeds: [0, 1, 2] in a file.",
    "out": "Use --out for the folder of the study.",
    "resume": "Unfinished runs always resume.",
    "config": "Use --config emoji, or config: emoji in a file.",
}
"""Options of `fastclip train` that the study sets for each run, and what to do instead."""
MEASURE = "mean_recall@1"
_EXAMPLES = {
    "set": "{epochs: 8}", "vary": "{algorithm: [openclip, fastclip-v3]}",
    "arms": "[{algorithm: mbcl, loss.tau: 0.1}]", "seeds": "[0, 1, 2]",
    "tune": "{optim.lr: [5e-4, 1e-3, 2e-3]}", "tune_set": "{epochs: 2}", "tune_seed": "1000",
    "validation": "{pairs: data/validation.tar}", "tasks": "data/emoji/tasks", "suite": "emoji",
    "baseline": "{algorithm: openclip}",
}  # fmt: skip
"""A value of each setting; all values of a setting have its type."""
_KINDS = {dict: "a mapping", list: "a list", int: "an integer", str: "a string"}


@dataclass
class Study:
    """A grid of runs: arms × seeds, after tuning if there is any."""

    config: str = ""
    """The recipe or YAML file that all runs start from."""
    set: dict[str, Any] = field(default_factory=dict)
    """Options of `fastclip train` for all runs, by dotted name."""
    vary: dict[str, list] = field(default_factory=dict)
    """Options and the values to compare; an arm is one value of each."""
    arms: list[dict[str, Any]] = field(default_factory=list)
    """Explicit arms, instead of or in addition to `vary`; each may have a `name` and its own `tune`."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Every arm is trained once with each seed."""
    tune: dict[str, list] = field(default_factory=dict)
    """Options to tune for each arm; an explicit arm may have its own grid of the same size."""
    tune_set: dict[str, Any] = field(default_factory=dict)
    """Options of tuning runs only, such as fewer epochs."""
    tune_seed: int = 1000
    """The seed of tuning runs; must not be one of `seeds`."""
    validation: dict[str, Any] = field(default_factory=dict)
    """What tuning is judged by: `pairs` used neither for training nor for testing, and the `measure`."""
    tasks: str | None = None
    """The tests: tasks that `fastclip eval` scores after each run. Tuning never sees them."""
    suite: str | None = None
    """datacomp, emoji or icons: score only its tasks, and report its means."""
    baseline: dict[str, Any] = field(default_factory=dict)
    """Arms with these values are baselines, for arms that otherwise have the same values."""

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in ("set", "tune_set", "baseline"):
            setattr(self, name, _numbers(name, getattr(self, name)))
        self.arms = [_explicit_arm(arm) for arm in self.arms]
        self.vary, self.tune = _lists("vary", self.vary), _lists("tune", self.tune)
        self._check_options()
        self._check_seeds()
        self._check_baseline()
        if self.tunes:
            self._check_tuning()
        for name in ("validation", "tune_set"):
            if (value := getattr(self, name)) and not self.tunes:
                advice = "Remove it, or add tune."
                raise OptionError(name, value, "has no effect without tune", advice=advice)
        if self.suite is not None:
            self._check_suite(self.suite)

    @property
    def tunes(self) -> bool:
        """Whether values are tuned before the arms are trained."""
        return any(arm.tune for arm in self.all_arms())

    @property
    def measure(self) -> str:
        """The metric that tuning maximises."""
        return self.validation.get("measure", MEASURE)

    def all_arms(self) -> list[Arm]:
        """The arms of `vary`, then the explicit ones; their names do not depend on each other."""
        varied = grid(self.vary) if self.vary or not self.arms else []
        explicit = [{key: own[key] for key in own if key not in ("name", "tune")} for own in self.arms]
        given: list[dict] = [*({} for _ in varied), *self.arms]
        named = zip((own.get("name") for own in given), [*varied, *explicit], strict=True)
        arms = name_arms(named, alone=Path(self.config).stem)
        for arm, own in zip(arms, given, strict=True):
            arm.tune = own.get("tune", self.tune)
        return arms

    def options(self, arm: Arm, seed: int) -> dict[str, object]:
        """The options of a run for `fastclip train`, except its folder."""
        return {"config": self.config, **self.set, **arm.values, **arm.tuned, "seed": seed}

    def _check_kinds(self) -> None:
        if not isinstance(self.config, str) or not self.config:
            advice = "Pass --config, or --study with the file of a study."
            raise OptionError(
                "config", self.config, "must be a recipe or a YAML file", example="emoji", advice=advice
            )
        for name, example in _EXAMPLES.items():
            value, kind = getattr(self, name), type(yaml.safe_load(example))
            if not isinstance(value, kind) and not (value is None and name in ("tasks", "suite")):
                raise OptionError(name, value, f"must be {_KINDS[kind]}", example=example)
        for arm in self.arms:
            if not isinstance(arm, dict):
                raise OptionError(
                    "arms", arm, "must be a mapping", example="{algorithm: mbcl, loss.tau: 0.1}"
                )

    def _check_options(self) -> None:
        settings = [(name, getattr(self, name)) for name in ("set", "vary", "tune", "tune_set")]
        settings += [("arms", arm) for arm in self.arms]
        settings += [("arms.tune", arm.get("tune", {})) for arm in self.arms]
        for name, options in settings:
            for option in (own for own in OWN if own in options):
                rule = "cannot be used: the study sets it for each run"
                raise OptionError(f"{name}.{option}", options[option], rule, advice=OWN[option])
        for explicit in self.arms:
            given = explicit.get("name")
            if given is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}", given):
                rule = "must name a folder: at most 80 letters, digits and . _ + -, a letter or digit first"
                raise OptionError("arms.name", given, rule, example="mbcl-warm")
        seen: dict[str, str] = {}  # names by values
        for arm in self.all_arms():
            key = identity(arm.values)
            if key in seen:
                rule, option = f"is the arm {seen[key]} again", "arms" if self.arms else "vary"
                raise OptionError(option, arm.values, rule, advice="Remove one of them.")
            seen[key] = arm.name
            for option in sorted(arm.values.keys() & arm.tune.keys()):
                rule = f"is varied as well, in the arm {arm.name}"
                raise OptionError(f"tune.{option}", arm.tune[option], rule, advice="Either vary or tune it.")
            for option in (*arm.values, *arm.tune):
                if option in self.tune_set:
                    rule = f"cannot be used: the arm {arm.name} sets or tunes it"
                    raise OptionError(f"tune_set.{option}", self.tune_set[option], rule)

    def _check_seeds(self) -> None:
        valid = self.seeds and all(type(seed) is int and seed >= 0 for seed in self.seeds)
        if not valid or len({*self.seeds}) < len(self.seeds):
            rule = "must be distinct non-negative integers"
            raise OptionError("seeds", self.seeds, rule, example="[0, 1, 2]")
        if self.tunes and self.tune_seed in self.seeds:
            rule = "must not be one of seeds, or the runs with it would have been tuned for it"
            raise OptionError("tune_seed", self.tune_seed, rule, example=max(self.seeds) + 1)

    def _check_baseline(self) -> None:
        arms = self.all_arms()
        if self.baseline and not any(self.baseline.items() <= arm.values.items() for arm in arms):
            there = ", ".join(
                dict.fromkeys(f"{key}={value}" for arm in arms for key, value in arm.values.items())
            )
            raise OptionError("baseline", self.baseline, "matches no arm", advice=f"Choose from: {there}.")

    def _check_tuning(self) -> None:
        arms = self.all_arms()
        trials = {arm.name: len(grid(arm.tune)) if arm.tune else 0 for arm in arms}
        for arm in arms:
            if trials[arm.name] != trials[arms[0].name]:
                counts = ", ".join(f"{name} {count}" for name, count in trials.items())
                rule = f"must give every arm the same number of trials, for a fair comparison ({counts})"
                raise OptionError("tune", arm.tune, rule)
        for key in sorted(self.validation.keys() - {"pairs", "measure"}):
            raise OptionError.unknown("validation", key, ("pairs", "measure"))
        if not (pairs := self.validation.get("pairs")):
            rule = "is required for tuning: pairs that are used neither for training nor for testing"
            advice = (
                "If you have none, hold out a shard:\n"
                "  set: {data.train: 'data/emoji/train/{00000..00006}.tar'}\n"
                "  validation: {pairs: data/emoji/train/00007.tar}\n"
                "or, on the command line: --data.train … --validation.pairs …"
            )
            raise OptionError("validation.pairs", pairs, rule, advice=advice)

    def _check_suite(self, suite: str) -> None:
        from fastclip.evaluation.suites import SUITES

        if suite not in SUITES:
            raise OptionError.unknown("suite", suite, SUITES)
        if self.tasks is None:
            rule = f"requires tasks, the folder of its tasks, e.g. `tasks: data/{suite}/tasks`"
            raise OptionError("suite", suite, rule)


class DifferentStudy(PathError):
    """A folder that holds another study; `differs` has the old and the new value of each setting."""

    def __init__(
        self, path: str | PathLike[str], problem: str, differs: dict[str, tuple[Any, Any]] | None = None
    ):
        super().__init__(path, problem)
        self.differs = differs or {}


def load_study(path: Path) -> Study:
    """Read and check the study in a YAML file; a ValueError says what is wrong with it."""
    return study_from(read_settings(path), str(path))


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a study's file, unchecked."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PathError(
            path, f"cannot be read: {error.strerror}. Pass the file or folder of a study."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PathError(path, f"is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise PathError(path, "is not a study; its lines must be settings such as `config: emoji`.")
    return content


def study_from(settings: dict[str, Any], file: str = "") -> Study:
    """The study with these settings; null means the default. Errors begin with the file's name."""
    names = [one.name for one in fields(Study)]
    try:
        for name, value in settings.items():
            if name not in names:
                choices = (
                    f"Settings: {', '.join(names)}. Options of `fastclip train` for all runs go under set."
                )
                advice = did_you_mean(name, names, 0.5).strip() or choices
                raise OptionError(str(name), value, "is not a setting of a study", advice=advice)
        return Study(**{name: value for name, value in settings.items() if value is not None})
    except OptionError as error:
        if file:
            error.args = (f"{file}: {error}",)
        raise


def current_options(setting: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of `fastclip train` by the names they have now."""
    found: dict[str, Any] = {}
    for option, value in options.items():
        name = current_name(str(option))
        if name in found:
            raise OptionError(f"{setting}.{option}", value, "is given twice, by its old and its current name")
        found[name] = value
    return found


def write_study(study: Study, path: Path) -> None:
    """Write a file that `load_study` reads as the same study."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, study_text(study))


def study_text(study: Study) -> str:
    """The study as YAML, without empty settings."""
    kept = {name: value for name, value in asdict(study).items() if value not in (None, {}, [])}
    if not study.tunes:
        kept.pop("tune_seed")
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def extend_study(old: Study, new: Study, folder: Path) -> Study:
    """The study of this folder with the seeds and arms of the new one added; nothing else may differ.

    Tasks may be added after training, and the baseline may change: no run depends on them.
    """
    differs = {}
    for name in ("config", "set", "tune", "tune_set", "tune_seed", "validation", "tasks", "suite"):
        there, here = getattr(old, name), getattr(new, name)
        added = name in ("tasks", "suite") and there is None
        if identity({name: there}) != identity({name: here}) and not added:
            differs[name] = there, here
    if differs:
        lines = [
            f"\n  {name}: {old or 'nothing'} there, {new or 'nothing'} here"
            for name, (old, new) in differs.items()
        ]
        problem = f"holds another study:{''.join(lines)}\nUse the same settings, or choose another --out."
        raise DifferentStudy(folder, problem, differs)
    known = {identity(arm.values): arm for arm in old.all_arms()}
    arms = {identity(arm.values): arm for arm in new.all_arms()}
    for key in known.keys() & arms.keys():
        _check_same_arm(known[key], arms[key], folder)
    seeds = [*old.seeds, *(seed for seed in new.seeds if seed not in old.seeds)]
    if known.keys() <= arms.keys():
        return replace(new, seeds=seeds)  # the grid stays as it is in the file
    explicit = [
        {**arm.values, "name": arm.name} | ({} if arm.tune == new.tune else {"tune": arm.tune})
        for arm in (known | {key: arm for key, arm in arms.items() if key not in known}).values()
    ]
    return replace(new, vary={}, arms=explicit, seeds=seeds)


def _check_same_arm(old: Arm, new: Arm, folder: Path) -> None:
    if old.name != new.name:
        problem = f"has the arm {old.name}, which is called {new.name} here. Keep its name."
        raise DifferentStudy(folder, problem, {"arms.name": (old.name, new.name)})
    if identity({**old.tune}) != identity({**new.tune}):
        problem = f"has the arm {old.name}, tuned over {old.tune}, not {new.tune}. Keep its tune."
        raise DifferentStudy(folder, problem, {"arms.tune": (old.tune, new.tune)})


def _explicit_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """An arm of the file, with strings such as 5e-4 as numbers."""
    found = _numbers("arms", arm)
    if "name" in arm:
        found["name"] = str(arm["name"])
    if "tune" in arm:
        if not isinstance(arm["tune"], dict) or not arm["tune"]:
            example = "{loss.tau: [0.05, 0.1]}"
            raise OptionError("arms.tune", arm["tune"], "must be a mapping of lists", example=example)
        found["tune"] = _lists("arms.tune", arm["tune"])
    return found


def _lists(setting: str, choices: dict[str, Any]) -> dict[str, list]:
    for option, values in choices.items():
        if not isinstance(values, list) or not values:
            raise OptionError(f"{setting}.{option}", values, "must be a list of values", example="[1, 2]")
    return {
        option: [parse_number(one) for one in values]
        for option, values in current_options(setting, choices).items()
    }


def _numbers(setting: str, options: dict[str, Any]) -> dict[str, Any]:
    return {option: parse_number(value) for option, value in current_options(setting, options).items()}
