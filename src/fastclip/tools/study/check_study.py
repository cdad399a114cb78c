"""What would fail hours later is told now: every arm's options, the data, and that tuning sees no test."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fastclip.config.parse import parse
from fastclip.config.resolved import Resolved, resolve
from fastclip.data.remote import is_remote
from fastclip.data.sources import find_files
from fastclip.evaluation.suites import find_suite
from fastclip.terminal import progress
from fastclip.tools.study.arms import Arm, grid
from fastclip.tools.study.definition import Study


def check_study(study: Study) -> dict[str, Resolved]:
    """The config of each arm by its name; ValueError says which arm cannot be trained, and why."""
    arms, configs = study.all_arms(), {}
    with progress("checking", "arms") as update:
        for number, arm in enumerate(arms, start=1):
            configs[arm.name] = _check_arm(study, arm)
            update(number, len(arms))
    sources = {json.dumps(config.data.train): config.data.train for config in configs.values()}
    trained = {path for source in sources.values() for path in _files("data.train", source)}
    tested = _tests(study, configs)
    if study.tunes:
        trained |= _files("tune_set: data.train", study.tune_set.get("data.train"))
        _check_split(study, trained, tested)
    return configs


def option_words(options: dict[str, object]) -> list[str]:
    """Options as words of a command line."""
    return [f"--{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in options.items()]


def _check_arm(study: Study, arm: Arm) -> Resolved:
    for tuned in grid(arm.tune):
        options = study.options(Arm(arm.name, arm.values, tuned=tuned), study.seeds[0])
        try:
            if study.tune_set:
                resolve(parse(option_words(options | study.tune_set)))
            config = resolve(parse(option_words(options)))
        except ValueError as error:
            with_tuned = "".join(f", {name}={value}" for name, value in tuned.items())
            raise ValueError(f"The arm {arm.name}{with_tuned} cannot be trained: {error}") from None
    if config.data.train is None:
        raise ValueError(
            f"The arm {arm.name} has no pairs: give data.train, as in --data.train 'shards/*.tar'."
        )
    return config


def _files(name: str, source: list[str] | str | None) -> set[str]:
    """Where a collection's files really are; remote ones are not looked for."""
    if source is None:
        return set()
    paths = [source] if isinstance(source, str) else source
    near = [path for path in paths if not is_remote(path)]
    try:
        found = find_files(near) if near else []
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return {os.path.realpath(file.path) for file in found} | {path for path in paths if path not in near}


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
        raise ValueError(f"tasks={study.tasks} holds none of the {len(rows)} tasks of {study.suite}.")
    return {os.path.realpath(study.tasks)}


def _check_split(study: Study, trained: set[str], tested: set[str]) -> None:
    """Validation pairs in the training or the test data would choose values by them."""
    pairs = study.validation["pairs"]
    leave_out = "leave it out of data.train, as in --data.train 'train/{00000..00006}.tar'"
    keep_back = "keep a shard of the training data back for it"
    for path in sorted(_files("validation.pairs", pairs)):
        for others, what, instead in ((trained, "trained on", leave_out), (tested, "a test", keep_back)):
            if any(path == other or path.startswith(other + os.sep) for other in others):
                raise ValueError(f"validation.pairs={pairs}: {path} is {what} as well; {instead}.")
