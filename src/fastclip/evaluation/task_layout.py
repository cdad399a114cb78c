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

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fastclip.data.images import UnusableSample
from fastclip.data.manifest import Manifest, caption_lines, digest, open_manifest
from fastclip.data.sources import FOLDER_TABLES, IMAGE_EXTENSIONS, TABLES
from fastclip.evaluation import task_shards
from fastclip.evaluation.task_shards import CLASSNAMES, TEMPLATES, ImagePlace, TaskError, read_text

log = logging.getLogger(__name__)
Kind = Literal["classification", "multilabel", "retrieval", "associations"]
LABELS = {"classification": "cls", "multilabel": "npy", "retrieval": "txt"}  # what a shard's images have
DEFAULT_TEMPLATES = ("a photo of a {c}.",)


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
    labels: np.ndarray | None = None  # a class an image; for multilabel 0 or 1 for each class
    captions: list[list[str]] = field(default_factory=list)  # of each image (retrieval)
    groups: np.ndarray | None = None  # images × columns: region, income and the like, as numbers
    cues: list[Cue] = field(default_factory=list)
    fingerprint: str = ""  # changes when a file, a class name or a template does
    images_fingerprint: str = ""  # changes when an image, or their order, does: features depend on it

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
        except UnusableSample:  # it is blank
            continue
        images.append(PairPlace(manifest, sample))
        captions.append(caption_lines(caption))
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

    def caption(self) -> str:
        return self.manifest.caption_at(self.manifest.place(self.sample))


def _is_task(folder: Path) -> bool:
    named = ("associations.jsonl", "dataset_type.txt", CLASSNAMES)
    return any((folder / name).exists() for name in named) or _has_shards(folder)


def _has_shards(folder: Path) -> bool:
    return (folder / "test" / "nshards.txt").exists() or any((folder / "test").glob("*.tar"))


def _class_folders(folder: Path) -> list[Path]:
    """Folders with images directly in them; none if there are captions, for then they are pairs."""
    tables = (*TABLES, "tar")
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
    folders = [path.name.replace("_", " ") for path in classes]
    classnames = _classnames(folder) if (folder / CLASSNAMES).exists() else folders
    templates = _templates(folder) if (folder / TEMPLATES).exists() else list(DEFAULT_TEMPLATES)
    if not len(classnames) == len(classes) > 1:
        raise TaskError(
            f"{folder} has {len(classes)} folders of images and {len(classnames)} class names. It needs "
            f"two folders or more, and a line for each, in the order of their names, in {CLASSNAMES}, if "
            "there is such a file."
        )
    return Task(name, "classification", images, classnames, templates, np.array(labels))


def _open_shards(name: str, folder: Path) -> Task:
    paths, kind = task_shards.find_shards(folder), _kind(folder)
    classnames, templates = ([], []) if kind == "retrieval" else (_classnames(folder), _templates(folder))
    images, groups = [], []
    truths: list[Any] = []
    for sample in (sample for path in paths for sample in task_shards.read_samples(path, LABELS[kind])):
        images.append(sample.image)
        truths.append(task_shards.TRUTHS[kind](sample, len(classnames)))
        if kind == "classification" and sample.groups is not None:
            groups.append(task_shards.read_groups(sample))
        if groups and (len(groups) != len(images) or groups[-1].shape != groups[0].shape):
            raise TaskError(f"{sample.where}: every image needs as many groups, in a .npy, as the others.")
    if kind == "retrieval":
        return Task(name, kind, images, captions=truths)
    grouped = np.array(groups) if groups else None
    return Task(name, kind, images, classnames, templates, np.array(truths), groups=grouped)


def _kind(folder: Path) -> Kind:
    file = folder / "dataset_type.txt"
    kind = read_text(file).strip().lower() if file.exists() else "classification"
    if kind not in LABELS:
        raise TaskError(f"{file} says {kind!r}; it must be one of {', '.join(LABELS)}.")
    return kind  # type: ignore[return-value]


def _open_associations(name: str, folder: Path) -> Task:
    path = folder / "associations.jsonl"
    numbers: dict[str, int] = {}
    cues = []
    for line, text in enumerate(read_text(path).rstrip().split("\n"), start=1):
        cue, candidates, associations = _read_cue(text, f"{path}, line {line}")
        for candidate in candidates:
            numbers.setdefault(candidate, len(numbers))
        chosen = [candidate in associations for candidate in candidates]
        cues.append(Cue(cue, [numbers[candidate] for candidate in candidates], chosen))
    images = [ImagePlace(str(folder / "images" / candidate)) for candidate in numbers]
    if missing := next((image.path for image in images if not os.path.exists(image.path)), None):
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
    text = read_text(path).rstrip() if path.exists() else ""
    if not text:
        raise TaskError(f"{path} is missing or empty; it holds {what}.")
    lines = [line.strip() for line in text.split("\n")]
    if "" in lines:
        raise TaskError(f"{path}: line {lines.index('') + 1} is empty; it holds {what}.")
    return lines


def _take_fingerprints(task: Task, source: Sequence = ()) -> None:
    places = [(os.path.abspath(place.path), *place[1:]) for place in task.images]
    stamps = [_stamp(path) for path in sorted({place.path for place in task.images})]
    task.images_fingerprint = digest([places, stamps, source])
    about = [task.kind, task.classnames, task.templates, task.captions, task.cues]
    task.fingerprint = digest([task.images_fingerprint, *about])


def _stamp(path: str) -> list:
    try:
        found = os.stat(path)
    except OSError:  # elsewhere, or gone: its image will be left out
        return [os.path.abspath(path)]
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns]
