"""Evaluation tasks: what a held-out set is asked, and the folders that CLIP_benchmark and DataComp read."""

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
LEAST_WORDS = 5  # classes of a word task: fewer ask nothing
# Where the first noun phrase of an emoji's name ends: "smiling face with hearts" is a face.
AFTER_HEAD = {
    *("with", "without", "of", "in", "on", "at", "from", "for", "to", "and", "over", "behind"),
    *("showing", "facing", "pointing", "holding", "wearing"),
}
# First words of icon names that name no picture: brands, and families of products or diagrams.
NOT_A_THING = {
    *("brand", "logo", "logos", "social", "google", "microsoft", "ibm", "cics", "bpmn", "symbol", "sign"),
}
Items = Sequence[tuple[str, str]]  # keys with a label
Kind = Literal["retrieval", "classification"]


@dataclass(frozen=True)
class Named:
    """A picture of a held-out set: its key in the tar, its caption, the package's categories for it."""

    key: str
    caption: str
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """Pictures with captions (retrieval) or with one of `classes` (classification)."""

    name: str
    kind: Kind
    items: tuple[tuple[str, str], ...]
    """A picture's key with its caption or its class."""
    classes: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    """Sentences with {c} in the place of the class."""


def tasks_of(prefix: str, named: Sequence[Named], *, emoji: bool) -> list[Task]:
    """All tasks that a held-out set has enough examples for."""
    plain = [one for one in named if not TONE.search(one.caption)]
    found = [retrieval(f"{prefix}_retrieval", plain), words(f"{prefix}_words", plain, emoji=emoji)]
    if emoji:
        found += [flags(f"{prefix}_flags", plain), skin_tones(f"{prefix}_skin_tones", named)]
    found.append(categories(f"hard_{prefix}_categories", plain))
    return [task for task in found if task is not None]


def retrieval(name: str, named: Sequence[Named]) -> Task:
    """One entry per distinct caption: the first picture that has it."""
    first: dict[str, str] = {}
    for one in named:
        first.setdefault(one.caption, one.key)
    return Task(name, "retrieval", tuple((key, caption) for caption, key in first.items()))


def words(name: str, named: Sequence[Named], *, emoji: bool) -> Task | None:
    """Which thing is it? Classes are head words of names with LEAST examples or more.

    Emoji names are phrases with the head at their end; icon names put it first (`battery-charging`).
    Pictures whose name holds a second class word are left out: either answer would be right.
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
    """The word that says what the picture shows; empty if the name has none."""
    parts = caption.split()
    if emoji:
        end = next((i for i, word in enumerate(parts) if i and word in AFTER_HEAD), len(parts))
        word = "" if parts[0] == "flag" else parts[end - 1]  # flags have a task of their own
    else:
        word = "" if parts[0] in NOT_A_THING else parts[0]
    return word if len(word) > 2 and word.isalpha() else ""


def flags(name: str, named: Sequence[Named]) -> Task | None:
    """Whose flag is it? One picture per country, by `flag x` or by the package's category for flags."""
    items = []
    for one in named:
        if found := re.fullmatch(r"flag (?!in )(.+)", one.caption):
            items.append((one.key, found[1]))
        elif "Flags" in one.categories and not re.search(r"flag|regional ?indicator", one.caption):
            items.append((one.key, one.caption))
    return _classification(name, items, "flag {c}", fewest=LEAST)


def skin_tones(name: str, named: Sequence[Named]) -> Task | None:
    """Which of the five tones? Pictures of two people with two tones are left out."""
    tones = {one.key: set(TONE.findall(one.caption)) for one in named}
    items = [(key, f"{found.pop()} skin tone") for key, found in tones.items() if len(found) == 1]
    order = [f"{tone.replace('-', ' ')} skin tone" for tone in TONES]
    return _classification(name, items, least=LEAST, order=order)


def categories(name: str, named: Sequence[Named]) -> Task | None:
    """The package's own headings. They name no picture, so this is hard, and is reported apart."""
    items = [(one.key, one.categories[0]) for one in named if len(one.categories) == 1]
    return _classification(name, items, least=LEAST)


def _classification(
    name: str, items: Items, template: str = "{c}", least: int = 1, fewest: int = 2, order: Sequence[str] = ()
) -> Task | None:
    sizes = Counter(label for _, label in items)
    classes = [label for label in order or sorted(sizes) if sizes[label] >= least]
    if len(classes) < fewest:
        return None
    kept = tuple((key, label) for key, label in items if label in set(classes))
    return Task(name, "classification", kept, tuple(classes), (template,))


def write_task(folder: Path, task: Task, pictures: Mapping[str, bytes]) -> dict[str, Any]:
    """Write the folder whole; items whose picture is missing are left out. Gives its counts."""
    items = [(key, answer) for key, answer in task.items if key in pictures]
    numbers = {name: str(i) for i, name in enumerate(task.classes)}
    pairs = ((key, pictures[key], numbers[answer] if numbers else answer) for key, answer in items)
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
