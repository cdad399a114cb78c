"""Each metric equals scikit-learn's or a plain loop's, on random and on degenerate inputs."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    jaccard_score,
    top_k_accuracy_score,
)

from fastclip.errors import InputError
from fastclip.evaluation import metrics

close = pytest.approx  # relative tolerance 1e-6


def exactly(value):
    return close(value, rel=1e-12, abs=1e-12)


@st.composite
def classified(draw):
    """Scores with many ties, and labels; classes may be empty, never predicted, or the only one."""
    images, classes = draw(st.integers(1, 30)), draw(st.integers(1, 9))
    levels = draw(st.sampled_from((1, 2, 3, 1000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.integers(0, levels, (images, classes)).astype(np.float64)
    labels = rng.integers(0, draw(st.integers(1, classes)), images)
    return torch.tensor(scores), torch.tensor(labels)


def first_of_the_best(scores, k):
    """The k likeliest classes of each image, by a plain sort of (−score, class)."""
    order = [sorted(range(len(row)), key=lambda c: (-row[c], c)) for row in scores.tolist()]
    return [row[:k] for row in order]


@given(classified(), st.integers(1, 12))
def test_likeliest_classes_equal_those_of_a_plain_sort(case, k):
    scores, _ = case
    assert metrics.likeliest(scores, k).tolist() == first_of_the_best(scores, k)


@pytest.mark.slow
@given(classified())
def test_accuracy_recall_and_f1_equal_scikit_learn(case):
    scores, labels = case
    guesses = [row[0] for row in first_of_the_best(scores, 1)]
    top = metrics.likeliest(scores, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes that are predicted but never occur, or a single class
        expected = balanced_accuracy_score(labels, guesses)
        f1 = f1_score(labels, guesses, labels=np.unique(labels), average="macro", zero_division=0)
    assert metrics.accuracy(top, labels) == exactly(accuracy_score(labels, guesses))
    assert metrics.mean_per_class_recall(top, labels) == exactly(expected)
    assert metrics.macro_f1(top, labels) == exactly(f1)


@given(classified(), st.integers(1, 12))
def test_accuracy_at_k_equals_a_plain_loop(case, k):
    scores, labels = case
    guesses = first_of_the_best(scores, k)
    hits = [label in row for label, row in zip(labels.tolist(), guesses, strict=True)]
    assert metrics.accuracy(metrics.likeliest(scores, k), labels, k) == exactly(sum(hits) / len(hits))


@pytest.mark.parametrize("k", [1, 2, 5, 7, 9])
def test_accuracy_at_k_equals_scikit_learn_without_ties(k):
    """scikit-learn resolves ties to the higher class; k = 9 is more than the 7 classes."""
    rng = np.random.default_rng(k)
    scores, labels = rng.permuted(np.tile(np.arange(7.0), (200, 1)), axis=1), rng.integers(0, 7, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # k ≥ 7 is always right
        expected = top_k_accuracy_score(labels, scores, k=k, labels=np.arange(7))
    top = metrics.likeliest(torch.tensor(scores), k)
    assert metrics.accuracy(top, torch.tensor(labels), k) == exactly(expected)


def test_ties_go_to_the_lower_class():
    scores = torch.zeros(4, 3)
    labels = torch.tensor([0, 0, 1, 2])
    top = metrics.likeliest(scores, 5)
    assert top.tolist() == [[0, 1, 2]] * 4
    assert metrics.accuracy(top, labels) == 0.5
    assert metrics.accuracy(top, labels, 2) == 0.75
    assert metrics.mean_per_class_recall(top, labels) == close(1 / 3)
    assert metrics.macro_f1(top, labels) == close((2 * 2 / (2 + 4)) / 3)


def test_a_predicted_class_without_images_does_not_count():
    top, labels = torch.tensor([[0], [7], [0], [1]]), torch.tensor([0, 0, 1, 1])
    assert metrics.mean_per_class_recall(top, labels) == 0.5
    assert metrics.macro_f1(top, labels) == close((2 / 4 + 2 / 3) / 2)


@given(classified(), st.integers(1, 6), st.sampled_from((0, -3, 10**15)), st.integers(1, 6))
def test_worst_group_accuracy_equals_a_plain_loop(case, groups, first, k):
    """Group ids are any numbers: negative, huge, with gaps."""
    scores, labels = case
    group = torch.tensor(np.random.default_rng(len(labels)).integers(0, groups, len(labels)) * 2 + first)
    guesses = first_of_the_best(scores, k)
    hits = {}
    for row, label, name in zip(guesses, labels.tolist(), group.tolist(), strict=True):
        hits.setdefault(name, []).append(label in row)
    worst = min(sum(group_hits) / len(group_hits) for group_hits in hits.values())
    top = metrics.likeliest(scores, k)
    assert metrics.worst_group_accuracy(top, labels, group, k) == exactly(worst)
    if len(hits) == 1:
        assert metrics.worst_group_accuracy(top, labels, group, k) == metrics.accuracy(top, labels, k)


def test_groups_without_images_do_not_count():
    top, labels = torch.tensor([[0], [1], [1]]), torch.tensor([0, 1, 0])
    assert metrics.worst_group_accuracy(top, labels, torch.tensor([1, 1, 5])) == 0
    assert metrics.worst_group_accuracy(top, labels, torch.tensor([1, 5, 5])) == 0.5


@st.composite
def multilabel(draw):
    """Scores with many ties; images with no labels or all of them; classes without images."""
    images, classes = draw(st.integers(1, 25)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.integers(0, draw(st.sampled_from((1, 2, 4, 10_000))), (images, classes)) / 7
    targets = rng.random((images, classes)) < draw(st.sampled_from((0.1, 0.5, 1)))
    targets[0, 0] = True
    return scores, targets.astype(np.int64)


@pytest.mark.slow
@given(multilabel())
@example((np.array([[0.5], [0.5], [0.1]]), np.array([[0], [1], [0]])))
def test_mean_average_precision_equals_scikit_learn_over_the_classes_that_occur(case):
    scores, targets = case
    each = [
        average_precision_score(targets[:, c], scores[:, c])
        for c in range(targets.shape[1])
        if targets[:, c].any()
    ]
    value = metrics.mean_average_precision(torch.tensor(scores), torch.tensor(targets))
    assert value == exactly(np.mean(each))


def test_mean_average_precision_does_not_depend_on_the_order_of_images():
    rng = np.random.default_rng(0)
    scores, targets = torch.tensor(rng.integers(0, 3, (40, 5))), torch.tensor(rng.integers(0, 2, (40, 5)))
    order = torch.tensor(rng.permutation(40))
    once = metrics.mean_average_precision(scores, targets)
    assert metrics.mean_average_precision(scores[order], targets[order]) == exactly(once)


def test_mean_average_precision_without_labels_is_an_error():
    with pytest.raises(InputError) as caught:
        metrics.mean_average_precision(torch.rand(3, 2), torch.zeros(3, 2))
    assert caught.value.argument == "target_nc"


@st.composite
def cues(draw):
    """Cues with 2 to 12 candidates, one to all of them associated; scores with ties."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    drawn = []
    for _ in range(draw(st.integers(1, 8))):
        size = rng.integers(2, 13)
        truth = np.arange(size) < rng.integers(1, size + 1)
        drawn.append((rng.integers(0, 4, size) / 3, rng.permutation(truth)))
    return drawn


@pytest.mark.slow
@given(cues())
def test_jaccard_equals_scikit_learn_for_the_highest_candidates(case):
    expected = []
    for scores, truth in case:
        best = sorted(range(len(scores)), key=lambda i: (scores[i], i))[-truth.sum() :]
        expected.append(jaccard_score(truth, np.isin(np.arange(len(scores)), best)))
    scores, truths = ([torch.tensor(row) for row in rows] for rows in zip(*case, strict=True))
    assert metrics.jaccard(scores, truths).tolist() == [exactly(value) for value in expected]


def test_jaccard_with_all_none_and_some_correct():
    truth = torch.tensor([True, True, False, False, False])
    rows = [[5.0, 4, 3, 2, 1], [1.0, 2, 3, 4, 5], [5.0, 1, 4, 2, 3]]
    values = metrics.jaccard([torch.tensor(row) for row in rows], [truth] * 3)
    assert values.tolist() == [1, 0, 1 / 3]
