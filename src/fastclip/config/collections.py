"""The collections of `fastclip data get`, one row each: to add one, add a row and its module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_EMOJI = {  # held-out sets and their tasks
    "twemoji": ("retrieval", "words", "flags", "skin_tones", "categories"),
    "emojione": ("retrieval", "words", "flags", "skin_tones", "categories"),
    "fxemoji": ("retrieval", "categories"),
    "streamline-emojis": ("retrieval", "words", "flags", "categories"),
    "fluent-emoji-high-contrast": ("retrieval", "words", "categories"),
}
_ICONS = {
    "tabler": ("retrieval", "words"),
    "carbon": ("retrieval", "words", "categories"),
    "ion": ("retrieval", "words"),
    "mdi": ("retrieval", "words", "categories"),
}


@dataclass(frozen=True)
class Collection:
    """Pairs to train on and tasks to test on."""

    name: str
    module: str
    """Import path of the module whose `build` writes the folder."""
    description: str
    """One line for --help."""
    needs_npm: bool = False
    held_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Sets excluded from training, with their tasks: the evaluation suite of this name."""

    def __str__(self) -> str:
        return f"{self.name}: {self.description} ({'needs npm' if self.needs_npm else 'no download'})"


COLLECTIONS = {
    row.name: row
    for row in (
        Collection(
            "emoji",
            "fastclip.datasets.icons",
            "coloured emoji of five sets, tested on five other sets, in a minute",
            needs_npm=True,
            held_out=_EMOJI,
        ),
        Collection(
            "icons",
            "fastclip.datasets.icons",
            "346,000 icons, tested on held-out sets, in six minutes",
            needs_npm=True,
            held_out=_EMOJI | _ICONS,
        ),
        Collection("scenes", "fastclip.datasets.scenes", "captioned coloured shapes, generated in seconds"),
    )
}


def how_to_get(paths: list[str] | str) -> str:
    """How to download missing data of a recipe; empty for other data."""
    for path in [paths] if isinstance(paths, str) else paths:
        folder, name = [*path.split("/"), ""][:2]
        if folder == "data" and name in COLLECTIONS and not Path(path).exists():
            return f" Download it with `fastclip data get {name}`."
    return ""
