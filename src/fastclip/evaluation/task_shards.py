"""A task's tars: images with their labels, captions or groups beside them, each checked as it is read."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fastclip.data.manifest import caption_lines
from fastclip.data.sources import IMAGE_EXTENSIONS, Member, tar_members

CLASSNAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"


class TaskError(ValueError):
    """A task's folder cannot be scored as it is."""


class ImagePlace(NamedTuple):
    """Where an image's bytes are: a whole file, or a part of a tar."""

    path: str
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def find_shards(folder: Path) -> list[Path]:
    """All that nshards.txt tells of, and no others."""
    test = folder / "test"
    stated, there = test / "nshards.txt", {path.name for path in test.glob("*.tar")}
    if not stated.exists():
        what = "it holds the number of shards, which are called 0.tar, 1.tar and so on"
        raise TaskError(f"{stated} is missing; {what}. Get the task again, or write it.")
    try:
        count = int(read_text(stated))
    except ValueError:
        raise TaskError(f"{stated} must hold one number, of how many shards there are.") from None
    missing = next((n for n in range(max(count, 1)) if f"{n}.tar" not in there), None)
    if missing is not None:
        lost = test / f"{missing}.tar"
        raise TaskError(f"{lost} is missing, and {stated.name} says {count}. Get the task again.")
    if len(there) > count:
        raise TaskError(f"{stated} says {count}, and there are {len(there)} shards: mend it, or remove them.")
    return [test / f"{number}.tar" for number in range(count)]


class Sample(NamedTuple):
    """An image of a shard, with the bytes of its label and of its groups."""

    where: str
    image: ImagePlace
    truth: bytes
    groups: bytes | None


def read_samples(shard: Path, label: str) -> Iterator[Sample]:
    """Each image of a shard that has a member with the extension `label`; one without it is an error."""
    empty = True
    with shard.open("rb") as stream:
        members, damage = tar_members(stream)
        if damage:
            raise TaskError(f"{shard}: {damage}. Get it again (a clone may need `git lfs pull`).")
        for key, parts in _by_key(shard, members).items():
            image = next((parts[extension] for extension in IMAGE_EXTENSIONS if extension in parts), None)
            if image is None and label in parts:
                kinds = ", ".join(IMAGE_EXTENSIONS)
                raise TaskError(f"{shard}: {key}.{label} has no image ({kinds}) beside it. Get it again.")
            if image is None:
                continue
            if label not in parts:
                raise TaskError(
                    f"{shard}: image {key} has no .{label}. Get it again, or name another kind of task in "
                    "dataset_type.txt."
                )
            truth, groups = (_read(stream, parts.get(extension)) for extension in (label, "npy"))
            place = ImagePlace(str(shard), image.offset, image.size)
            yield Sample(f"{shard}: {key}.{label}", place, truth or b"", groups)
            empty = False
    if empty:
        raise TaskError(f"{shard} holds no image. Get it again, or mend nshards.txt.")


def _by_key(shard: Path, members: list[Member]) -> dict[str, dict[str, Member]]:
    """The parts of each sample by extension."""
    samples: dict[str, dict[str, Member]] = {}
    for member in members:
        parts = samples.setdefault(member.key, {})
        if member.extension in parts:
            raise TaskError(f"{shard}: {member.key}.{member.extension} is there twice. Get it again.")
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
        raise TaskError(f"{sample.where} holds {sample.truth[:20]!r}, not a class's number.") from None
    if not 0 <= label < classes:
        raise TaskError(
            f"{sample.where} says {label}, and {CLASSNAMES} has {classes} lines, numbered from 0. Get both "
            "again: they belong to different versions of the task."
        )
    return label


def _targets(sample: Sample, classes: int) -> np.ndarray:
    row = _array(sample.truth, sample.where)
    if row.shape != (classes,) or not np.isin(row, (0, 1)).all():
        raise TaskError(
            f"{sample.where} must hold 0 or 1 for each of the {classes} lines of {CLASSNAMES}; "
            f"it has {row!r:.60}."
        )
    return row.astype(np.int64)


def _captions(sample: Sample, classes: int) -> list[str]:
    lines = caption_lines(sample.truth.decode("utf-8", errors="replace"))
    if not lines:
        raise TaskError(f"{sample.where} is empty; every image needs a caption.")
    return lines


# What an image is to be called, by the kind of task
TRUTHS = {"classification": _label, "multilabel": _targets, "retrieval": _captions}


def read_groups(sample: Sample) -> np.ndarray:
    """The numbers of the groups that an image belongs to."""
    where = f"{sample.where.removesuffix('.cls')}.npy"
    row = np.atleast_1d(_array(sample.groups or b"", where))
    if row.ndim != 1 or not len(row) or not np.isfinite(row[0]):
        raise TaskError(f"{where} must hold the numbers of the image's groups in a row; it has {row!r:.60}.")
    return row.astype(np.float64)


def _array(data: bytes, where: str) -> np.ndarray:
    try:
        row = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # damaged bytes can raise anything
        raise TaskError(f"{where} cannot be read: {error}. Get it again.") from None
    if row.dtype.kind not in "biuf":
        raise TaskError(f"{where} holds {row.dtype}; it must hold numbers.")
    return row


def read_text(path: Path) -> str:
    """A text file of a task."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not text in UTF-8 ({error}); save it as such.") from None
