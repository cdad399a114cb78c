"""Evaluation tasks from held-out sets, in the folder layout of CLIP_benchmark and DataComp."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastclip.datasets.captions import TONE, TONES
from fastclip.datasets.resumable_build import write_pairs
from fastclip.files import atomic_folder, atomic_write

LEAST = 10  # examples of a class word, or countries of a flag task
LEAST_WORDS = 5  # classes of a word task: fewer would be too easy
# Where the first noun phrase of an emoji's name ends: "smiling face with hearts" is a face.
AFTER_HEAD = {
    *("with", "without", "of", "in", "on", "at", "from", "for", "to", "and", "over", "behind"),
    *("showing", "facing", "pointing", "holding", "wearing"),
}
# First words of icon names that do not name an object: brands, and families of products or diagrams.
NOT_A_THING = {
    *("brand", "logo", "logos", "social", "google", "microsoft", "ibm", "cics", "bpmn", "symbol", "sign"),
}
Items = Sequence[tuple[str, str]]  # keys with a label
Kind = Literal["retrieval", "classification"]


@dataclass(frozen=True)
class Named:
    """An image of a held-out set: its key in the tar, its caption, the package's categories for it."""

    key: str
    caption: str
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """Images with captions (retrieval) or with one of `classes` (classification)."""

    name: str
    kind: Kind
    items: tuple[tuple[str, str], ...]
    """An image's key with its caption or its class."""
    classes: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    """Sentences with {c} for the class."""


def tasks_of(prefix: str, named: Sequence[Named], *, emoji: bool) -> list[Task]:
    """Make all tasks for which a held-out set has enough examples."""
    plain = [one for one in named if not TONE.search(one.caption)]
    tasks = [retrieval(f"{prefix}_retrieval", plain), words(f"{prefix}_words", plain, emoji=emoji)]
    if emoji:
        tasks += [flags(f"{prefix}_flags", plain), skin_tones(f"{prefix}_skin_tones", named)]
    tasks.append(categories(f"hard_{prefix}_categories", plain))
    return [task for task in tasks if task is not None]


def retrieval(name: str, named: Sequence[Named]) -> Task:
    """One entry per distinct caption: the first image that has it."""
    first: dict[str, str] = {}
    for one in named:
        first.setdefault(one.caption, one.key)
    return Task(name, "retrieval", tuple((key, caption) for caption, key in first.items()))


def words(name: str, named: Sequence[Named], *, emoji: bool) -> Task | None:
    """Which object is it? Classes are head words of names with LEAST examples or more.

    The head is last in emoji names and first in icon names (`battery-charging`). Images whose name has a
    second class word are excluded: either answer would be right.
    """
    heads = {one: head(one.caption, emoji=emoji) for one in named}
    common = {word for word, n in Counter(heads.values()).items() if word and n >= LEAST}
    items = [(one.key, heads[one]) for one in named if _mentions(one, common) == {heads[one]}]
    return _classification(name, items, least=LEAST, fewest=LEAST_WORDS)


def _mentions(one: Named, common: set[str]) -> set[str]:
    """The class words in a name, in the singular or the plural."""
    words = one.caption.split()
    return common & {form for word in words for form in (word, word.removesuffix("s"), f"{word}s")}


def head(caption: str, *, emoji: bool) -> str:
    """The word that names the object in the image; empty if there is none."""
    parts = caption.split()
    if emoji:
        end = next((i for i, word in enumerate(parts) if i and word in AFTER_HEAD), len(parts))
        word = "" if parts[0] == "flag" else parts[end - 1]  # flags have their own task
    else:
        word = "" if parts[0] in NOT_A_THING else parts[0]
    return word if len(word) > 2 and word.isalpha() else ""


def flags(name: str, named: Sequence[Named]) -> Task | None:
    """Whose flag is it? One image per country, by `flag x` or by the package's category for flags."""
    items = []
    for one in named:
        if match := re.fullmatch(r"flag (?!in )(.+)", one.caption):
            items.append((one.key, match[1]))
        elif "Flags" in one.categories and not re.search(r"flag|regional ?indicator", one.caption):
            items.append((one.key, one.caption))
    return _classification(name, items, "flag {c}", fewest=LEAST)


def skin_tones(name: str, named: Sequence[Named]) -> Task | None:
    """Which of the five tones? Images of two people with two tones are excluded."""
    tones = {one.key: set(TONE.findall(one.caption)) for one in named}
    items = [(key, f"{names.pop()} skin tone") for key, names in tones.items() if len(names) == 1]
    order = [f"{tone.replace('-', ' ')} skin tone" for tone in TONES]
    return _classification(name, items, least=LEAST, order=order)


def categories(name: str, named: Sequence[Named]) -> Task | None:
    """The package's own headings. They do not name objects: the task is hard, and reported separately."""
    items = [(one.key, one.categories[0]) for one in named if len(one.categories) == 1]
    return _classification(name, items, least=LEAST)


def _classification(
    name: str, items: Items, template: str = "{c}", least: int = 1, fewest: int = 2, order: Sequence[str] = ()
) -> Task | None:
    sizes = Counter(label for _, label in items)
    classes = [label for label in order or sorted(sizes) if sizes[label] >= least]
    if len(classes) < fewest:
        return None
    usable = tuple((key, label) for key, label in items if label in set(classes))
    return Task(name, "classification", usable, tuple(classes), (template,))


def write_task(folder: Path, task: Task, images: Mapping[str, bytes]) -> dict[str, Any]:
    """Write the folder atomically, without items whose image is missing; return its counts."""
    items = [(key, answer) for key, answer in task.items if key in images]
    numbers = {name: str(i) for i, name in enumerate(task.classes)}
    pairs = ((key, images[key], numbers[answer] if numbers else answer) for key, answer in items)
    with atomic_folder(folder) as part:
        (part / "test").mkdir()
        atomic_write(part / "dataset_type.txt", f"{task.kind}\n")
        atomic_write(part / "test" / "nshards.txt", "1\n")
        if task.kind == "classification":
            atomic_write(part / "classnames.txt", "".join(f"{name}\n" for name in task.classes))
            templates = "".join(f"{template}\n" for template in task.templates)
            atomic_write(part / "zeroshot_classification_templates.txt", templates)
        write_pairs(part / "test" / "0.tar", pairs, "txt" if task.kind == "retrieval" else "cls")
    return {"kind": task.kind, "pictures": len(items), "classes": len(task.classes)}
