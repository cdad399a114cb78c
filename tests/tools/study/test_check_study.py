"""What is told before anything is trained."""

import pytest

from fastclip.tools.study.check_study import check_study, option_words
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


def test_every_arm_has_its_config(data):
    configs = check_study(study(data, vary={"algorithm": ["openclip", "sogclr"], "batch.size": [4, 8]}))
    assert [*configs] == ["openclip-b4", "openclip-b8", "sogclr-b4", "sogclr-b8"]
    assert configs["sogclr-b8"].batch.size == 8


def test_a_mistake_in_one_arm_names_the_arm(data):
    with pytest.raises(
        ValueError, match=r"arm openclip-gamma0.5 cannot be trained: loss.gamma=0.5 has no ef"
    ):
        check_study(study(data, vary={"algorithm": ["fastclip-v3", "openclip"], "loss.gamma": [0.5]}))
    with pytest.raises(ValueError, match=r"There is no option optim.rate"):
        check_study(study(data, vary={"optim.rate": [0.5]}))
    with pytest.raises(
        ValueError, match=r"arm openclip, optim.lr=-1 cannot be trained: optim.lr=-1.0 is not"
    ):
        check_study(_with_bad_rate(data))


def _with_bad_rate(data):
    one = tuned(data, data / "train/00002.tar")
    one.tune = {"optim.lr": [1e-3, -1]}
    return one


def test_pairs_that_are_not_there_are_told(data):
    with pytest.raises(ValueError, match=r"data.train: .*nowhere.tar does not exist"):
        check_study(study(data, set={"data.train": str(data / "nowhere.tar")}))
    with pytest.raises(ValueError, match=r"has no pairs: give data.train"):
        check_study(study(data, set={"data.train": None}))
    with pytest.raises(ValueError, match=r"evaluate.pairs: .*gone.tar does not exist"):
        check_study(study(data, set={"data.train": str(data / "train"), "evaluate.pairs": "gone.tar"}))
    with pytest.raises(ValueError, match=r"tasks: .*gone does not exist"):
        check_study(study(data, tasks=str(data / "gone")))
    with pytest.raises(ValueError, match=r"holds none of the .* tasks of emoji"):
        check_study(study(data, tasks=str(data / "tasks"), suite="emoji"))


def test_validation_pairs_are_neither_trained_on_nor_tested(data):
    shard, test = data / "train/00002.tar", data / "tasks/some_retrieval/test/00000.tar"
    check_study(tuned(data, shard, tasks=str(data / "tasks")))
    with pytest.raises(ValueError, match=r"00001.tar is trained on as well; leave it out of data.train"):
        check_study(tuned(data, data / "train/00001.tar"))
    with pytest.raises(ValueError, match="is a test as well"):
        check_study(tuned(data, test, tasks=str(data / "tasks")))
    trained = {"data.train": str(data / "train/00000.tar")}
    evaluated = trained | {"evaluate.pairs": str(shard)}
    with pytest.raises(
        ValueError, match="is a test as well"
    ):  # without tasks, the evaluated pairs are the test
        check_study(tuned(data, shard, set=evaluated))
    check_study(tuned(data, shard, set=evaluated, tasks=str(data / "tasks")))
    (data / "link.tar").symlink_to(test)
    with pytest.raises(ValueError, match="is a test as well"):
        check_study(tuned(data, data / "link.tar", tasks=str(data / "tasks")))


def test_options_become_words_that_train_reads():
    options = {
        "epochs": 8,
        "data.keep_decoded": False,
        "evaluate.tasks": None,
        "data.train": ["a.tar", "b.tar"],
    }
    assert option_words(options) == [
        "--epochs=8",
        "--data.keep_decoded=false",
        "--evaluate.tasks=null",
        '--data.train=["a.tar", "b.tar"]',
    ]
