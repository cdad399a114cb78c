"""The arms of a study: choices of options that are compared, and names for them that a file system takes."""

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
         "batch.size": "b", "batch.micro": "micro"}  # fmt: skip
"""What stands before a value in an arm's name, where it is not the option's own last word."""
LONGEST = 80  # characters of a name; a folder's may have 255
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass
class Arm:
    """One choice of the varied options; its runs differ in the seed alone."""

    name: str
    """Such as `openclip-b32`: the same whatever other arms the study has."""
    values: dict[str, object]
    """The options that make this arm, by their dotted names; numbers are numbers."""
    tune: dict[str, list] = field(default_factory=dict)
    """Options and the values to choose from for it; empty without tuning."""
    tuned: dict[str, object] = field(default_factory=dict)
    """What tuning chose for it; empty without tuning, and before it has ended."""


def grid(choices: dict[str, list]) -> list[dict[str, object]]:
    """Every combination, in the order of the file: the last option changes fastest. One without any."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def identity(values: dict[str, object]) -> str:
    """A text that is equal for equal values; 1, 1.0 and true are three."""
    return json.dumps(values, sort_keys=True, default=str)


def number_or_as_it_is(value: object) -> object:
    """YAML and shells give 5e-4 as text: a number all the same."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return value
    return int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value)


def name_arms(arms: Iterable[tuple[str | None, dict[str, object]]], alone: str) -> list[Arm]:
    """Arms from names that were given and values; names are made of the values where none was given.

    Args:
        alone: the name of an arm that varies nothing.
    """
    named: list[Arm] = []
    taken: set[str] = set()
    for given, values in arms:
        name = given or (slug(values) if values else alone)
        if name.lower() in taken:  # some file systems do not tell A from a
            name = f"{name}-{_digest(values)}"
        taken.add(name.lower())
        named.append(Arm(name, values))
    return named


def slug(values: dict[str, object]) -> str:
    """A readable name of these values alone: `openclip-b32-lr0.001`.

    Where signs had to be replaced or the name was cut, a few letters of a hash keep it apart from others.
    """
    parts = [_label(option) + _text(value) for option, value in values.items()]
    whole = "-".join(part for part in parts if part)
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "_", whole).strip("._-")[:LONGEST].rstrip("._-")
    return safe if safe == whole else f"{safe}-{_digest(values)}".lstrip("-")


def shown(value: object) -> str:
    """A varied value as people write it."""
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else _text(value)


def shown_options(values: dict[str, object]) -> str:
    return ", ".join(f"{option} {shown(value)}" for option, value in values.items())


def find_baselines(arms: list[Arm], baseline: dict[str, object]) -> dict[str, str | None]:
    """For each arm the name of the one it is compared with: the baseline's values, all others the arm's own.

    An arm may say more than its baseline: of several that fit, the one that says most is taken.
    """

    def said(values: dict[str, object], but: Iterable[str] = ()) -> set[str]:
        return {identity({key: value}) for key, value in values.items() if key not in but}

    def is_baseline(arm: Arm) -> bool:
        return bool(baseline) and said(baseline) <= said(arm.values)

    references = sorted(filter(is_baseline, arms), key=lambda arm: -len(arm.values))
    found: dict[str, str | None] = {}
    for arm in arms:
        others = said(arm.values, but=baseline)
        matching = (one.name for one in references if said(one.values, but=baseline) <= others)
        found[arm.name] = None if is_baseline(arm) else next(matching, None)
    return found


def _text(value: object) -> str:
    if isinstance(value, float):
        return repr(value).replace("e-0", "e-").replace("e+0", "e+")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _label(option: str) -> str:
    """The option's last word, if no other option ends with it."""
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
