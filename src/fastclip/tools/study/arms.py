"""The arms of a study: combinations of options to compare, each with a name that is safe for a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from hashlib import blake2b
from itertools import product
from typing import get_type_hints

SHORT = {"algorithm": "", "optimizer": "", "loss.gamma_schedule": "",
         "batch.size": "b", "batch.micro": "micro",
         # as these options were once called: existing studies have folders with these names
         "log.every_steps": "log.every", "evaluate.every_epochs": "evaluate.every",
         "checkpoint.every_minutes": "minutes", "checkpoint.every_steps": "steps"}  # fmt: skip
"""The prefix of a value in an arm's name, where it is not the last part of the option's name."""
LONGEST = 80  # characters of a name; a folder's may have 255
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass
class Arm:
    """One combination of the varied options; its runs differ only in the seed."""

    name: str
    """Such as `openclip-b32`; it does not depend on the other arms."""
    values: dict[str, object]
    """The options of this arm by dotted name, with numbers as numbers."""
    tune: dict[str, list] = field(default_factory=dict)
    """Options to tune and their candidate values; empty without tuning."""
    tuned: dict[str, object] = field(default_factory=dict)
    """The values that tuning chose; empty without tuning and until it has finished."""


def grid(choices: dict[str, list]) -> list[dict[str, object]]:
    """Every combination, the last option changing fastest; a single empty one if there are no choices."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def identity(values: dict[str, object]) -> str:
    """A string that is the same for the same values; 1, 1.0 and true differ."""
    return json.dumps(values, sort_keys=True, default=str)


def parse_number(value: object) -> object:
    """A string such as 5e-4, which YAML does not read as a number, as one; anything else unchanged."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return value
    return int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value)


def name_arms(arms: Iterable[tuple[str | None, dict[str, object]]], alone: str) -> list[Arm]:
    """Arms from pairs of a name and values; without a name it is derived from the values.

    Args:
        alone: the name of an arm without values.
    """
    named: list[Arm] = []
    taken: set[str] = set()
    for given, values in arms:
        name = given or (slug(values) if values else alone)
        if name.lower() in taken:  # some file systems ignore case
            name = f"{name}-{_digest(values)}"
        taken.add(name.lower())
        named.append(Arm(name, values))
    return named


def slug(values: dict[str, object]) -> str:
    """A readable name derived from these values: `openclip-b32-lr0.001`.

    If characters had to be replaced or the name was cut, a short hash keeps it unique.
    """
    parts = [_label(option) + _text(value) for option, value in values.items()]
    full = "-".join(part for part in parts if part)
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "_", full).strip("._-")[:LONGEST].rstrip("._-")
    return safe if safe == full else f"{safe}-{_digest(values)}".lstrip("-")


def shown(value: object) -> str:
    """A varied value in its usual notation."""
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else _text(value)


def shown_options(values: dict[str, object]) -> str:
    return ", ".join(f"{option} {shown(value)}" for option, value in values.items())


def find_baselines(arms: list[Arm], baseline: dict[str, object]) -> dict[str, str | None]:
    """The name of the arm that each arm is compared with, or None.

    It has the baseline's values, and its other options are those of the arm, which may set more. If several
    baselines match, the one with most options is taken.
    """

    def entries(values: dict[str, object], without: Iterable[str] = ()) -> set[str]:
        return {identity({key: value}) for key, value in values.items() if key not in without}

    def is_baseline(arm: Arm) -> bool:
        return bool(baseline) and entries(baseline) <= entries(arm.values)

    references = sorted(filter(is_baseline, arms), key=lambda arm: -len(arm.values))
    found: dict[str, str | None] = {}
    for arm in arms:
        others = entries(arm.values, without=baseline)
        matching = (one.name for one in references if entries(one.values, without=baseline) <= others)
        found[arm.name] = None if is_baseline(arm) else next(matching, None)
    return found


def _text(value: object) -> str:
    if isinstance(value, float):
        return repr(value).replace("e-0", "e-").replace("e+0", "e+")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _label(option: str) -> str:
    """The last part of the option's name, if no other option ends with it."""
    if option in SHORT:
        return SHORT[option]
    last = option.rpartition(".")[2]
    return last if sum(name.rpartition(".")[2] == last for name in _options()) == 1 else option


@cache
def _options() -> tuple[str, ...]:
    """The dotted names of all options of `fastclip train`."""
    from fastclip.config.options import TrainConfig
    from fastclip.config.parse import SECTIONS

    inner = (f"{section}.{option}" for section, kind in SECTIONS.items() for option in get_type_hints(kind))
    return tuple(one.name for one in fields(TrainConfig) if one.name not in SECTIONS) + tuple(inner)


def _digest(values: dict[str, object]) -> str:
    return blake2b(identity(values).encode(), digest_size=3).hexdigest()
