"""What a hostile collection is, and what reading all of it finds."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastclip.data.images import upright_rgb
from fastclip.data.manifest import open_manifest
from fastclip.data.pairs import SourceError
from fastclip.data.readers import UNUSABLE


class Bad(NamedTuple):
    """A report of something unusable; of an expected one, the end of the file, a part of place and reason."""

    file: str
    place: str
    reason: str


@dataclass(frozen=True)
class Hostile:
    """A collection in which most pairs are good."""

    name: str
    kind: str
    """Of its files: tar, table, folder, image."""
    make: Callable[[Path], Path]
    """Write it into a folder; the path to open."""
    good: tuple[str, ...] = ()
    """The captions of all usable pairs, in order."""
    bad: tuple[Bad, ...] = ()
    """All that must be reported; empty if nothing is lost."""
    refused: bool = False
    """The collection is not opened, for the one reason in `bad`."""


class Found(NamedTuple):
    """What came of opening a collection and reading every pair."""

    good: tuple[str, ...]
    bad: list[Bad]
    refused: bool


def in_folder(files):
    """A maker of these files, the first of which is the collection."""

    def make(folder):
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder / next(iter(files))

    return make


def read_all(path: Path) -> Found:
    """Open a collection, read and decode every pair; errors that are not fastclip's are the caller's."""
    try:
        manifest = open_manifest(str(path))
    except SourceError as error:
        return Found((), [Bad(error.path, "", error.problem)], True)
    good, bad = [], []
    for problem in manifest.problems():
        str(problem).encode()  # can be printed
        bad.append(Bad(problem.file, f"{problem.place} {problem.key}", problem.reason))
    for sample in range(len(manifest)):
        try:
            image, caption = manifest.read(sample)
            upright_rgb(image)
            good.append(caption)
        except UNUSABLE as error:
            bad.append(Bad(manifest.where(sample), manifest.position(sample), str(error)))
    return Found(tuple(good), bad, False)


def differences(case: Hostile, found: Found) -> list[str]:
    """In which ways this is not what the case demands."""
    wrong = []
    if found.good != case.good or found.refused != case.refused:
        wrong.append(f"usable: {found.good}, refused: {found.refused}")
    left = list(found.bad)
    for file, place, reason in case.bad:
        match = next(
            (b for b in left if b.file.endswith(file) and place in b.place and reason in b.reason), None
        )
        if match is None:
            wrong.append(f"not reported: {file}, {place}: {reason}")
        else:
            left.remove(match)
    return wrong + [f"reported too: {one}" for one in left]


def image_cases(images) -> list[Hostile]:
    """A case for each of {name: (function that makes the bytes, part of the reason)}; "": it is usable."""
    from tests.data.hostile_tars import AFTER, BEFORE, CAPTION, GOOD, member

    def case(name, make_bytes, reason):
        def make(folder):
            (folder / "s.tar").write_bytes(BEFORE + member("bad.png", make_bytes()) + CAPTION + AFTER)
            return folder / "s.tar"

        if not reason:
            return Hostile(f"image: {name}", "image", make, (GOOD[0], "a caption", *GOOD[1:]))
        place = f"byte {len(BEFORE) + 512:,}"
        return Hostile(f"image: {name}", "image", make, GOOD, (Bad("s.tar", place, reason),))

    return [case(name, make_bytes, reason) for name, (make_bytes, reason) in images.items()]
