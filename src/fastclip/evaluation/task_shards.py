"""The tar shards of a task: images with labels, captions or groups, each checked as it is read."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fastclip.data.pairs import caption_lines
from fastclip.data.sources import IMAGE_EXTENSIONS, Member, tar_members
from fastclip.errors import PathError

CLASSNAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"


class TaskError(PathError):
    """A file of a task is missing, damaged or inconsistent, so the task cannot be scored."""


class ImagePlace(NamedTuple):
    """The location of an image's bytes: a file, or part of a tar."""

    path: str
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def find_shards(folder: Path) -> list[Path]:
    """Exactly the shards that nshards.txt counts."""
    test = folder / "test"
    stated, there = test / "nshards.txt", {path.name for path in test.glob("*.tar")}
    if not stated.exists():
        raise TaskError(
            stated,
            "is missing; it must hold the number of shards, named 0.tar, 1.tar and so on. Download the task "
            "again, or write this file.",
        )
    try:
        count = int(read_text(stated))
    except ValueError:
        raise TaskError(stated, "must hold one whole number, the number of shards.") from None
    missing = next((n for n in range(max(count, 1)) if f"{n}.tar" not in there), None)
    if missing is not None:
        raise TaskError(
            test / f"{missing}.tar",
            f"is missing; {stated.name} says {count} shards. Download the task again.",
        )
    if len(there) > count:
        raise TaskError(
            stated, f"says {count}, but there are {len(there)} shards. Fix the number or remove extra shards."
        )
    return [test / f"{number}.tar" for number in range(count)]


class Sample(NamedTuple):
    """An image of a shard, with the bytes of its label and of its groups."""

    key: str
    label: str  # the extension of the member that holds the truth
    image: ImagePlace
    truth: bytes
    groups: bytes | None

    def error(self, problem: str, extension: str = "") -> TaskError:
        """An error about the member with this extension; default: the label."""
        return TaskError(self.image.path, f": {self.key}.{extension or self.label} {problem}")


def read_samples(shard: Path, label: str) -> Iterator[Sample]:
    """The images of a shard; each must have a member with the extension `label`."""
    empty = True
    with shard.open("rb") as stream:
        members, damage = tar_members(stream)
        if damage:
            raise TaskError(shard, f": {damage}. Download it again (in a git clone, run `git lfs pull`).")
        for key, parts in _by_key(shard, members).items():
            image = next((parts[extension] for extension in IMAGE_EXTENSIONS if extension in parts), None)
            if image is None and label in parts:
                kinds = ", ".join(IMAGE_EXTENSIONS)
                raise TaskError(shard, f": {key}.{label} has no image ({kinds}). Download it again.")
            if image is None:
                continue
            if label not in parts:
                raise TaskError(
                    shard,
                    f": image {key} has no .{label}. Download it again, or set another kind of task in "
                    "dataset_type.txt.",
                )
            truth, groups = (_read(stream, parts.get(extension)) for extension in (label, "npy"))
            place = ImagePlace(str(shard), image.offset, image.size)
            yield Sample(key, label, place, truth or b"", groups)
            empty = False
    if empty:
        raise TaskError(shard, "holds no images. Download it again, or fix nshards.txt.")


def _by_key(shard: Path, members: list[Member]) -> dict[str, dict[str, Member]]:
    """The members of each sample by extension."""
    samples: dict[str, dict[str, Member]] = {}
    for member in members:
        parts = samples.setdefault(member.key, {})
        if member.extension in parts:
            raise TaskError(shard, f": {member.key}.{member.extension} occurs twice. Download it again.")
        if member.plain:
            parts[member.extension] = member
    return samples


def _read(stream: BinaryIO, member: Member | None) -> bytes | None:
    if member is None:
        return None
    stream.seek(member.offset)
    return stream.read(member.size)


def _label(sample: Sample, classes: int) -> int:
    try:
        label = int(sample.truth)
    except ValueError:
        raise sample.error(f"holds {sample.truth[:20]!r}; it must hold the number of a class.") from None
    if not 0 <= label < classes:
        raise sample.error(
            f"says {label}; it must be a line of {CLASSNAMES}, 0 to {classes - 1}. Download both again: they "
            "are from different versions of the task."
        )
    return label


def _targets(sample: Sample, classes: int) -> np.ndarray:
    row = _array(sample.truth, sample)
    if row.shape != (classes,) or not np.isin(row, (0, 1)).all():
        raise sample.error(
            f"must hold 0 or 1 for each of the {classes} lines of {CLASSNAMES}; it holds {row!r:.60}."
        )
    return row.astype(np.int64)


def _captions(sample: Sample, classes: int) -> list[str]:
    lines = caption_lines(sample.truth.decode("utf-8", errors="replace"))
    if not lines:
        raise sample.error("is empty; every image needs a caption.")
    return lines


# How to read the truth about an image, by the kind of task
TRUTHS = {"classification": _label, "multilabel": _targets, "retrieval": _captions}


def read_groups(sample: Sample) -> np.ndarray:
    """The numbers of the groups that an image belongs to."""
    row = np.atleast_1d(_array(sample.groups or b"", sample))
    if row.ndim != 1 or not len(row) or not np.isfinite(row[0]):
        raise sample.error(f"must hold the image's group numbers in one row; it holds {row!r:.60}.", "npy")
    return row.astype(np.float64)


def _array(data: bytes, sample: Sample) -> np.ndarray:
    try:
        row = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # damaged bytes can raise anything
        raise sample.error(f"cannot be read: {error}. Download it again.", "npy") from None
    if row.dtype.kind not in "biuf":
        raise sample.error(f"holds {row.dtype}; it must hold numbers.", "npy")
    return row


def read_text(path: Path) -> str:
    """Read a text file of a task."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(path, f"is not UTF-8 text ({error}); save it as UTF-8.") from None
