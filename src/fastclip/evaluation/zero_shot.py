"""What a model makes of a task it was not trained for, from features to every score of the task.

Similarities are exact, as in retrieval.py: of equal classes the first wins, whatever the tile or the device.

Shapes: n images, C classes, d features.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fastclip.evaluation import metrics
from fastclip.evaluation.retrieval import on_grid, recalls
from fastclip.evaluation.task_layout import Task

if TYPE_CHECKING:
    from fastclip.evaluation.features import Encoder, ImageFeatures

log = logging.getLogger(__name__)
_TILE = 4096  # images whose scores are in memory at once


def score(task: Task, encoder: Encoder, images: ImageFeatures) -> dict[str, float]:
    """Every measure of a task; a share of 1 is 100 %."""
    if task.kind == "retrieval":
        captions = [task.captions[number] for number in images.kept_b.tolist()]
        return recalls(images.image_bd, *encoder.captions(captions))
    if task.kind == "associations":
        return _associations(task, encoder, images)
    class_Cd = classifier(encoder, task.classnames, task.templates)
    labels = torch.as_tensor(task.labels)[images.kept_b.cpu()]
    if task.kind == "multilabel":
        score_nC = torch.cat([tile.cpu() for tile in _tiles(images, class_Cd)])
        return {name: measure(score_nC, labels) for name, measure in metrics.MULTILABEL.items()}
    top_n5 = torch.cat([metrics.likeliest(tile, 5).cpu() for tile in _tiles(images, class_Cd)])
    found = {name: measure(top_n5, labels) for name, measure in metrics.CLASSIFICATION.items()}
    if task.groups is not None:  # the first column: region (FMoW, GeoDE), income (Dollar Street)
        groups = torch.as_tensor(task.groups[:, 0])[images.kept_b.cpu()]
        found["acc_wg"] = metrics.worst_group_accuracy(top_n5, labels, groups)
        found["acc_top5_wg"] = metrics.worst_group_accuracy(top_n5, labels, groups, k=5)
        found["acc_worst_region"] = found["acc_wg"]  # FMoW's name for it
    return found


def classifier(encoder: Encoder, classnames: list[str], templates: list[str]) -> Tensor:
    """A class's vector: of each template's sentence, of unit length; their mean; of unit length again."""
    sentences = [template.replace("{c}", name) for name in classnames for template in templates]
    text = encoder.texts(sentences).view(len(classnames), len(templates), -1)
    return normalize(text.mean(dim=1), dim=-1)


def cue_prompt(cue: str) -> str:
    """How DataComp asks for a WinoGAViL cue."""
    cue = cue.lower()
    return f"{'An' if cue[:1] in ('a', 'e', 'i', 'o', 'u') else 'A'} {cue}"


def _tiles(images: ImageFeatures, class_Cd: Tensor) -> Iterator[Tensor]:
    """Similarities of some images with all classes."""
    columns = on_grid(class_Cd).T
    return (on_grid(tile) @ columns for tile in images.image_bd.split(_TILE))


def _associations(task: Task, encoder: Encoder, images: ImageFeatures) -> dict[str, float]:
    """A cue of which a candidate cannot be used is left out; the means are DataComp's, by candidates."""
    row = {number: i for i, number in enumerate(images.kept_b.tolist())}
    cues = [cue for cue in task.cues if all(number in row for number in cue.candidates)]
    if not cues:
        raise ValueError(f"{task.where(0)}: every cue has a candidate whose image cannot be used.")
    if left_out := len(task.cues) - len(cues):
        log.warning("%s: %d of %d cues are left out, for their images.", task.name, left_out, len(task.cues))
    text = encoder.texts([cue_prompt(cue.text) for cue in cues])
    candidates = [images.image_bd[[row[number] for number in cue.candidates]] for cue in cues]
    scores = [(on_grid(some) @ on_grid(word)).cpu() for some, word in zip(candidates, text, strict=True)]
    values = metrics.jaccard(scores, [torch.tensor(cue.associated) for cue in cues])
    sizes = torch.tensor([len(cue.candidates) for cue in cues])
    found = {"avg_jaccard_score": float(values.mean())}
    for name, chosen in (("5-6", sizes <= 6), ("10-12", sizes >= 10)):
        if chosen.any():
            found[f"jaccard_score_{name}"] = float(values[chosen].mean())
    return found
