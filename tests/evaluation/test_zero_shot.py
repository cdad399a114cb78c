"""Scores of each kind of task equal those of a plain script that uses only open_clip and scikit-learn."""

import io
import json
import logging
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    jaccard_score,
)

from fastclip.distributed.world import World
from fastclip.errors import InputError
from fastclip.evaluation.features import Encoder
from fastclip.evaluation.task_layout import TaskError, open_task
from fastclip.evaluation.zero_shot import classifier, cue_prompt, score
from tests.data.collections import encode, picture, png
from tests.evaluation.test_task_layout import npy, write_task
from tests.ranks import run_ranks

TRANSFORM = open_clip.image_transform(16, is_train=False)
TOKENIZER = open_clip.SimpleTokenizer(context_length=8)
HOW = {"transform": TRANSFORM, "tokenizer": TOKENIZER, "batch_size": 7}
NAMES = ["cat", "dog", "red panda", "ox", "bird", "fish", "ant"]
TEMPLATES = ["a {c}.", "a photo of {c}", "{c}"]


def tiny_model(image_size=16):
    """Large weights, to distinguish images and texts; float64, so that rounding decides nothing."""
    torch.manual_seed(1)
    vision = open_clip.CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=image_size)
    text = open_clip.CLIPTextCfg(context_length=8, width=32, heads=2, layers=1)
    clip = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text).eval().double()
    with torch.no_grad():
        for parameter in clip.parameters():
            parameter.normal_(std=0.5)
    return SimpleNamespace(clip=clip, encode_text=lambda tokens: clip.encode_text(tokens, normalize=True))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def scored(task, model, world=None, tile=4096, **how):
    encoder = Encoder(model, world or World.alone(), **HOW | how)
    return score(task, encoder, encoder.images(task), tile=tile)


# The plain script


@torch.no_grad()
def plain_images(model, files):
    images = torch.stack([TRANSFORM(Image.open(io.BytesIO(file))) for file in files])
    return model.clip.encode_image(images.double(), normalize=True).numpy()


@torch.no_grad()
def plain_text(model, text):
    return model.clip.encode_text(TOKENIZER([text]), normalize=True)[0].numpy()


def plain_classifier(model, names, templates):
    columns = []
    for name in names:
        mean = sum(plain_text(model, template.replace("{c}", name)) for template in templates) / len(
            templates
        )
        columns.append(mean / np.sqrt((mean**2).sum()))
    return np.stack(columns)


def plain_scores(model, files, names=NAMES):
    return plain_images(model, files) @ plain_classifier(model, names, TEMPLATES).T


# Classification


def classification(folder, damaged=(), names=NAMES, n=60):
    """Images from dark to bright, so that predictions differ; the last class never occurs."""
    rng = np.random.default_rng(0)
    files = [encode(picture(i).point(lambda v, i=i: v * (i % 7 + 1) // 7)) for i in range(n)]
    labels, groups = rng.integers(0, 6, n), np.stack([rng.integers(0, 5, n), np.arange(n)], axis=1)
    samples = [
        {
            "png": files[i][:1000] if i in damaged else files[i],
            "cls": b"%d" % labels[i],
            "npy": npy(groups[i]),
        }
        for i in range(n)
    ]
    task = open_task(
        "task", write_task(folder, [samples[:25], samples[25:]], None, "\n".join(names), "\n".join(TEMPLATES))
    )
    return task, files, labels, groups[:, 0]


def test_the_classifier_normalises_averages_and_normalises_again(model):
    class_Cd = classifier(Encoder(model, World.alone(), **HOW), NAMES, TEMPLATES)
    np.testing.assert_allclose(class_Cd.numpy(), plain_classifier(model, NAMES, TEMPLATES), atol=1e-12)
    plain_mean = np.stack([plain_text(model, "a cat."), plain_text(model, "a photo of cat")]).mean(0)
    assert np.linalg.norm(plain_mean) < 0.999  # so the last step matters


def check_classification(scores, similarities, labels, groups):
    order = np.argsort(-similarities, axis=1, kind="stable")
    top1, top5 = order[:, 0], (order[:, :5] == labels[:, None]).any(1)
    assert len(set(top1)) > 2  # the model does distinguish images
    region = min((top1 == labels)[groups == g].mean() for g in set(groups))
    assert scores == {
        "acc1": pytest.approx(accuracy_score(labels, top1)),
        "acc5": pytest.approx(top5.mean()),
        "mean_per_class_recall": pytest.approx(balanced_accuracy_score(labels, top1)),
        "F1-macro_all": pytest.approx(f1_score(labels, top1, labels=np.unique(labels), average="macro")),
        "acc_wg": pytest.approx(region),
        "acc_top5_wg": pytest.approx(min(top5[groups == g].mean() for g in set(groups))),
        "acc_worst_region": pytest.approx(region),
    }
    assert 0 < scores["acc1"] < scores["acc5"] < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_classification_and_its_groups(model, tmp_path):
    task, files, labels, groups = classification(tmp_path / "task")
    check_classification(scored(task, model), plain_scores(model, files), labels, groups)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_labels_and_groups_stay_with_their_images_when_others_are_skipped(model, tmp_path):
    damaged = [0, 7, 8, 9, 10, 11, 12, 13, 30, 59]  # with one complete batch
    task, files, labels, groups = classification(tmp_path / "task", damaged)
    encoder = Encoder(model, World.alone(), **HOW)
    images = encoder.images(task)
    kept = np.setdiff1d(np.arange(60), damaged)
    assert images.kept_b.tolist() == kept.tolist()
    assert [sample.id for sample in images.bad] == damaged
    similarities = plain_scores(model, [files[i] for i in kept])
    check_classification(score(task, encoder, images), similarities, labels[kept], groups[kept])


def test_without_groups_there_is_no_worst_group(model, tmp_path):
    task, *_ = classification(tmp_path / "task")
    task.groups = None
    assert set(scored(task, model)) == {"acc1", "acc5", "mean_per_class_recall", "F1-macro_all"}


def test_fewer_classes_than_five(model, tmp_path):
    samples = [{"png": png(i), "cls": b"%d" % (i % 2)} for i in range(6)]
    task = open_task("two", write_task(tmp_path / "two", [samples], names="cat\ndog"))
    scores = scored(task, model)
    images = plain_images(model, [png(i) for i in range(6)])
    similarities = images @ plain_classifier(model, ["cat", "dog"], ["a {c}.", "a photo of {c}"]).T
    assert scores["acc1"] == accuracy_score([0, 1] * 3, similarities.argmax(1))
    assert scores["acc5"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("tile", [1, 3, 59, 60])
def test_scores_do_not_depend_on_tiles_and_batches(model, tmp_path, tile):
    task, *_ = classification(tmp_path / "task")
    expected = scored(task, model)
    assert scored(task, model, tile=tile) == expected
    assert scored(task, model, tile=tile, batch_size=tile, workers=1 if tile == 3 else 0) == expected


@pytest.mark.parametrize("tile", [1, 5, 4096])
def test_ties_go_to_the_first_class(tile):
    """Rounding depends on the place in the matrix, so equal columns would differ in plain float products."""
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.functional.normalize(torch.randn(130, 64, generator=generator), dim=1)
    sentence = torch.nn.functional.normalize(torch.randn(1, 64, generator=generator), dim=1)
    task = SimpleNamespace(kind="classification", classnames=["same"] * 10, templates=["{c}"], groups=None)
    task.labels = np.zeros(130, dtype=np.int64)
    encoder = SimpleNamespace(texts=lambda sentences: sentence.expand(len(sentences), -1))
    features = SimpleNamespace(image_bd=images, kept_b=torch.arange(130))
    assert score(task, encoder, features, tile=tile)["acc1"] == 1


# Other kinds


def test_multilabel_equals_scikit_learns_mean_average_precision(model, tmp_path):
    rng = np.random.default_rng(3)
    targets = (rng.random((30, len(NAMES))) < 0.3).astype(np.int64)
    targets[:, 2] = 0  # a class without images
    targets[4] = 0  # an image without classes
    files = [png(i) for i in range(30)]
    samples = [{"png": files[i] if i != 9 else b"", "npy": npy(targets[i])} for i in range(30)]
    names, templates = "\n".join(NAMES), "\n".join(TEMPLATES)
    task = open_task("voc", write_task(tmp_path / "voc", [samples], "multilabel", names, templates))
    kept = [i for i in range(30) if i != 9]
    scores, truth = plain_scores(model, [files[i] for i in kept]), targets[kept]
    classes = [c for c in range(len(NAMES)) if truth[:, c].any()]
    assert len(classes) == len(NAMES) - 1
    expected = np.mean([average_precision_score(truth[:, c], scores[:, c]) for c in classes])
    assert scored(task, model) == {"mean_average_precision": pytest.approx(expected)}


def test_retrieval_equals_a_plain_loop(model, tmp_path):
    captions = [[f"picture {i} {j}" for j in range(1 + i % 3)] for i in range(40)]
    files = [png(i) for i in range(40)]
    samples = [
        {"png": files[i] if i not in (0, 21) else b"no image", "txt": "\n".join(captions[i]).encode()}
        for i in range(40)
    ]
    task = open_task("coco", write_task(tmp_path / "coco", [samples[:9], samples[9:]], "retrieval"))
    kept = [i for i in range(40) if i not in (0, 21)]
    images = plain_images(model, [files[i] for i in kept])
    owner = [row for row, i in enumerate(kept) for _ in captions[i]]
    texts = np.stack([plain_text(model, line) for i in kept for line in captions[i]])
    similarity = images @ texts.T
    expected = {}
    for k in (1, 5, 10):
        by_text = [owner[t] in np.argsort(-similarity[:, t])[:k] for t in range(len(owner))]
        by_image = [any(owner[t] == i for t in np.argsort(-similarity[i])[:k]) for i in range(len(kept))]
        expected[f"image_retrieval_recall@{k}"] = pytest.approx(np.mean(by_text))
        expected[f"text_retrieval_recall@{k}"] = pytest.approx(np.mean(by_image))
    scores = scored(task, model)
    mean = scores.pop("mean_recall@1")
    assert scores == expected
    assert mean == pytest.approx((scores["image_retrieval_recall@1"] + scores["text_retrieval_recall@1"]) / 2)
    assert 0 < scores["image_retrieval_recall@10"] < 1


def winogavil(folder, sizes, damaged=()):
    """One cue of each size, over 30 shared images."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    for i in range(30):
        (folder / "images" / f"{i}.png").write_bytes(png(i)[: 100 if i in damaged else None])
    cues, lines = ["Apple", "pack", "owl", "Üben", "hour", "ice"], []
    for number, size in enumerate(sizes):
        candidates = [f"{i}.png" for i in rng.permutation(30)[:size]]
        chosen = candidates[: rng.integers(1, size)]
        lines.append({"cue": cues[number % 6], "candidates": candidates, "associations": chosen})
    (folder / "associations.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return open_task("winogavil", folder), lines


def plain_associations(model, lines):
    values = []
    for line in lines:
        cue = line["cue"].lower()
        prompt = ("An " if cue[0] in "aeiou" else "A ") + cue
        images = plain_images(model, [png(int(name.split(".")[0])) for name in line["candidates"]])
        best = np.argsort(images @ plain_text(model, prompt))[-len(line["associations"]) :]
        truth = np.isin(line["candidates"], line["associations"])
        values.append(jaccard_score(truth, np.isin(np.arange(len(truth)), best)))
    return np.array(values)


@pytest.mark.slow
def test_associations_and_their_means_by_the_number_of_candidates(model, tmp_path):
    sizes = np.array([5, 6, 8, 10, 12, 5, 12, 10, 9])
    task, lines = winogavil(tmp_path / "wino", sizes)
    each = plain_associations(model, lines)
    assert scored(task, model) == {
        "avg_jaccard_score": pytest.approx(each.mean()),
        "jaccard_score_5-6": pytest.approx(each[[0, 1, 5]].mean()),
        "jaccard_score_10-12": pytest.approx(each[[3, 4, 6, 7]].mean()),
    }
    assert len(set(each)) > 2


def test_a_mean_without_cues_is_omitted(model, tmp_path):
    task, _ = winogavil(tmp_path / "wino", [5, 6])
    assert set(scored(task, model)) == {"avg_jaccard_score", "jaccard_score_5-6"}


def test_cues_with_an_unusable_candidate_are_skipped_and_logged(model, tmp_path, caplog):
    task, lines = winogavil(tmp_path / "wino", [5, 10, 5, 12, 5], damaged=(3, 17))
    kept = [line for line in lines if not {"3.png", "17.png"} & set(line["candidates"])]
    assert 0 < len(kept) < 5
    with caplog.at_level(logging.WARNING):
        scores = scored(task, model)
    assert scores["avg_jaccard_score"] == pytest.approx(plain_associations(model, kept).mean())
    (record,) = [record for record in caplog.records if "zero_shot" in record.name]
    assert (record.levelname, record.args) == ("WARNING", ("winogavil", 5 - len(kept), 5))


def test_a_task_without_usable_cues_is_an_error(model, tmp_path):
    task, lines = winogavil(tmp_path / "wino", [10])
    (tmp_path / "wino" / "images" / lines[0]["candidates"][4]).write_bytes(b"no image")
    with pytest.raises(TaskError) as caught:
        scored(task, model)
    assert caught.value.path == task.where(0)


@pytest.mark.parametrize(
    ("cue", "prompt"),
    [
        ("Apple", "An apple"),
        ("pack", "A pack"),
        ("hour", "A hour"),
        ("UNIT", "An unit"),
        ("éclair", "A éclair"),
    ],
)
def test_the_prompt_of_a_cue_is_datacomps(cue, prompt):
    assert cue_prompt(cue) == prompt


# Models that do not fit


def assert_rejected(argument, facts, task, model, **how):
    """Scoring raises an InputError about this argument, whose problem states these facts."""
    with pytest.raises(InputError) as caught:
        scored(task, model, **how)
    assert caught.value.argument == argument
    assert all(fact in caught.value.problem for fact in facts)


@pytest.mark.slow
def test_a_tokenizer_with_more_tokens_than_the_models_context(model, tmp_path):
    task, *_ = classification(tmp_path / "task")
    facts = ["77 tokens", "49,407", "8 tokens", "49,408"]
    assert_rejected("tokenizer", facts, task, model, tokenizer=open_clip.SimpleTokenizer())


def test_a_tokenizer_with_ids_beyond_the_models_vocabulary(model, tmp_path):
    task, *_ = classification(tmp_path / "task")

    def tokenizer(texts):
        return torch.full((len(texts), 8), 250_000)

    assert_rejected("tokenizer", ["250,000", "49,408"], task, model, tokenizer=tokenizer)


@pytest.mark.parametrize("image_size", [8, 32])
def test_images_of_a_size_that_the_model_does_not_take(tmp_path, image_size):
    task, *_ = classification(tmp_path / "task")
    facts = ["16 x 16", f"{image_size} x {image_size}"]
    assert_rejected("transform", facts, task, tiny_model(image_size))


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["visual.proj", "text_projection"])
def test_features_that_are_not_finite_are_an_error(tmp_path, tower):
    task, *_ = classification(tmp_path / "task")
    model = tiny_model()
    with torch.no_grad():
        model.clip.get_parameter(tower)[0, 0] = torch.nan
    assert_rejected("model", [], task, model)


# Several ranks


def score_together(rank, world_size, tasks):
    """Score every task on all ranks; then provoke failures, one on rank 1 only, and score again."""
    model, errors = tiny_model(), []
    together = {"world": World(rank, world_size, rank, torch.device("cpu"), None)}
    scores = [scored(task, model, **together) for task in tasks]

    def failing_transform(image):
        if rank == 1:
            raise OSError("the disk is gone")
        return TRANSFORM(image)

    for options in (
        {"transform": failing_transform},
        {"batch_size": 99, "tokenizer": open_clip.SimpleTokenizer()},
    ):
        with pytest.raises((OSError, RuntimeError, ValueError)) as caught:
            scored(tasks[0], model, **together | options)
        errors.append(str(caught.value))
    return scores, errors, scored(tasks[0], model, **together)["acc1"]


@pytest.mark.slow
def test_two_ranks_score_like_one_and_fail_together(model, tmp_path):
    tasks = [classification(tmp_path / "a", damaged=(1, 2))[0], winogavil(tmp_path / "b", [5, 10, 12])[0]]
    alone = [scored(task, model) for task in tasks]
    results = run_ranks(score_together, 2, tasks)
    for scores, errors, after in results:
        assert scores == alone
        assert "the disk is gone" in errors[0]
        assert "77 tokens" in errors[1]
        assert after == alone[0]["acc1"]
    assert "another rank failed: OSError" in results[0][1][0]
