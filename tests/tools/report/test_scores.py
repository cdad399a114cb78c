"""Scores are grouped by suite, with means that are marked if partial."""

import pytest

from fastclip.evaluation.suites import find_suite
from fastclip.run.results import Result
from fastclip.tools.report.scores import group_scores
from tests.tools.report.folders import result


def scored(*tasks, value=0.5):
    return [Result(**result(task, value)) for task in tasks]


def test_without_results_there_are_no_groups():
    assert group_scores([]) == []


def test_a_complete_suite_has_complete_means():
    (group,) = group_scores(scored(*(row.folder for row in find_suite("emoji").rows)))
    assert group.title == "Emoji"
    assert [mean.name for mean in group.means] == ["Retrieval", "Classification", "Hard"]
    assert not any(mean.partial for mean in group.means)
    assert group.unscored == 0


def test_tasks_are_in_the_order_of_the_suite_and_a_mean_of_some_is_partial():
    results = scored("twemoji_words", value=0.25) + scored("emojione_words", value=0.75)
    (group,) = group_scores(results[::-1])
    assert [score.name for score in group.scores] == ["twemoji words", "emojione words"]
    (mean,) = group.means  # means without any scored task are omitted
    assert mean.partial
    assert mean.value == pytest.approx(0.5)
    assert group.unscored == 17


def test_emoji_tasks_belong_to_the_icon_suite_if_there_are_icon_tasks():
    (group,) = group_scores(scored("twemoji_words", "tabler_words"))
    assert group.title == "Icons"
    assert len(group.scores) == 2


def test_datacomp_and_other_tasks_have_their_own_groups():
    groups = group_scores(scored("my_photos", "wds_cifar10_test", "twemoji_words"))
    assert [group.title for group in groups] == ["Emoji", "DataComp", "Other tasks"]
    assert [score.name for score in groups[-1].scores] == ["my_photos"]
    assert groups[-1].means == []


def test_a_failed_task_is_listed_and_excluded_from_means():
    results = [*scored("twemoji_words"), Result("emojione_words", error="0.tar is damaged.")]
    (group,) = group_scores(results)
    assert group.failed == [("emojione words", "0.tar is damaged.")]
    assert group.means[0].found == 1


def test_a_result_without_its_measure_counts_as_failed():
    (group,) = group_scores([Result("mine", key="k", measure="acc1", scores={"acc5": 1.0})])
    ((task, error),) = group.failed
    assert task == "mine"
    assert "acc1" in error


def test_unusable_images_are_not_counted_and_other_measures_are_listed():
    (group,) = group_scores([Result(**result("mine", 0.5, unusable=3))])
    assert group.scores[0].images == 97
    assert group.scores[0].others == {"acc5": 0.9}
