"""Renamed options of `fastclip train`: old names keep working in recipes, commands and run folders."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from fastclip.errors import OptionError

log = logging.getLogger(__name__)

RENAMED = {
    "log.every": "log.every_steps",
    "evaluate.every": "evaluate.every_epochs",
    "checkpoint.minutes": "checkpoint.every_minutes",
    "checkpoint.steps": "checkpoint.every_steps",
}


def current_name(option: str, renamed: Mapping[str, str] = RENAMED) -> str:
    """The name that an option has now; an old one is reported once."""
    new = renamed.get(option, option)
    if new != option:
        report_new_name(option, new)
    return new


@cache
def report_new_name(old: str, new: str) -> None:
    """Log one line, and only once in a process."""
    log.warning("%s is now called %s. The old name still works.", old, new)


def with_current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as YAML has it, with sections, where every option has its current name."""
    found = dict(config)
    for old in RENAMED:
        section, _, name = old.partition(".")
        values = found.get(section)
        if isinstance(values, Mapping) and name in values:
            _, _, new = current_name(old).partition(".")
            if new in values:
                raise OptionError(f"{section}.{name}", values[name], f"is given as {section}.{new} too")
            found[section] = {new if key == name else key: value for key, value in values.items()}
    return found
