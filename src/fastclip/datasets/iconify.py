"""The npm package `@iconify/json`: downloaded once, read from its tarball without unpacking."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastclip.files import cache_folder

log = logging.getLogger(__name__)

PACKAGE = "@iconify/json"
_NO_LONG_WAIT = ("--fetch-retries=1", "--fetch-timeout=120000")  # npm's own defaults retry for many minutes
TARBALL = re.compile(r"iconify-json-(\d+(?:\.\d+)*)\.tgz")
NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'


class DataUnavailable(RuntimeError):
    """A source cannot be reached or read; the message says how to get it, `path` is where it belongs."""

    def __init__(self, message: str, path: Path | None = None):
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class Icon:
    """A drawing and the name that its makers gave it."""

    name: str
    body: str
    """The content between <svg> and </svg>, with flips and turns."""
    view: tuple[float, float, float, float]
    """left, top, width, height"""

    def svg(self, size: int) -> str:
        """A complete SVG document; a drawing that is not square is centred, its proportions unchanged."""
        view = " ".join(f"{number:g}" for number in self.view)
        return f'<svg {NAMESPACES} width="{size}" height="{size}" viewBox="{view}">{self.body}</svg>'


@dataclass(frozen=True)
class IconSet:
    """All visible icons of one set, with the package's metadata."""

    prefix: str
    icons: list[Icon]
    hidden: int
    """How many were skipped because their makers withdrew or renamed them."""
    info: dict[str, Any] = field(default_factory=dict)
    categories: dict[str, list[str]] = field(default_factory=dict)
    styles: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Prefixes and suffixes of names that denote a style, as declared by the set."""


def version_of(tarball: Path) -> str:
    match = TARBALL.fullmatch(tarball.name)
    return match[1] if match else "unknown"


def fetch(wanted: str | None = None) -> Path:
    """Return the tarball: version `wanted` if cached, else the newest in the cache, else from npm."""
    cache = cache_folder()
    cached = {match[1]: path for path in cache.iterdir() if (match := TARBALL.fullmatch(path.name))}
    if wanted in cached:
        return cached[wanted]
    if cached:
        return cached[max(cached, key=lambda version: [int(part) for part in version.split(".")])]
    npm = shutil.which("npm")
    if npm is None:
        raise DataUnavailable(f"npm was not found, and {_how_to_get(cache)}", cache)
    log.info("Downloading %s with npm (about 100 MB) into %s", PACKAGE, cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix="npm-") as aside:
        command = [npm, "pack", PACKAGE, "--silent", "--pack-destination", aside, *_NO_LONG_WAIT]
        done = subprocess.run(command, cwd=aside, capture_output=True, text=True)
        packed = sorted(Path(aside).glob("iconify-json-*.tgz"))
        if done.returncode or not packed:
            output = " ".join((done.stderr or done.stdout).split())[-300:] or "no output"
            raise DataUnavailable(f"`npm pack {PACKAGE}` failed ({output}), and {_how_to_get(cache)}", cache)
        return packed[0].replace(cache / packed[0].name)


def _how_to_get(cache: Path) -> str:
    return (
        f"{cache} has no iconify-json-*.tgz. Install Node.js (which includes npm) and check the network, "
        f"or run `npm pack {PACKAGE}` on another machine and copy the file there. "
        "`fastclip data get scenes` requires neither."
    )


def read(tarball: Path, only: Collection[str] | None = None) -> dict[str, IconSet]:
    """Read icon sets by prefix, in byte order of prefixes; `only` selects those to parse."""
    sets = {}
    try:
        with tarfile.open(tarball, "r|gz") as package:
            for member in package:
                match = re.fullmatch(r"package/json/([a-z0-9-]+)\.json", member.name)
                if match and (only is None or match[1] in only):
                    stream = package.extractfile(member)
                    assert stream is not None  # a regular file by its name
                    sets[match[1]] = parse(match[1], json.load(stream))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        message = f"{tarball} cannot be read ({error}). Delete it and run the command again."
        raise DataUnavailable(message, tarball) from error
    if missing := sorted(set(only or ()) - set(sets)):
        message = f"{tarball} lacks the icon sets {', '.join(missing)}. Delete it to get a newer version."
        raise DataUnavailable(message, tarball)
    return dict(sorted(sets.items()))


def parse(prefix: str, data: dict[str, Any]) -> IconSet:
    """Return the visible icons in byte order of names; an alias only if it is flipped or turned."""
    names = sorted({*data["icons"], *data.get("aliases", {})})
    drawn = {name: icon for name in names if (icon := _resolve(name, data)) is not None}
    icons = [Icon(name, *_transform(icon)) for name, icon in drawn.items() if not icon.get("hidden")]
    hidden = len(drawn) - len(icons)
    styles = tuple(tuple(s for s in data.get(kind, {}) if s) for kind in ("prefixes", "suffixes"))
    return IconSet(prefix, icons, hidden, data.get("info", {}), data.get("categories", {}), styles)  # type: ignore[arg-type]


_BOX = {"left": 0, "top": 0, "width": 16, "height": 16}  # the format's defaults


def _resolve(name: str, data: dict[str, Any]) -> dict[str, Any] | None:
    """An icon in the set's box, or an alias merged with its parents; None if it is the same drawing."""
    layers: list[dict[str, Any]] = []
    is_alias = name not in data["icons"]
    while name not in data["icons"]:
        alias = data["aliases"].get(name)
        if alias is None or len(layers) > len(data["aliases"]):
            return None  # a missing parent, or a cycle
        layers.append(alias)
        name = alias["parent"]
    layers.append(data["icons"][name])
    turns = sum(layer.get("rotate", 0) for layer in layers)
    flips = {flip: sum(layer.get(flip, False) for layer in layers) % 2 == 1 for flip in ("hFlip", "vFlip")}
    if is_alias and turns % 4 == 0 and not any(flips.values()):
        return None
    merged = {side: data[side] for side in _BOX if side in data}
    for layer in reversed(layers):
        merged |= layer
    return merged | flips | {"rotate": turns % 4}


def _transform(icon: dict[str, Any]) -> tuple[str, tuple[float, float, float, float]]:
    """The body and its box: flipped, then turned by quarters, as in Iconify's own renderer."""
    left, top, width, height = (float(icon.get(side, default)) for side, default in _BOX.items())
    body, turns, steps = icon["body"], icon["rotate"], []
    if icon["hFlip"] and icon["vFlip"]:
        turns = (turns + 2) % 4
    elif icon["hFlip"]:
        steps, left, top = [f"translate({width + left:g} {-top:g})", "scale(-1 1)"], 0, 0
    elif icon["vFlip"]:
        steps, left, top = [f"translate({-left:g} {height + top:g})", "scale(1 -1)"], 0, 0
    if turns == 2:
        steps.insert(0, f"rotate(180 {width / 2 + left:g} {height / 2 + top:g})")
    elif turns:
        pivot = height / 2 + top if turns == 1 else width / 2 + left
        steps.insert(0, f"rotate({90 if turns == 1 else -90} {pivot:g} {pivot:g})")
        left, top, width, height = top, left, height, width
    if steps:
        body = f'<g transform="{" ".join(steps)}">{body}</g>'
    return body, (left, top, width, height)
