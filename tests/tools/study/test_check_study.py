"""Checks before anything is trained."""

import pytest

from fastclip.errors import OptionError, UnknownOption
from fastclip.tools.study.check_study import ArmError, check_study, option_arguments
from fastclip.tools.study.definition import Study
from tests.data.collections import write_shards


@pytest.fixture
def data(tmp_path):
    write_shards(tmp_path / "train", 12, 3)
    write_shards(tmp_path / "tasks" / "some_retrieval" / "test", 4, 1)
    return tmp_path


def study(data, **changed):
    settings = {
        "set": {"data.train": str(data / "train/{00000,00001}.tar"), "evaluate.pairs": None},
        "vary": {"algorithm": ["openclip"]},
    } | changed
    return Study("scenes", **settings)


def tuned(data, pairs, **changed):
    return study(data, tune={"optim.lr": [1e-3]}, validation={"pairs": str(pairs)}, **changed)


def refused(one):
    """The option and the value that a study is refused for."""
    with pytest.raises(OptionError) as caught:
        check_study(one)
    return caught.value.option, caught.value.value


def refused_arm(one):
    """The arm and the tuned values that a study is refused for, and the cause."""
    with pytest.raises(ArmError) as caught:
        check_study(one)
    return caught.value.arm, caught.value.tuned, caught.value.__cause__


def test_every_arm_has_its_config(data):
    configs = check_study(study(data, vary={"algorithm": ["openclip", "sogclr"], "batch.size": [4, 8]}))
    assert [*configs] == ["openclip-b4", "openclip-b8", "sogclr-b4", "sogclr-b8"]
    assert configs["sogclr-b8"].batch.size == 8


def test_an_invalid_value_is_reported_with_its_arm(data):
    vary = {"algorithm": ["fastclip-v3", "openclip"], "loss.gamma": [0.5]}
    arm, values, cause = refused_arm(study(data, vary=vary))
    assert (arm, values) == ("openclip-gamma0.5", {})
    assert (cause.option, cause.value) == ("loss.gamma", 0.5)


def test_an_unknown_option_is_reported_with_its_arm(data):
    arm, _, cause = refused_arm(study(data, vary={"optim.rate": [0.5]}))
    assert (arm, type(cause), cause.option) == ("optim.rate0.5", UnknownOption, "optim.rate")


def test_an_invalid_value_to_tune_is_reported_with_its_arm(data):
    one = tuned(data, data / "train/00002.tar")
    one.tune = {"optim.lr": [1e-3, -1]}
    arm, values, cause = refused_arm(one)
    assert (arm, values) == ("openclip", {"optim.lr": -1})
    assert (cause.option, cause.value) == ("optim.lr", -1)


def test_an_arm_without_pairs_is_refused(data):
    arm, _, cause = refused_arm(study(data, set={"data.train": None}))
    assert (arm, cause.option) == ("openclip", "data.train")


def test_pairs_that_do_not_exist_are_refused(data):
    missing = str(data / "nowhere.tar")
    assert refused(study(data, set={"data.train": missing})) == ("data.train", missing)
    evaluated = {"data.train": str(data / "train"), "evaluate.pairs": "gone.tar"}
    assert refused(study(data, set=evaluated)) == ("evaluate.pairs", "gone.tar")
    assert refused(study(data, tasks=str(data / "gone"))) == ("tasks", str(data / "gone"))


def test_a_folder_without_a_task_of_the_suite_is_refused(data):
    tasks = str(data / "tasks")
    assert refused(study(data, tasks=tasks, suite="emoji")) == ("tasks", tasks)


@pytest.mark.slow
def test_validation_pairs_are_neither_trained_on_nor_tested(data):
    shard, test = data / "train/00002.tar", data / "tasks/some_retrieval/test/00000.tar"
    tasks = str(data / "tasks")
    check_study(tuned(data, shard, tasks=tasks))
    trained = str(data / "train/00001.tar")
    assert refused(tuned(data, trained)) == ("validation.pairs", trained)
    assert refused(tuned(data, test, tasks=tasks)) == ("validation.pairs", str(test))
    (data / "link.tar").symlink_to(test)
    linked = str(data / "link.tar")
    assert refused(tuned(data, linked, tasks=tasks)) == ("validation.pairs", linked)


def test_without_tasks_the_evaluated_pairs_are_the_test(data):
    shard = data / "train/00002.tar"
    options = {"data.train": str(data / "train/00000.tar"), "evaluate.pairs": str(shard)}
    assert refused(tuned(data, shard, set=options)) == ("validation.pairs", str(shard))
    check_study(tuned(data, shard, set=options, tasks=str(data / "tasks")))


def test_options_become_arguments_that_train_reads():
    options = {
        "epochs": 8,
        "data.keep_decoded": False,
        "evaluate.tasks": None,
        "data.train": ["a.tar", "b.tar"],
    }
    assert option_arguments(options) == [
        "--epochs=8",
        "--data.keep_decoded=false",
        "--evaluate.tasks=null",
        '--data.train=["a.tar", "b.tar"]',
    ]
