"""Checks before anything is trained: every arm's options, the data, and that tuning sees no test."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fastclip.config.collections import how_to_get
from fastclip.config.parse import parse
from fastclip.config.resolved import Resolved, resolve
from fastclip.data.remote import is_remote
from fastclip.data.sources import find_files
from fastclip.errors import OptionError
from fastclip.evaluation.suites import find_suite
from fastclip.terminal import progress
from fastclip.tools.study.arms import Arm, grid, shown_options
from fastclip.tools.study.definition import Study


class ArmError(ValueError):
    """An arm that cannot be trained; the cause is the error of `fastclip train`.

    Args:
        arm: its name.
        tuned: the values of the trial.
        problem: why.
    """

    def __init__(self, arm: str, tuned: dict[str, object], problem: str):
        self.arm, self.tuned = arm, tuned
        trial = f" with {shown_options(tuned)}" if tuned else ""
        super().__init__(f"The arm {arm}{trial} cannot be trained: {problem}")


def check_study(study: Study) -> dict[str, Resolved]:
    """The config of each arm by its name; a ValueError says what cannot be trained, and why."""
    arms, configs = study.all_arms(), {}
    with progress("checking", "arms") as update:
        for number, arm in enumerate(arms, start=1):
            configs[arm.name] = _check_arm(study, arm)
            update(number, len(arms))
    sources = {json.dumps(config.data.train): config.data.train for config in configs.values()}
    trained = {path for source in sources.values() for path in _files("data.train", source)}
    tested = _tests(study, configs)
    if study.tunes:
        trained |= _files("tune_set.data.train", study.tune_set.get("data.train"))
        _check_split(study, trained, tested)
    return configs


def option_arguments(options: dict[str, object]) -> list[str]:
    """Options as arguments of a command line."""
    return [f"--{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in options.items()]


def _check_arm(study: Study, arm: Arm) -> Resolved:
    for tuned in grid(arm.tune):
        options = study.options(Arm(arm.name, arm.values, tuned=tuned), study.seeds[0])
        try:
            if study.tune_set:
                resolve(parse(option_arguments(options | study.tune_set)))
            config = resolve(parse(option_arguments(options)))
            if config.data.train is None:
                rule = "must be the pairs to train on"
                raise OptionError("data.train", None, rule, example="'shards/*.tar'")
        except ValueError as error:
            raise ArmError(arm.name, tuned, str(error)) from error
    return config


def _files(option: str, source: list[str] | str | None) -> set[str]:
    """The real paths of a collection's files; remote paths are not checked."""
    if source is None:
        return set()
    paths = [source] if isinstance(source, str) else source
    local = [path for path in paths if not is_remote(path)]
    try:
        found = find_files(local) if local else []
    except ValueError as error:
        rule = f"cannot be used: {str(error).rstrip('.')}"
        raise OptionError(option, source, rule, advice=how_to_get(paths).strip()) from error
    return {os.path.realpath(file.path) for file in found} | {path for path in paths if path not in local}


def _tests(study: Study, configs: dict[str, Resolved]) -> set[str]:
    """The folder of the tasks; without tasks, what is evaluated during training is the test."""
    pairs = {json.dumps(config.evaluate.pairs): config.evaluate.pairs for config in configs.values()}
    evaluated = {path for source in pairs.values() for path in _files("evaluate.pairs", source)}
    if study.tasks is None:
        own = (config.evaluate.tasks for config in configs.values())
        return evaluated | {os.path.realpath(tasks) for tasks in own if tasks}
    folder = Path(study.tasks).expanduser()
    if not folder.is_dir():
        return _files("tasks", study.tasks)
    rows = find_suite(study.suite).rows if study.suite is not None else ()
    if rows and not any((folder / row.folder).is_dir() for row in rows):
        rule = f"must have at least one of the {len(rows)} tasks of {study.suite}"
        raise OptionError("tasks", study.tasks, rule, example=folder / rows[0].folder)
    return {os.path.realpath(study.tasks)}


def _check_split(study: Study, trained: set[str], tested: set[str]) -> None:
    """Validation pairs must not be in the training or test data, or tuning would overfit to them."""
    pairs = study.validation["pairs"]
    exclude = "Exclude it from data.train, e.g. --data.train 'train/{00000..00006}.tar'."
    hold_out = "Hold out a shard of the training data instead."
    for path in sorted(_files("validation.pairs", pairs)):
        for others, use, advice in ((trained, "training", exclude), (tested, "testing", hold_out)):
            if any(path == other or path.startswith(other + os.sep) for other in others):
                rule = f"must not be used for training or testing; {path} is used for {use}"
                raise OptionError("validation.pairs", pairs, rule, advice=advice)
