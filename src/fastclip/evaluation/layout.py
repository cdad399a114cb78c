"""A task on the disk: the folders of CLIP_benchmark and DataComp, a folder of class folders, or pairs.

    TASK/classnames.txt                          a class a line; a label is a line's number, from 0
    TASK/zeroshot_classification_templates.txt   a sentence a line, with {c} in the place of the class
    TASK/dataset_type.txt                        classification (also if it is missing), multilabel, retrieval
    TASK/test/nshards.txt, TASK/test/0.tar …     an image and: .cls, its label; .txt, its captions by line
                                                 (retrieval); .npy, 0 or 1 for each class (multilabel), or
                                                 besides .cls the groups that it belongs to

    TASK/associations.jsonl, TASK/images/…       WinoGAViL: {"cue": …, "candidates": […], "associations": […]}
                                                 a line; the latter two are names of files in images

    TASK/CLASS/*.jpg                             classes are the names of the folders, in their order; the
                                                 first two files are read if they are there

What is missing or does not fit is told with the file and what to do; nothing is scored that was not there.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from fastclip.data.images import BadImage
from fastclip.data.manifest import Manifest, open_manifest
from fastclip.data.sources import FOLDER_TABLES, IMAGE_EXTENSIONS, TABLE_EXTENSIONS, Member, tar_members

log = logging.getLogger(__name__)
Kind = Literal["classification", "multilabel", "retrieval", "associations"]
LABELS = {"classification": "cls", "multilabel": "npy", "retrieval": "txt"}  # what a shard's images have
CLASSNAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
DEFAULT_TEMPLATES = ("a photo of a {c}.",)


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


class Cue(NamedTuple):
    """A word, the images that it could go with, and which of them people chose."""

    text: str
    candidates: list[int]
    associated: list[bool]


@dataclass
class Task:
    """What a model is asked, and where the images are."""

    name: str
    kind: Kind
    images: Sequence[ImagePlace | PairPlace]
    classnames: list[str] = field(default_factory=list)
    templates: list[str] = field(default_factory=list)
    labels: np.ndarray | None = None
    """A class an image; for multilabel 0 or 1 for each class."""
    captions: list[list[str]] = field(default_factory=list)
    """Of each image (retrieval)."""
    groups: np.ndarray | None = None
    """Images × columns: region, income and the like, as numbers."""
    cues: list[Cue] = field(default_factory=list)
    fingerprint: str = ""
    """Changes when a file, a class name or a template does."""
    images_fingerprint: str = ""
    """Changes when an image, or their order, does: what features of the images depend on."""

    def __len__(self) -> int:
        return len(self.images)

    def image(self, number: int) -> bytes:
        return self.images[number].read()

    def where(self, number: int) -> str:
        return self.images[number].path


def find_tasks(folder: Path) -> dict[str, Path]:
    """The task folders in a folder by name; the folder itself if it is a task; nothing if there is none."""
    if _is_task(folder):
        return {folder.name: folder}
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    if not any(_is_task(path) for path in inside) and _class_folders(folder):
        return {folder.name: folder}
    return {path.name: path for path in inside if _is_task(path) or _class_folders(path)}


def open_task(name: str, folder: Path) -> Task:
    """Read a task's labels and captions, and find its images."""
    if (folder / "associations.jsonl").exists():
        task = _open_associations(name, folder)
    elif not _has_shards(folder) and (classes := _class_folders(folder)):
        task = _open_class_folders(name, folder, classes)
    else:
        task = _open_shards(name, folder)
    _take_fingerprints(task)
    return task


def open_pairs_task(paths: str) -> Task:
    """Any source of pairs, for retrieval: shards, a table, a folder with captions."""
    manifest = open_manifest(paths)
    images, captions = [], []
    for sample in range(len(manifest)):
        try:
            caption = manifest.caption_at(manifest.place(sample))
        except BadImage:  # it is blank
            continue
        images.append(PairPlace(manifest, sample))
        captions.append(_caption_lines(caption))
    if not images:
        raise TaskError(f"{paths} holds no caption that is not blank; retrieval needs one for each image.")
    if len(images) < len(manifest):
        left_out = len(manifest) - len(images)
        log.warning("%s: %d of %d images are left out, for blank captions.", paths, left_out, len(manifest))
    task = Task(Path(paths.rstrip("/")).name, "retrieval", images, captions=captions)
    _take_fingerprints(task, [manifest.fingerprint, manifest.stamps])
    return task


class PairPlace(NamedTuple):
    """An image of a manifest."""

    manifest: Manifest
    sample: int

    @property
    def path(self) -> str:
        return self.manifest.where(self.sample)

    def read(self) -> bytes:
        return self.manifest.image_at(self.manifest.place(self.sample))


def _is_task(folder: Path) -> bool:
    named = ("associations.jsonl", "dataset_type.txt", CLASSNAMES)
    return any((folder / name).exists() for name in named) or _has_shards(folder)


def _has_shards(folder: Path) -> bool:
    return (folder / "test" / "nshards.txt").exists() or any((folder / "test").glob("*.tar"))


def _class_folders(folder: Path) -> list[Path]:
    """Folders with images directly in them; none if there are captions, for then they are pairs."""
    tables = (*TABLE_EXTENSIONS, "tar")
    if any(name in FOLDER_TABLES or _extension(name) in tables for name in os.listdir(folder)):
        return []
    found = []
    for path in sorted(folder.iterdir()):
        image = next((file for file in path.iterdir() if _is_image(file)), None) if path.is_dir() else None
        if image is not None and image.with_suffix(".txt").exists():
            return []
        if image is not None:
            found.append(path)
    return found


def _is_image(path: Path) -> bool:
    return _extension(path.name) in IMAGE_EXTENSIONS


def _extension(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _open_class_folders(name: str, folder: Path, classes: list[Path]) -> Task:
    images, labels = [], []
    for label, path in enumerate(classes):
        files = [ImagePlace(str(file)) for file in sorted(path.iterdir()) if _is_image(file)]
        images += files
        labels += [label] * len(files)
    task = Task(name, "classification", images, labels=np.array(labels))
    task.classnames = [path.name.replace("_", " ") for path in classes]
    task.templates = list(DEFAULT_TEMPLATES)
    if (folder / CLASSNAMES).exists():
        task.classnames = _classnames(folder)
    if (folder / TEMPLATES).exists():
        task.templates = _templates(folder)
    if not len(task.classnames) == len(classes) > 1:
        raise TaskError(
            f"{folder} has {len(classes)} folders of images and {len(task.classnames)} class names. It needs "
            f"two folders or more, and a line for each, in the order of their names, in {CLASSNAMES}, if "
            "there is such a file."
        )
    return task


def _open_shards(name: str, folder: Path) -> Task:
    shards, kind = _shards(folder), _kind(folder)
    task = Task(name, kind, [])
    if kind != "retrieval":
        task.classnames, task.templates = _classnames(folder), _templates(folder)
    images, groups = [], []
    truths: list[Any] = []
    for shard in shards:
        for sample in _samples(shard, LABELS[kind]):
            images.append(sample.image)
            truths.append(_READERS[kind](sample, len(task.classnames)))
            if kind == "classification" and sample.groups is not None:
                groups.append(_groups(sample))
            if groups and (len(groups) != len(images) or groups[-1].shape != groups[0].shape):
                raise TaskError(
                    f"{sample.where}: every image needs as many groups, in a .npy, as the others."
                )
    task.images = images
    if kind == "retrieval":
        task.captions = truths
    else:
        task.labels = np.array(truths)
    if groups:
        task.groups = np.array(groups)
    return task


def _kind(folder: Path) -> Kind:
    file = folder / "dataset_type.txt"
    kind = _text(file).strip().lower() if file.exists() else "classification"
    if kind not in LABELS:
        raise TaskError(f"{file} says {kind!r}; it must be one of {', '.join(LABELS)}.")
    return kind  # type: ignore[return-value]


def _shards(folder: Path) -> list[Path]:
    test = folder / "test"
    stated, there = test / "nshards.txt", {path.name for path in test.glob("*.tar")}
    if not stated.exists():
        what = "it holds the number of shards, which are called 0.tar, 1.tar and so on"
        raise TaskError(f"{stated} is missing; {what}. Get the task again, or write it.")
    try:
        count = int(_text(stated))
    except ValueError:
        raise TaskError(f"{stated} must hold one number, of how many shards there are.") from None
    missing = next((n for n in range(max(count, 1)) if f"{n}.tar" not in there), None)
    if missing is not None:
        lost = test / f"{missing}.tar"
        raise TaskError(f"{lost} is missing, and {stated.name} says {count}. Get the task again.")
    if len(there) > count:
        raise TaskError(f"{stated} says {count}, and there are {len(there)} shards: mend it, or remove them.")
    return [test / f"{number}.tar" for number in range(count)]


class _Sample(NamedTuple):
    """An image of a shard, with the bytes of its label and of its groups."""

    where: str
    image: ImagePlace
    truth: bytes
    groups: bytes | None


def _samples(shard: Path, label: str) -> Iterator[_Sample]:
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
            yield _Sample(f"{shard}: {key}.{label}", place, truth or b"", groups)
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


def _label(sample: _Sample, classes: int) -> int:
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


def _targets(sample: _Sample, classes: int) -> np.ndarray:
    row = _array(sample.truth, sample.where)
    if row.shape != (classes,) or not np.isin(row, (0, 1)).all():
        raise TaskError(
            f"{sample.where} must hold 0 or 1 for each of the {classes} lines of {CLASSNAMES}; "
            f"it has {row!r:.60}."
        )
    return row.astype(np.int64)


def _captions(sample: _Sample, classes: int) -> list[str]:
    lines = _caption_lines(sample.truth.decode("utf-8", errors="replace"))
    if not lines:
        raise TaskError(f"{sample.where} is empty; every image needs a caption.")
    return lines


_READERS = {"classification": _label, "multilabel": _targets, "retrieval": _captions}


def _caption_lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def _groups(sample: _Sample) -> np.ndarray:
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


def _open_associations(name: str, folder: Path) -> Task:
    path = folder / "associations.jsonl"
    numbers: dict[str, int] = {}
    cues = []
    for line, text in enumerate(_text(path).rstrip().split("\n"), start=1):
        cue, candidates, associations = _read_cue(text, f"{path}, line {line}")
        for candidate in candidates:
            numbers.setdefault(candidate, len(numbers))
        chosen = [candidate in associations for candidate in candidates]
        cues.append(Cue(cue, [numbers[candidate] for candidate in candidates], chosen))
    images = [ImagePlace(str(folder / "images" / candidate)) for candidate in numbers]
    missing = next((image.path for image in images if not os.path.exists(image.path)), None)
    if missing:
        raise TaskError(f"{missing} is missing, which {path.name} names. Get the task again.")
    return Task(name, "associations", images, cues=cues)


def _read_cue(text: str, where: str) -> tuple[str, list[str], list[str]]:
    try:
        entry = json.loads(text)
        cue, candidates, associations = (entry[key] for key in ("cue", "candidates", "associations"))
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f"{where}: needs cue, candidates and associations ({error}).") from None
    lists = isinstance(candidates, list) and isinstance(associations, list)
    if not lists or not all(isinstance(word, str) and word for word in (cue, *candidates, *associations)):
        raise TaskError(f"{where}: the cue must be text, the others lists of names of files in images.")
    if not associations or not set(associations) <= set(candidates):
        raise TaskError(f"{where}: associations must be some of the candidates.")
    return cue, candidates, associations


def _classnames(folder: Path) -> list[str]:
    return _lines(folder / CLASSNAMES, "a class name a line")


def _templates(folder: Path) -> list[str]:
    path = folder / TEMPLATES
    templates = _lines(path, "a template a line, such as: a photo of a {c}.")
    bad = next((template for template in templates if "{c}" not in template), None)
    if bad is not None:
        raise TaskError(f"{path}: the template {bad!r} has no {{c}} in the place of the class.")
    return templates


def _lines(path: Path, what: str) -> list[str]:
    """Without empty lines at the end; one before it would give every class after it another number."""
    text = _text(path).rstrip() if path.exists() else ""
    if not text:
        raise TaskError(f"{path} is missing or empty; it holds {what}.")
    lines = [line.strip() for line in text.split("\n")]
    if "" in lines:
        raise TaskError(f"{path}: line {lines.index('') + 1} is empty; it holds {what}.")
    return lines


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not text in UTF-8 ({error}); save it as such.") from None


def _take_fingerprints(task: Task, source: Sequence = ()) -> None:
    places = [(os.path.abspath(place.path), *place[1:]) for place in task.images]
    stamps = [_stamp(path) for path in sorted({place.path for place in task.images})]
    task.images_fingerprint = _digest([places, stamps, source])
    about = [task.kind, task.classnames, task.templates, task.captions, task.cues]
    task.fingerprint = _digest([task.images_fingerprint, *about])


def _stamp(path: str) -> list:
    try:
        found = os.stat(path)
    except OSError:  # elsewhere, or gone: its image will be left out
        return [os.path.abspath(path)]
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns]


def _digest(about: list) -> str:
    return blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()
