"""Zero-shot evaluation: from features to all scores of a task.

Similarities are exact, as in retrieval.py: ties go to the first class, for any tile and on any device.

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
from fastclip.evaluation.task_layout import Task, TaskError

if TYPE_CHECKING:
    from fastclip.evaluation.features import Encoder, ImageFeatures

log = logging.getLogger(__name__)


def score(task: Task, encoder: Encoder, images: ImageFeatures, *, tile: int = 4096) -> dict[str, float]:
    """All metrics of a task, as fractions (1 is 100 %); `tile` images are classified at a time."""
    if task.kind == "retrieval":
        captions = [task.captions[number] for number in images.kept_b.tolist()]
        return recalls(images.image_bd, *encoder.captions(captions))
    if task.kind == "associations":
        return _associations(task, encoder, images)
    class_Cd = classifier(encoder, task.classnames, task.templates)
    labels = torch.as_tensor(task.labels)[images.kept_b.cpu()]
    if task.kind == "multilabel":
        score_nC = torch.cat([score_tC.cpu() for score_tC in _similarities(images, class_Cd, tile)])
        return {name: measure(score_nC, labels) for name, measure in metrics.MULTILABEL.items()}
    tops = [metrics.likeliest(score_tC, 5).cpu() for score_tC in _similarities(images, class_Cd, tile)]
    top_n5 = torch.cat(tops)
    scores = {name: measure(top_n5, labels) for name, measure in metrics.CLASSIFICATION.items()}
    if task.groups is not None:  # the first column: region (FMoW, GeoDE), income (Dollar Street)
        groups = torch.as_tensor(task.groups[:, 0])[images.kept_b.cpu()]
        scores["acc_wg"] = metrics.worst_group_accuracy(top_n5, labels, groups)
        scores["acc_top5_wg"] = metrics.worst_group_accuracy(top_n5, labels, groups, k=5)
        scores["acc_worst_region"] = scores["acc_wg"]  # FMoW's name for it
    return scores


def classifier(encoder: Encoder, classnames: list[str], templates: list[str]) -> Tensor:
    """One vector per class: the normalised mean of its templates' unit-length features."""
    sentences = [template.replace("{c}", name) for name in classnames for template in templates]
    text = encoder.texts(sentences).view(len(classnames), len(templates), -1)
    return normalize(text.mean(dim=1), dim=-1)


def cue_prompt(cue: str) -> str:
    """The prompt that DataComp makes of a WinoGAViL cue."""
    cue = cue.lower()
    return f"{'An' if cue[:1] in ('a', 'e', 'i', 'o', 'u') else 'A'} {cue}"


def _similarities(images: ImageFeatures, class_Cd: Tensor, tile: int) -> Iterator[Tensor]:
    """Similarities of `tile` images at a time with all classes."""
    columns = on_grid(class_Cd).T
    return (on_grid(image_td) @ columns for image_td in images.image_bd.split(tile))


def _associations(task: Task, encoder: Encoder, images: ImageFeatures) -> dict[str, float]:
    """Mean Jaccard scores by number of candidates, as in DataComp; cues with unusable images are skipped."""
    row = {number: i for i, number in enumerate(images.kept_b.tolist())}
    cues = [cue for cue in task.cues if all(number in row for number in cue.candidates)]
    if not cues:
        raise TaskError(task.where(0), ": every cue has a candidate whose image cannot be used.")
    if skipped := len(task.cues) - len(cues):
        log.warning("%s: skipped %d of %d cues with unusable images.", task.name, skipped, len(task.cues))
    text = encoder.texts([cue_prompt(cue.text) for cue in cues])
    candidates = [images.image_bd[[row[number] for number in cue.candidates]] for cue in cues]
    similarities = [
        (on_grid(image_kd) @ on_grid(cue_d)).cpu() for image_kd, cue_d in zip(candidates, text, strict=True)
    ]
    values = metrics.jaccard(similarities, [torch.tensor(cue.associated) for cue in cues])
    sizes = torch.tensor([len(cue.candidates) for cue in cues])
    scores = {"avg_jaccard_score": float(values.mean())}
    for name, chosen in (("5-6", sizes <= 6), ("10-12", sizes >= 10)):
        if chosen.any():
            scores[f"jaccard_score_{name}"] = float(values[chosen].mean())
    return scores
