"""What a study is: a documented, checked dataclass that is read from a YAML file and written to one."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from fastclip.files import atomic_write
from fastclip.text import did_you_mean
from fastclip.tools.study.arms import Arm, grid, identity, name_arms, number_or_as_it_is

STUDY_FILE = "study.yaml"
OWN = {
    "seed": "seeds: [0, 1, 2]",
    "out": "--out, the folder of the study",
    "resume": "nothing: runs that are not finished always go on",
    "config": "config: emoji",
}
"""Options of `fastclip train` that belong to the study itself, and what to write instead."""
MEASURE = "mean_recall@1"
_EXAMPLES = {
    "set": "{epochs: 8}", "vary": "{algorithm: [openclip, fastclip-v3]}",
    "arms": "[{algorithm: mbcl, loss.tau: 0.1}]", "seeds": "[0, 1, 2]",
    "tune": "{optim.lr: [5e-4, 1e-3, 2e-3]}", "tune_set": "{epochs: 2}", "tune_seed": "1000",
    "validation": "{pairs: data/validation.tar}", "tasks": "data/emoji/tasks", "suite": "emoji",
    "baseline": "{algorithm: openclip}",
}  # fmt: skip
"""A value of each setting, which has the kind that all values of it have."""


@dataclass
class Study:
    """A grid of runs: arms × seeds, after tuning if there is any."""

    config: str = ""
    """The recipe, or the YAML file, that all runs start from."""
    set: dict[str, Any] = field(default_factory=dict)
    """Options of `fastclip train` for all runs, by their dotted names."""
    vary: dict[str, list] = field(default_factory=dict)
    """Options and the values to compare; an arm is one choice of each."""
    arms: list[dict[str, Any]] = field(default_factory=list)
    """Arms written out, instead of or besides `vary`; `name` gives one a name of its own, `tune` a grid."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Every arm is trained once with each."""
    tune: dict[str, list] = field(default_factory=dict)
    """Options whose values are chosen for each arm; an arm written out may have its own grid, as large."""
    tune_set: dict[str, Any] = field(default_factory=dict)
    """Options of tuning's runs alone, such as fewer epochs where a whole run takes too long."""
    tune_seed: int = 1000
    """The seed of tuning's runs, which is none of the seeds that count."""
    validation: dict[str, Any] = field(default_factory=dict)
    """What tuning goes by: `pairs`, which are neither trained on nor tested, and the `measure`."""
    tasks: str | None = None
    """The tests: tasks that `fastclip eval` scores after each run. Tuning never sees them."""
    suite: str | None = None
    """datacomp, emoji or icons: only its tasks, and its means."""
    baseline: dict[str, Any] = field(default_factory=dict)
    """Which arms others are compared with, those that agree with them in all else that varies."""

    def __post_init__(self) -> None:
        self._check_kinds()
        self.set, self.tune_set, self.baseline = map(_numbers, (self.set, self.tune_set, self.baseline))
        self.arms = [_written_arm(arm) for arm in self.arms]
        self.vary, self.tune = _lists("vary", self.vary), _lists("tune", self.tune)
        self._check_options()
        self._check_seeds()
        self._check_baseline()
        if self.tunes:
            self._check_tuning()
        for name in ("validation", "tune_set"):
            if getattr(self, name) and not self.tunes:
                raise ValueError(f"{name} has no effect without tune. Leave it out, or tune something.")
        if self.suite is not None:
            from fastclip.evaluation.suites import find_suite

            find_suite(self.suite)  # says which there are
            if self.tasks is None:
                example = f"`tasks: data/{self.suite}/tasks`"
                raise ValueError(f"suite={self.suite} needs tasks: where they are, as in {example}.")

    @property
    def tunes(self) -> bool:
        """Whether values are chosen before the arms' runs."""
        return any(arm.tune for arm in self.all_arms())

    @property
    def measure(self) -> str:
        """What tuning goes by; the highest wins."""
        return self.validation.get("measure", MEASURE)

    def all_arms(self) -> list[Arm]:
        """Those of `vary`, then those written out, with names that are theirs whatever else there is."""
        varied = grid(self.vary) if self.vary or not self.arms else []
        written = [{key: own[key] for key in own if key not in ("name", "tune")} for own in self.arms]
        given: list[dict] = [*({} for _ in varied), *self.arms]
        named = zip((own.get("name") for own in given), [*varied, *written], strict=True)
        arms = name_arms(named, alone=Path(self.config).stem)
        for arm, own in zip(arms, given, strict=True):
            arm.tune = own.get("tune", self.tune)
        return arms

    def options(self, arm: Arm, seed: int) -> dict[str, object]:
        """The options of a run, as `fastclip train` takes them, but for its folder."""
        return {"config": self.config, **self.set, **arm.values, **arm.tuned, "seed": seed}

    def _check_kinds(self) -> None:
        if not isinstance(self.config, str) or not self.config:
            raise ValueError("config is missing: name the recipe or YAML file, as in `config: emoji`.")
        for name, example in _EXAMPLES.items():
            value, optional = getattr(self, name), name in ("tasks", "suite")
            if not isinstance(value, type(yaml.safe_load(example))) and not (value is None and optional):
                raise ValueError(f"{name}={value!r} is not possible; try {name}: {example}.")
        for arm in self.arms:
            if not isinstance(arm, dict):
                raise ValueError(f"arms: {arm!r} is no arm; try {{algorithm: mbcl, loss.tau: 0.1}}.")

    def _check_options(self) -> None:
        named = [(name, one) for name in ("set", "vary", "tune", "tune_set") for one in getattr(self, name)]
        named += [("arms", one) for arm in self.arms for one in arm]
        named += [("arms: tune", one) for arm in self.arms for one in arm.get("tune", {})]
        for name, option in named:
            if option in OWN:
                raise ValueError(f"{name}: {option} belongs to the study itself. Write {OWN[option]}.")
        for written in self.arms:
            given = written.get("name")
            if given is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}", given):
                raise ValueError(f"arms: the name {given!r} cannot name a folder; try one such as mbcl-warm.")
        seen: dict[str, str] = {}
        for arm in self.all_arms():
            key = identity(arm.values)
            if key in seen:
                raise ValueError(f"The arm {arm.name} is there twice ({seen[key]}): leave one out.")
            seen[key] = arm.name
            twice = sorted(arm.values.keys() & arm.tune.keys())
            if twice:
                raise ValueError(f"{twice[0]} is varied and tuned: choose one of the two.")
            for option in (*arm.values, *arm.tune):
                if option in self.tune_set:
                    raise ValueError(
                        f"tune_set: {option} makes the arm {arm.name}, and stays as it is there."
                    )

    def _check_seeds(self) -> None:
        good = self.seeds and all(type(seed) is int and seed >= 0 for seed in self.seeds)
        if not good or len({*self.seeds}) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds} is not possible: different whole numbers; try [0, 1, 2].")
        if self.tunes and self.tune_seed in self.seeds:
            raise ValueError(
                f"tune_seed={self.tune_seed} is one of the seeds: what was chosen with a seed is too good "
                "with it. Try tune_seed: 1000."
            )

    def _check_baseline(self) -> None:
        arms = self.all_arms()
        if self.baseline and not any(self.baseline.items() <= arm.values.items() for arm in arms):
            there = ", ".join(f"{key}={value}" for arm in arms for key, value in arm.values.items())
            raise ValueError(f"baseline={self.baseline} is none of the arms; they have {there}.")

    def _check_tuning(self) -> None:
        tries = {arm.name: len(grid(arm.tune)) if arm.tune else 0 for arm in self.all_arms()}
        if len({*tries.values()}) > 1:
            told = ", ".join(f"{name} {count}" for name, count in tries.items())
            raise ValueError(
                f"tune: every arm needs the same number of tries, for a fair comparison: {told}."
            )
        unknown = sorted(self.validation.keys() - {"pairs", "measure"})
        if unknown:
            raise ValueError(f"validation has no {unknown[0]!r}, only pairs and measure.")
        if not self.validation.get("pairs"):
            raise ValueError(
                "tune needs validation.pairs: pairs that are neither trained on nor tested. If there are "
                "none, keep a shard back:\n"
                "  set: {data.train: 'data/emoji/train/{00000..00006}.tar'}\n"
                "  validation: {pairs: data/emoji/train/00007.tar}\n"
                "or --data.train … --validation.pairs … on the command line."
            )


def load_study(path: Path) -> Study:
    """The study that a YAML file holds; ValueError says what is wrong with it, and where."""
    return study_from(read_settings(path), str(path))


def read_settings(path: Path) -> dict[str, Any]:
    """What a study's file says, not yet checked."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"There is no study in {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no study; its lines should read like `config: emoji`.")
    return content


def study_from(settings: dict[str, Any], where: str) -> Study:
    """A study of these settings; what is null counts as left out."""
    names = [one.name for one in fields(Study)]
    for name in settings:
        if name not in names:
            options = "Options of `fastclip train` for all runs go under `set`."
            hint = did_you_mean(name, names, 0.5) or f" There are {', '.join(names)}. {options}"
            raise ValueError(f"{where}: a study has no {name!r}.{hint}")
    try:
        return Study(**{name: value for name, value in settings.items() if value is not None})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def write_study(study: Study, path: Path) -> None:
    """A file from which the same study is read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, study_text(study))


def study_text(study: Study) -> str:
    """The study as YAML, without what was left out."""
    kept = {name: value for name, value in asdict(study).items() if value not in (None, {}, [])}
    if not study.tunes:
        kept.pop("tune_seed")
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def grown(old: Study, new: Study) -> Study:
    """The old study with the new one's seeds and arms added; ValueError names what else differs.

    Tasks may come later than the runs, and the baseline may change: no run depends on them.
    """
    differ = ""
    for name in ("config", "set", "tune", "tune_set", "tune_seed", "validation", "tasks", "suite"):
        there, here = getattr(old, name), getattr(new, name)
        later = name in ("tasks", "suite") and there is None
        if identity({name: there}) != identity({name: here}) and not later:
            differ += f"\n  {name}: {there or 'nothing'} there, {here or 'nothing'} here"
    if differ:
        raise ValueError(f"it holds another study:{differ}\nGive the same settings, or another --out.")
    known = {identity(arm.values): arm for arm in old.all_arms()}
    arms = {identity(arm.values): arm for arm in new.all_arms()}
    for key in known.keys() & arms.keys():
        if known[key].name != arms[key].name:
            raise ValueError(f"its arm {known[key].name} is called {arms[key].name} here: keep its name.")
        if identity({**known[key].tune}) != identity({**arms[key].tune}):
            raise ValueError(f"its arm {known[key].name} chose from {known[key].tune}: keep that.")
    seeds = [*old.seeds, *(seed for seed in new.seeds if seed not in old.seeds)]
    if known.keys() <= arms.keys():
        return replace(new, seeds=seeds)  # the grid stays as the file has it
    written = [
        {**arm.values, "name": arm.name} | ({} if arm.tune == new.tune else {"tune": arm.tune})
        for arm in (known | {key: arm for key, arm in arms.items() if key not in known}).values()
    ]
    return replace(new, vary={}, arms=written, seeds=seeds)


def _written_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """An arm of the file, with numbers for what reads like one."""
    found = _numbers(arm)
    if "name" in arm:
        found["name"] = str(arm["name"])
    if "tune" in arm:
        if not isinstance(arm["tune"], dict) or not arm["tune"]:
            raise ValueError(
                f"arms: tune={arm['tune']!r} is not possible; try tune: {{loss.tau: [0.05, 0.1]}}."
            )
        found["tune"] = _lists("tune", arm["tune"])
    return found


def _lists(name: str, choices: dict[str, Any]) -> dict[str, list]:
    for option, values in choices.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name}: {option} needs a list of values, as in {name}: {{{option}: [1, 2]}}.")
    return {str(option): [number_or_as_it_is(one) for one in values] for option, values in choices.items()}


def _numbers(options: dict[str, Any]) -> dict[str, Any]:
    return {str(option): number_or_as_it_is(value) for option, value in options.items()}
