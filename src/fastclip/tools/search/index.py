"""Search for images by text or by image, with an index of features that is cached in the run's folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from fastclip.data.contact_sheet import draw_contact_sheet
from fastclip.data.images import UnusableSample, thumbnail, upright_rgb
from fastclip.data.manifest import digest, open_manifest
from fastclip.data.pairs import COMMON_COLUMNS, Columns, File, Pair, SourceError, caption_lines
from fastclip.data.remote import is_remote
from fastclip.data.sources import FOLDER_TABLES, IMAGE_EXTENSIONS, find_files, read_pairs, tar_members
from fastclip.distributed.device import find_device
from fastclip.distributed.world import World
from fastclip.errors import PathError
from fastclip.evaluation.feature_cache import cached_features, model_key
from fastclip.evaluation.features import Encoder, ImageFeatures
from fastclip.evaluation.task_layout import PairPlace
from fastclip.evaluation.task_shards import ImagePlace
from fastclip.files import cache_path
from fastclip.run.folder import formats_of, is_run
from fastclip.run.load import Model, load

log = logging.getLogger(__name__)
_CAPTION_BATCH = 1024


class Match(NamedTuple):
    """An image that matches a query."""

    number: int
    name: str
    score: float  # the cosine between the features


class CaptionMatch(NamedTuple):
    """A caption that matches a query."""

    text: str
    score: float  # the cosine between the features


class Picture(NamedTuple):
    """An image to search: its name, location and captions."""

    name: str
    place: ImagePlace | PairPlace
    text: ImagePlace | str = ""
    """Its captions, or their location; unused for pairs, which have their own."""

    @property
    def captions(self) -> list[str]:
        """One per line; empty if there are none or they cannot be read."""
        try:
            if isinstance(self.place, PairPlace):
                return caption_lines(self.place.caption())
            if isinstance(self.text, str):
                return caption_lines(self.text)
            return caption_lines(self.text.read().decode("utf-8-sig", errors="replace"))
        except (OSError, UnusableSample):
            return []


class Pictures:
    """Images by number, with a fingerprint that changes when one of them does."""

    def __init__(self, pictures: list[Picture], fingerprint: str):
        self.pictures, self.fingerprint = pictures, fingerprint

    def __len__(self) -> int:
        return len(self.pictures)

    def image(self, number: int) -> bytes:
        return self.pictures[number].place.read()

    def where(self, number: int) -> str:
        return self.pictures[number].name


class Index:
    """Features of images, and the model that encodes queries."""

    def __init__(
        self, pictures: Pictures, model: Model, features: ImageFeatures, formats: Sequence[str] = ()
    ):
        self.pictures, self.model, self.features, self.formats = pictures, model, features, formats
        self._caption_md: Tensor | None = None

    @classmethod
    def open(
        cls,
        model: str,
        images: str | list[str],
        pretrained: str | None = None,
        checkpoint: Literal["last", "best"] = "last",
        workers: int = 2,
        progress: Callable[[int, int], None] | None = None,
        columns: Columns = COMMON_COLUMNS,
        formats: Sequence[str] = (),
    ) -> Index:
        """Open the cached index, or build it if there is none or the model or a file has changed.

        `columns` names a table's columns of images and captions, if they are unusual, and its encoding.
        `formats` are those of `upright_rgb`, and the run's data.formats are added.
        """
        formats = (*formats_of(model), *formats)
        pictures = list_pictures(images, columns)
        device = find_device(local_rank=0)
        loaded = load(model, pretrained=pretrained, checkpoint=checkpoint, device=device)
        encoder = Encoder(loaded.towers, World.alone(device), workers=workers, formats=formats)
        file = _index_file(Path(model).expanduser(), images)
        key = digest([model_key(loaded.towers, None), pictures.fingerprint])
        return cls(pictures, loaded, cached_features(pictures, encoder, file, key, progress), formats)

    def by_text(self, text: str, top: int) -> list[Match]:
        """The images most similar to a text, best first."""
        return self.nearest_pictures(self.model.encode_text(text)[0], top)

    def by_image(self, image: Image.Image | Path, top: int) -> list[Match]:
        """The images most similar to this one, best first."""
        return self.nearest_pictures(self._encode(image), top)

    def captions_for(self, image: Image.Image | Path, top: int) -> list[CaptionMatch]:
        """The captions of any image that are most similar to this image, best first."""
        return self.nearest_captions(self._encode(image), top)

    def _encode(self, query: Image.Image | Path) -> Tensor:
        if not isinstance(query, Path):
            return self.model.encode_image(query)[0]
        try:
            image = upright_rgb(query.read_bytes(), formats=self.formats)
        except UnusableSample as error:
            raise PathError(query, f"cannot be used: {error}.") from error
        return self.model.encode_image(image)[0]

    def nearest_captions(self, query_d: Tensor, top: int) -> list[CaptionMatch]:
        """The captions with the nearest features, best first."""
        if not self.captions:
            return []
        rows, scores = _best(self.caption_features() @ query_d, top)
        return [CaptionMatch(self.captions[row], score) for row, score in zip(rows, scores, strict=True)]

    @cached_property
    def captions(self) -> list[str]:
        """The distinct captions of the usable images, in order."""
        kept = (self.pictures.pictures[number] for number in self.features.kept_b.tolist())
        return list(dict.fromkeys(caption for picture in kept for caption in picture.captions))

    def caption_features(self, progress: Callable[[int, int], None] | None = None) -> Tensor:
        """One row for each of `captions`, encoded once; `progress` takes (done, total)."""
        if self._caption_md is None:
            parts = []
            for start in range(0, len(self.captions), _CAPTION_BATCH):
                parts.append(self.model.encode_text(self.captions[start : start + _CAPTION_BATCH]))
                if progress is not None:
                    progress(start + len(parts[-1]), len(self.captions))
            self._caption_md = torch.cat(parts) if parts else self.features.image_bd.new_empty(0, 0)
        return self._caption_md

    def draw(self, matches: list[Match], path: Path) -> None:
        """Draw a contact sheet of matches."""
        images = [self.image(match.number) for match in matches]
        labels = [f"{match.score:.3f}\n{Path(match.name).name}" for match in matches]
        draw_contact_sheet(list(zip(images, labels, strict=True)), path)

    def image(self, number: int) -> Image.Image:
        """An image, decoded; raises UnusableSample."""
        return upright_rgb(self.pictures.image(number), formats=self.formats)

    def thumbnail(self, number: int, side: int) -> bytes:
        """An image as WebP, no side longer than `side`; raises UnusableSample."""
        return thumbnail(self.pictures.image(number), side, self.formats)

    def nearest_pictures(self, query_d: Tensor, top: int) -> list[Match]:
        """The images with the nearest features, best first."""
        rows, scores = _best(self.features.image_bd @ query_d, top)
        numbers = self.features.kept_b[rows].tolist()
        return [Match(i, self.pictures.where(i), score) for i, score in zip(numbers, scores, strict=True)]


def _best(scores: Tensor, top: int) -> tuple[list[int], list[float]]:
    """The rows with the highest scores, and these scores; ties go to the first row."""
    best = scores.argsort(descending=True, stable=True)[:top]
    return best.tolist(), scores[best].tolist()


def list_pictures(images: str | list[str], columns: Columns = COMMON_COLUMNS) -> Pictures:
    """The images in a folder, its subfolders and their tars; or those of any pairs."""
    paths = [images] if isinstance(images, str) else images
    folder = Path(paths[0]).expanduser()
    if len(paths) == 1 and folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        loose = [path for path in files if path.suffix[1:].lower() in IMAGE_EXTENSIONS]
        tars = [path for path in files if path.suffix == ".tar"]
        if loose or tars:
            return _in_files(folder, loose, tars)
    sources = find_files(images)
    if all(file.kind == "tar" and not is_remote(file.path) for file in sources):
        tars = [Path(file.path) for file in sources]
        return _in_files(Path(os.path.commonpath([tar.parent for tar in tars])), [], tars)
    manifest = open_manifest(images, columns)
    pictures = [Picture(manifest.where(i), PairPlace(manifest, i)) for i in range(len(manifest))]
    stamps = [_stamp(path) for path in sorted({Path(picture.name) for picture in pictures})]
    return Pictures(pictures, digest([manifest.fingerprint, stamps]))


def _in_files(folder: Path, loose: list[Path], tars: list[Path]) -> Pictures:
    captions = _captions_in_tables(folder)
    pictures = []
    for path in loose:
        name, beside = str(path.relative_to(folder)), path.with_suffix(".txt")
        text = ImagePlace(str(beside)) if beside.exists() else captions.get(name, "")
        pictures.append(Picture(name, ImagePlace(str(path)), text))
    for path in tars:
        with path.open("rb") as stream:
            members, damage = tar_members(stream)
        if damage:
            log.warning("%s: %s; using the images that can be read.", path, damage)
        plain = [(one, ImagePlace(str(path), one.offset, one.size)) for one in members if one.plain]
        texts = {member.key: place for member, place in plain if member.extension == "txt"}
        for member, place in plain:
            if member.extension in IMAGE_EXTENSIONS:
                name = f"{path.relative_to(folder)}/{member.key}.{member.extension}"
                pictures.append(Picture(name, place, texts.get(member.key, "")))
    if not pictures:
        raise PathError(tars[0], f"holds no images ({', '.join(IMAGE_EXTENSIONS)}).")
    stamps = [[str(path.relative_to(folder)), *_stamp(path)] for path in (*loose, *tars)]
    return Pictures(pictures, digest(stamps))


def _captions_in_tables(folder: Path) -> dict[str, str]:
    """Captions by image name, from metadata.jsonl or captions.csv."""
    if not any((folder / name).exists() for name in FOLDER_TABLES):
        return {}
    try:
        pairs = list(read_pairs(File(str(folder), "folder")))
    except SourceError as error:  # a table of labels, say
        log.info("%s: searching its images without captions (%s)", folder, error)
        return {}
    return {
        pair.image: pair.caption
        for pair in pairs
        if isinstance(pair, Pair) and isinstance(pair.image, str) and isinstance(pair.caption, str)
    }


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:  # remote, or deleted: its image will be skipped
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _index_file(model: Path, images: str | list[str]) -> Path:
    """In RUN/search for a run; in the cache for any other model."""
    paths = [images] if isinstance(images, str) else images
    name = digest([os.path.abspath(Path(path).expanduser()) for path in paths])
    if is_run(model):
        return model / "search" / f"{name}.safetensors"
    return cache_path("search") / f"{digest([os.path.abspath(model), name])}.safetensors"
