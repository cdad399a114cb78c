"""A task on disk: CLIP_benchmark's and DataComp's folders, a folder of class folders, or pairs.

    TASK/classnames.txt                          one class per line; a label is a line number, from 0
    TASK/zeroshot_classification_templates.txt   one sentence per line, with {c} in place of the class
    TASK/dataset_type.txt                        classification (default), multilabel or retrieval
    TASK/test/nshards.txt, TASK/test/0.tar …     each image with .cls, its label; .txt, one caption per line
                                                 (retrieval); .npy, 0 or 1 for each class (multilabel), or
                                                 beside .cls the groups it belongs to

    TASK/associations.jsonl, TASK/images/…       WinoGAViL: {"cue": …, "candidates": […], "associations": […]}
                                                 per line; the last two list file names in images

    TASK/CLASS/*.jpg                             classes are the sorted folder names; the first two files are
                                                 read if present

A missing or inconsistent file raises a TaskError that names it; an incomplete task is never scored.
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
from fastclip.data.manifest import Manifest, digest, open_manifest
from fastclip.data.pairs import caption_lines
from fastclip.data.sources import FOLDER_TABLES, IMAGE_EXTENSIONS, TABLES
from fastclip.evaluation import task_shards
from fastclip.evaluation.task_shards import CLASSNAMES, TEMPLATES, ImagePlace, TaskError, read_text
from fastclip.text import did_you_mean

log = logging.getLogger(__name__)
Kind = Literal["classification", "multilabel", "retrieval", "associations"]
LABELS = {"classification": "cls", "multilabel": "npy", "retrieval": "txt"}  # extension beside each image
DEFAULT_TEMPLATES = ("a photo of a {c}.",)


class Cue(NamedTuple):
    """A word, its candidate images, and which of them annotators associated with it."""

    text: str
    candidates: list[int]
    associated: list[bool]


@dataclass
class Task:
    """Classes, captions or cues to score a model on, and where the images are."""

    name: str
    kind: Kind
    images: Sequence[ImagePlace | PairPlace]
    classnames: list[str] = field(default_factory=list)
    templates: list[str] = field(default_factory=list)
    labels: np.ndarray | None = None  # one class per image; for multilabel 0 or 1 for each class
    captions: list[list[str]] = field(default_factory=list)  # of each image (retrieval)
    groups: np.ndarray | None = None  # images × columns: region, income and so on, as numbers
    cues: list[Cue] = field(default_factory=list)
    fingerprint: str = ""  # changes with any file, class name or template
    images_fingerprint: str = ""  # changes with the images and their order, as features do

    def __len__(self) -> int:
        return len(self.images)

    def image(self, number: int) -> bytes:
        return self.images[number].read()

    def where(self, number: int) -> str:
        return self.images[number].path


def find_tasks(folder: Path) -> dict[str, Path]:
    """Task folders in a folder, by name; the folder itself if it is a task; empty if there are none."""
    if _is_task(folder):
        return {folder.name: folder}
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    if not any(_is_task(path) for path in inside) and _class_folders(folder):
        return {folder.name: folder}
    return {path.name: path for path in inside if _is_task(path) or _class_folders(path)}


def open_task(name: str, folder: Path) -> Task:
    """Read a task's labels and captions, and locate its images."""
    if (folder / "associations.jsonl").exists():
        task = _open_associations(name, folder)
    elif not _has_shards(folder) and (classes := _class_folders(folder)):
        task = _open_class_folders(name, folder, classes)
    else:
        task = _open_shards(name, folder)
    _take_fingerprints(task)
    return task


def open_pairs_task(paths: str) -> Task:
    """Open any source of pairs for retrieval: shards, a table, a folder with captions."""
    manifest = open_manifest(paths)
    images, captions = [], []
    for sample in range(len(manifest)):
        try:
            caption = manifest.caption_at(manifest.place(sample))
        except UnusableSample:  # a blank caption, or not UTF-8
            continue
        images.append(PairPlace(manifest, sample))
        captions.append(caption_lines(caption))
    if not images:
        raise TaskError(paths, "has no usable captions; retrieval needs one for each image.")
    if len(images) < len(manifest):
        skipped = len(manifest) - len(images)
        log.warning("%s: skipped %d of %d images without a usable caption.", paths, skipped, len(manifest))
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
    names = ("associations.jsonl", "dataset_type.txt", CLASSNAMES)
    return any((folder / name).exists() for name in names) or _has_shards(folder)


def _has_shards(folder: Path) -> bool:
    return (folder / "test" / "nshards.txt").exists() or any((folder / "test").glob("*.tar"))


def _class_folders(folder: Path) -> list[Path]:
    """Folders with images directly in them; none if there are captions, since those are pairs."""
    tables = (*TABLES, "tar")
    if any(name in FOLDER_TABLES or _extension(name) in tables for name in os.listdir(folder)):
        return []
    classes = []
    for path in sorted(folder.iterdir()):
        image = next((file for file in path.iterdir() if _is_image(file)), None) if path.is_dir() else None
        if image is not None and image.with_suffix(".txt").exists():
            return []
        if image is not None:
            classes.append(path)
    return classes


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
            folder,
            f"has {len(classes)} folders of images and {len(classnames)} class names. It must have at least "
            f"two folders; {CLASSNAMES}, if present, must have one line per folder, in sorted order.",
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
            raise sample.error("must have as many groups as the other images.", "npy")
    if kind == "retrieval":
        return Task(name, kind, images, captions=truths)
    grouped = np.array(groups) if groups else None
    return Task(name, kind, images, classnames, templates, np.array(truths), groups=grouped)


def _kind(folder: Path) -> Kind:
    file = folder / "dataset_type.txt"
    kind = read_text(file).strip().lower() if file.exists() else "classification"
    if kind not in LABELS:
        raise TaskError(
            file, f"says {kind!r}; it must be one of: {', '.join(LABELS)}.{did_you_mean(kind, LABELS)}"
        )
    return kind  # type: ignore[return-value]


def _open_associations(name: str, folder: Path) -> Task:
    path = folder / "associations.jsonl"
    numbers: dict[str, int] = {}
    cues = []
    for line, text in enumerate(read_text(path).rstrip().split("\n"), start=1):
        cue, candidates, associations = _read_cue(text, path, line)
        for candidate in candidates:
            numbers.setdefault(candidate, len(numbers))
        chosen = [candidate in associations for candidate in candidates]
        cues.append(Cue(cue, [numbers[candidate] for candidate in candidates], chosen))
    images = [ImagePlace(str(folder / "images" / candidate)) for candidate in numbers]
    if missing := next((image.path for image in images if not os.path.exists(image.path)), None):
        raise TaskError(missing, f"is listed in {path.name} but missing. Download the task again.")
    return Task(name, "associations", images, cues=cues)


def _read_cue(text: str, path: Path, line: int) -> tuple[str, list[str], list[str]]:
    try:
        entry = json.loads(text)
        cue, candidates, associations = (entry[key] for key in ("cue", "candidates", "associations"))
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(
            path, f", line {line}: must have the keys cue, candidates and associations ({error})."
        ) from None
    lists = isinstance(candidates, list) and isinstance(associations, list)
    if not lists or not all(isinstance(value, str) and value for value in (cue, *candidates, *associations)):
        raise TaskError(
            path,
            f", line {line}: cue must be text; candidates and associations, lists of file names in images.",
        )
    if not associations or not set(associations) <= set(candidates):
        raise TaskError(path, f", line {line}: associations must be one or more of the candidates.")
    return cue, candidates, associations


def _classnames(folder: Path) -> list[str]:
    return _lines(folder / CLASSNAMES, "one class name per line")


def _templates(folder: Path) -> list[str]:
    path = folder / TEMPLATES
    templates = _lines(path, 'one template per line, such as "a photo of a {c}"')
    bad = next((template for template in templates if "{c}" not in template), None)
    if bad is not None:
        raise TaskError(path, f": the template {bad!r} must contain {{c}} in place of the class.")
    return templates


def _lines(path: Path, content: str) -> list[str]:
    """Lines without empty ones at the end; an empty line elsewhere would shift the labels after it."""
    text = read_text(path).rstrip() if path.exists() else ""
    if not text:
        raise TaskError(path, f"is missing or empty; it must hold {content}.")
    lines = [line.strip() for line in text.split("\n")]
    if "" in lines:
        raise TaskError(path, f", line {lines.index('') + 1}, is empty; the file must hold {content}.")
    return lines


def _take_fingerprints(task: Task, source: Sequence = ()) -> None:
    places = [(os.path.abspath(place.path), *place[1:]) for place in task.images]
    stamps = [_stamp(path) for path in sorted({place.path for place in task.images})]
    task.images_fingerprint = digest([places, stamps, source])
    texts = [task.kind, task.classnames, task.templates, task.captions, task.cues]
    task.fingerprint = digest([task.images_fingerprint, *texts])


def _stamp(path: str) -> list:
    try:
        status = os.stat(path)
    except OSError:  # remote, or deleted: its image will be skipped
        return [os.path.abspath(path)]
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]
