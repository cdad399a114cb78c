"""The metrics of the DataComp tasks, as DataComp computes them. Pure functions of predictions and labels.

Shapes: n images, C classes, k guesses; `top_nk` holds each image's classes, likeliest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fastclip.errors import InputError


def likeliest(score_nc: Tensor, k: int) -> Tensor:
    """The k classes with the highest scores, in descending order; ties go to the lower class."""
    return score_nc.argsort(dim=1, descending=True, stable=True)[:, :k]


def accuracy(top_nk: Tensor, label_n: Tensor, k: int = 1) -> float:
    """Share of images whose label is among the k likeliest classes."""
    return float(_hits(top_nk, label_n, k).double().mean())


def mean_per_class_recall(top_nk: Tensor, label_n: Tensor) -> float:
    """Mean recall over the classes that occur."""
    hits, images = _per_class(_hits(top_nk, label_n, 1), label_n)
    return float((hits / images)[images > 0].mean())


def macro_f1(top_nk: Tensor, label_n: Tensor) -> float:
    """Mean F1 over the classes that occur among the labels (iWildCam)."""
    classes = int(torch.maximum(top_nk[:, 0].max(), label_n.max())) + 1
    hits, images = _per_class(_hits(top_nk, label_n, 1), label_n, classes)
    guesses = torch.bincount(top_nk[:, 0], minlength=classes).double()
    return float((2 * hits / (images + guesses))[images > 0].mean())


def worst_group_accuracy(top_nk: Tensor, label_n: Tensor, group_n: Tensor, k: int = 1) -> float:
    """The lowest accuracy of any group that has images; group ids may be any numbers."""
    hits, images = _per_class(_hits(top_nk, label_n, k), group_n.unique(return_inverse=True)[1])
    return float((hits / images).min())


def mean_average_precision(score_nc: Tensor, target_nc: Tensor) -> float:
    """Mean over classes of the area under the precision-recall curve, for images with any number of labels.

    Images with equal scores count together, so their order does not matter. Classes without images are
    excluded.
    """
    precisions = [
        _average_precision(score_nc[:, c], target_nc[:, c].bool())
        for c in range(score_nc.shape[1])
        if target_nc[:, c].any()
    ]
    if not precisions:
        raise InputError("target_nc", "has no positive labels, so there is no precision to average.")
    return sum(precisions) / len(precisions)


def jaccard(scores: Sequence[Tensor], associated: Sequence[Tensor]) -> Tensor:
    """WinoGAViL: for each cue, |chosen ∩ associated| / |chosen ∪ associated| among its candidates.

    The candidates with the highest scores are chosen, as many as are associated; ties go to the later one.
    """
    values = []
    for score, truth in zip(scores, associated, strict=True):
        count = int(truth.sum())
        chosen = torch.zeros_like(truth, dtype=torch.bool)
        chosen[score.argsort(stable=True)[len(score) - count :]] = True
        values.append(int((chosen & truth).sum()) / int((chosen | truth).sum()))
    return torch.tensor(values, dtype=torch.float64)


# Every metric of a task by name, in the order they are reported: add one here
CLASSIFICATION: dict[str, Callable[[Tensor, Tensor], float]] = {
    "acc1": accuracy,
    "acc5": partial(accuracy, k=5),
    "mean_per_class_recall": mean_per_class_recall,
    "F1-macro_all": macro_f1,
}
MULTILABEL: dict[str, Callable[[Tensor, Tensor], float]] = {"mean_average_precision": mean_average_precision}


def _hits(top_nk: Tensor, label_n: Tensor, k: int) -> Tensor:
    return (top_nk[:, :k] == label_n[:, None]).any(dim=1)


def _per_class(hit_n: Tensor, class_n: Tensor, classes: int = 0) -> tuple[Tensor, Tensor]:
    """Hits and images of each class or group."""
    hits = torch.bincount(class_n, weights=hit_n.double(), minlength=classes)
    return hits, torch.bincount(class_n, minlength=classes).double()


def _average_precision(score_n: Tensor, target_n: Tensor) -> float:
    order = score_n.argsort(descending=True, stable=True)
    score_n, target_n = score_n[order], target_n[order].double()
    last_of_equals = torch.cat([score_n[1:] != score_n[:-1], score_n.new_ones(1, dtype=torch.bool)])
    found = target_n.cumsum(0)[last_of_equals]
    seen = torch.arange(1, len(score_n) + 1, device=score_n.device)[last_of_equals]
    recall = found / found[-1]
    return float((recall.diff(prepend=recall.new_zeros(1)) * found / seen).sum())
