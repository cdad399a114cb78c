"""The tasks of each suite, their metrics, and means that are marked as partial."""

from collections import Counter

import pytest

from fastclip.config.collections import COLLECTIONS
from fastclip.errors import OptionError
from fastclip.evaluation.suites import DEFAULT_MEASURE, SUITES, Mean, find_suite, measure_of

DATACOMP = find_suite("datacomp")


def names(rows):
    return {row.name for row in rows}


def test_datacomp_has_38_tasks_each_with_its_metric():
    assert len(DATACOMP.rows) == 38
    for attribute in ("key", "name", "folder"):
        assert len({getattr(row, attribute) for row in DATACOMP.rows}) == 38
    assert Counter(row.measure for row in DATACOMP.rows) == {
        "acc1": 27,
        "mean_per_class_recall": 4,
        "mean_recall@1": 2,
        "jaccard_score_10-12": 1,
        "F1-macro_all": 1,
        "acc_worst_region": 1,
        "acc_top5_wg": 1,
        "acc_wg": 1,
    }


@pytest.mark.parametrize(
    ("measure", "tasks"),
    [
        ("mean_per_class_recall", {"Caltech-101", "Oxford Flowers-102", "Oxford-IIIT Pet", "FGVC Aircraft"}),
        ("mean_recall@1", {"Flickr", "MSCOCO"}),
        ("jaccard_score_10-12", {"WinoGAViL"}),
        ("F1-macro_all", {"iWildCam"}),
        ("acc_worst_region", {"FMoW"}),
        ("acc_top5_wg", {"Dollar Street"}),
        ("acc_wg", {"GeoDE"}),
    ],
)
def test_tasks_with_other_metrics_than_accuracy(measure, tasks):
    assert names(row for row in DATACOMP.rows if row.measure == measure) == tasks


def test_groups_are_those_of_the_paper():
    assert names(row for row in DATACOMP.rows if row.group == "imagenet_and_variants") == {
        "ImageNet 1k",
        "ImageNet Sketch",
        "ImageNet v2",
        "ImageNet-A",
        "ImageNet-O",
        "ImageNet-R",
        "ObjectNet",
    }
    assert names(row for row in DATACOMP.rows if row.group == "retrieval") == {
        "Flickr",
        "MSCOCO",
        "WinoGAViL",
    }
    assert sum(row.group == "" for row in DATACOMP.rows) == 28


def test_fairface_and_utkface_are_excluded():
    assert not any(name in f"{row}".lower() for row in DATACOMP.rows for name in ("fairface", "utkface"))


def test_folders_have_datacomps_names():
    """wds_KEY_test with hyphens for slashes, except the fairness tasks and those on Hugging Face."""
    for row in DATACOMP.rows:
        if row.group != "retrieval":
            assert row.folder == f"wds_{row.key.removeprefix('fairness/').replace('/', '-')}_test"
            assert row.classes > 1
        else:
            assert row.folder == row.key.rpartition("/")[2]
            assert row.classes is None


def test_sizes_are_those_of_the_test_sets():
    assert sum(row.images for row in DATACOMP.rows) == 697_369
    sizes = {row.name: (row.images, row.classes) for row in DATACOMP.rows}
    assert sizes["ImageNet 1k"] == (50_000, 1000)
    assert sizes["ImageNet-A"] == (7500, 200)
    assert sizes["Camelyon17"] == (85_054, 2)
    assert sizes["MSCOCO"] == (5000, None)


def test_complete_means_are_not_marked():
    scores = {row.folder: i / 100 for i, row in enumerate(DATACOMP.rows)}
    everything, retrieval, imagenet = DATACOMP.means(scores)
    assert everything == Mean("Datacomp", pytest.approx(0.185), 38, 38)
    assert retrieval == Mean("Retrieval", pytest.approx(0.31), 3, 3)  # rows 30 to 32
    assert imagenet == Mean("IN & Variants", pytest.approx((11 + 12 + 13 + 14 + 15 + 16 + 19) / 700), 7, 7)
    assert str(everything) == "Datacomp: 18.50 %"
    assert not any(mean.partial for mean in (everything, retrieval, imagenet))
    assert DATACOMP.missing(set(scores)) == []


def test_a_mean_over_fewer_tasks_is_marked_partial():
    scores = {"wds_imagenet1k_test": 0.6, "wds_cifar10_test": 0.8, "my_own_task": 1.0}
    everything, retrieval, imagenet = DATACOMP.means(scores)
    assert everything == ("Datacomp", pytest.approx(0.7), 2, 38)
    assert everything.partial
    assert str(everything) == "Datacomp: 70.00 % (partial: 2 of 38 tasks)"
    assert str(imagenet) == "IN & Variants: 60.00 % (partial: 1 of 7 tasks)"
    assert retrieval == ("Retrieval", None, 0, 3)
    assert retrieval.partial
    assert "0 of 3 tasks" in str(retrieval)
    assert "%" not in str(retrieval)
    assert len(DATACOMP.missing(set(scores))) == 36


def test_one_missing_task_makes_its_means_partial():
    scores = {row.folder: 0.5 for row in DATACOMP.rows if row.name != "WinoGAViL"}
    everything, retrieval, imagenet = DATACOMP.means(scores)
    assert [mean.partial for mean in (everything, retrieval, imagenet)] == [True, True, False]
    assert [row.name for row in DATACOMP.missing(set(scores))] == ["WinoGAViL"]


def test_means_without_tasks_are_none_instead_of_zero():
    assert [mean.value for mean in DATACOMP.means({})] == [None] * 3
    assert not any("0.00" in str(mean) for mean in DATACOMP.means({}))


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("emoji", {"retrieval": 5, "classification": 9, "hard": 5}),
        ("icons", {"retrieval": 9, "classification": 13, "hard": 7}),
    ],
)
def test_the_emoji_and_icon_suites_cover_every_held_out_set(name, groups):
    suite = find_suite(name)
    assert len(suite.rows) == len({row.folder for row in suite.rows}) == sum(groups.values())
    assert Counter(row.group for row in suite.rows) == groups
    for prefix in COLLECTIONS[name].held_out:
        assert suite.row(f"{prefix}_retrieval").measure == "mean_recall@1"
    assert all(row.measure == "acc1" for row in suite.rows if row.group != "retrieval")
    means = suite.means({row.folder: 0.25 for row in suite.rows})
    assert [(mean.name, mean.value, mean.tasks) for mean in means] == [
        ("Retrieval", 0.25, groups["retrieval"]),
        ("Classification", 0.25, groups["classification"]),
        ("Hard", 0.25, groups["hard"]),
    ]


def test_hard_tasks_have_hard_in_their_folder_name():
    for row in find_suite("icons").rows:
        assert row.folder.startswith("hard_") == (row.group == "hard") == row.folder.endswith("_categories")


def test_datacomp_tasks_have_their_own_metric_and_others_the_default_of_their_kind():
    assert measure_of("wds_vtab-pets_test", "classification") == "mean_per_class_recall"
    assert measure_of("winogavil", "associations") == "jaccard_score_10-12"
    assert {kind: measure_of("my_own_task", kind) for kind in DEFAULT_MEASURE} == {
        "classification": "acc1",
        "multilabel": "mean_average_precision",
        "retrieval": "mean_recall@1",
        "associations": "jaccard_score_10-12",
    }


def test_an_unknown_suite_is_rejected():
    assert SUITES == ("datacomp", "emoji", "icons")
    with pytest.raises(OptionError) as caught:
        find_suite("imagenet")
    assert (caught.value.option, caught.value.value) == ("suite", "imagenet")
    assert "datacomp, emoji, icons" in caught.value.rule
    with pytest.raises(OptionError) as caught:
        find_suite("emojis")
    assert "emoji?" in caught.value.advice
