"""A study's file: what it may say, what it may not, and what may be added later."""

import pytest
import yaml

from fastclip.tools.study.definition import Study, grown, load_study, study_from, study_text, write_study

SETTINGS = {"config": "emoji", "vary": {"algorithm": ["openclip", "fastclip-v3"], "batch.size": [16, 64]}}
TUNED = SETTINGS | {"tune": {"optim.lr": ["5e-4", 0.001]}, "validation": {"pairs": "held-back.tar"}}


def study(**changed):
    return study_from(SETTINGS | changed, "a.yaml")


def names(one):
    return [arm.name for arm in one.all_arms()]


def test_arms_are_the_grid_and_those_written_out():
    one = study(arms=[{"algorithm": "mbcl", "loss.tau": "1e-1"}, {"algorithm": "siglip", "name": "sig"}])
    assert names(one)[:4] == ["openclip-b16", "openclip-b64", "fastclip-v3-b16", "fastclip-v3-b64"]
    assert names(one)[4:] == ["mbcl-tau0.1", "sig"]
    assert one.all_arms()[4].values == {"algorithm": "mbcl", "loss.tau": 0.1}
    assert one.all_arms()[5].values == {"algorithm": "siglip"}


def test_arms_alone_and_no_arms_at_all():
    assert names(Study("emoji", arms=[{"algorithm": "mbcl"}])) == ["mbcl"]
    assert names(Study("recipes/mine.yaml")) == ["mine"]


def test_a_run_has_the_options_of_all_of_its_arm_and_its_seed():
    arm = study(set={"epochs": 8, "batch.size": 1}).all_arms()[1]
    arm.tuned = {"optim.lr": 0.5}
    assert study(set={"epochs": 8, "batch.size": 1}).options(arm, 7) == {
        "config": "emoji", "epochs": 8, "algorithm": "openclip", "batch.size": 64, "optim.lr": 0.5, "seed": 7,
    }  # fmt: skip


def test_what_was_written_reads_as_the_same_study(tmp_path):
    one = study_from(TUNED | {"suite": "emoji", "tasks": "t", "seeds": [3], "set": {"epochs": 2}}, "x")
    write_study(one, tmp_path / "deep" / "study.yaml")
    assert load_study(tmp_path / "deep" / "study.yaml") == one
    assert one.tune == {"optim.lr": [5e-4, 1e-3]}
    assert "suite" not in yaml.safe_load(study_text(study()))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"config": None}, "config is missing"),
        ({"vary": ["algorithm"]}, "try vary: {algorithm:"),
        ({"vary": {"algorithm": "openclip"}}, "algorithm needs a list of values"),
        ({"vary": {"seed": [1, 2]}}, "seed belongs to the study itself. Write seeds:"),
        ({"set": {"out": "here"}}, "Write --out"),
        ({"sets": {}}, "Did you mean set?"),
        ({"batch.size": 4}, "go under `set`"),
        ({"seeds": []}, "seeds=[] is not possible"),
        ({"seeds": [0, 0]}, "try [0, 1, 2]"),
        ({"seeds": [True]}, "try [0, 1, 2]"),
        ({"seeds": 3}, "try seeds: [0, 1, 2]"),
        ({"arms": ["mbcl"]}, "'mbcl' is no arm"),
        ({"arms": [{"algorithm": "mbcl", "name": "a/b"}]}, "cannot name a folder"),
        ({"arms": [{"algorithm": "openclip", "batch.size": 16}]}, "is there twice"),
        ({"vary": {"optim.lr": ["1e-3", 0.001]}}, "is there twice"),
        ({"baseline": {"algorithm": "mbcl"}}, "is none of the arms"),
        ({"tasks": ["a"]}, "try tasks: data/emoji/tasks"),
        ({"suite": "emoji"}, "needs tasks"),
        ({"suite": "emojis", "tasks": "t"}, "datacomp, emoji, icons"),
        ({"tune": {"optim.lr": [1]}}, "tune needs validation.pairs"),
        ({"validation": {"pairs": "x.tar"}}, "no effect without tune"),
        ({"tune_set": {"epochs": 1}}, "tune_set has no effect without tune"),
        ({**TUNED, "tune_set": 3}, "try tune_set: {epochs: 2}"),
        ({**TUNED, "tune_set": {"batch.size": 8}}, "batch.size makes the arm openclip-b16"),
        ({**TUNED, "tune_set": {"seed": 8}}, "seed belongs to the study itself"),
        ({**TUNED, "validation": {"pair": "x"}}, "validation has no 'pair'"),
        ({**TUNED, "tune": {"batch.size": [8]}}, "batch.size is varied and tuned"),
        ({**TUNED, "seeds": [1000]}, "tune_seed=1000 is one of the seeds"),
        ({**TUNED, "arms": [{"algorithm": "mbcl", "tune": [1]}]}, "try tune: {loss.tau: [0.05, 0.1]}"),
        ({**TUNED, "arms": [{"algorithm": "mbcl", "tune": {"loss.tau": 0.1}}]}, "loss.tau needs a list"),
        ({**TUNED, "arms": [{"algorithm": "mbcl", "tune": {"seed": [1, 2]}}]}, "seed belongs to the study"),
        ({**TUNED, "arms": [{"algorithm": "mbcl", "tune": {"loss.tau": [0.1]}}]}, "the same number of tries"),
        ({"arms": [{"algorithm": "mbcl", "tune": {"loss.tau": [0.1]}}]}, "the same number of tries"),
        (
            {**TUNED, "arms": [{"algorithm": "mbcl", "loss.tau": 1, "tune": {"loss.tau": [1, 2]}}]},
            "loss.tau is varied and tuned",
        ),
    ],
)
def test_a_mistake_is_told_with_its_field_and_what_works(changed, words):
    with pytest.raises(ValueError, match=r"^a\.yaml: ") as error:
        study(**changed)
    assert words in str(error.value)


def test_validation_that_is_missing_is_told_with_an_example():
    with pytest.raises(
        ValueError, match=r"keep a shard back:\n  set: \{data.train: .*\n  validation: \{pairs:"
    ):
        study(tune={"optim.lr": [1, 2]}, validation={"measure": "mean_recall@5"})


@pytest.mark.parametrize(
    ("text", "words"), [(None, "There is no study in"), ("a: [", "is not YAML"), ("- a", "holds no study")]
)
def test_a_file_that_holds_no_study_is_told(tmp_path, text, words):
    path = tmp_path / "study.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_study(path)


def test_more_seeds_and_more_values_are_added():
    longer = SETTINGS["vary"] | {"batch.size": [16, 32, 64]}
    both = grown(study(seeds=[0, 1]), study(seeds=[2], vary=longer))
    assert both.seeds == [0, 1, 2]
    assert both.vary == longer
    assert not both.arms


def test_arms_that_are_no_longer_asked_for_stay_with_their_names():
    old, new = study(seeds=[0]), study(seeds=[0], vary={"algorithm": ["mbcl"]})
    both = grown(old, new)
    assert names(both) == [*names(old), "mbcl"]
    assert [arm.values for arm in both.all_arms()][:4] == [arm.values for arm in old.all_arms()]
    assert grown(both, new) == both
    alone = grown(Study("emoji", seeds=[0]), new)
    assert names(alone) == ["emoji", "mbcl"]


def test_another_study_is_refused_with_what_differs():
    with pytest.raises(ValueError, match=r"set: nothing there, \{'epochs': 3\} here") as error:
        grown(study(), study(set={"epochs": 3}, config="scenes"))
    assert "config: emoji there, scenes here" in str(error.value)
    with pytest.raises(ValueError, match=r"tune: \{'optim.lr': \[0.0005, 0.001\]\} there, nothing here"):
        grown(study_from(TUNED, "x"), study())


def test_an_arm_may_not_change_its_name():
    with pytest.raises(ValueError, match="its arm openclip is called clip here"):
        grown(
            Study("emoji", arms=[{"algorithm": "openclip"}]),
            Study("emoji", arms=[{"algorithm": "openclip", "name": "clip"}]),
        )


def test_tests_may_come_later_and_a_baseline_may_change():
    later = grown(study(), study(tasks="data/emoji/tasks", suite="emoji", baseline={"batch.size": 16}))
    assert later.tasks == "data/emoji/tasks"
    assert later.baseline == {"batch.size": 16}
    with pytest.raises(ValueError, match="tasks: data/emoji/tasks there, nothing here"):
        grown(later, study())


def test_an_arm_that_is_written_out_may_choose_from_values_of_its_own():
    arms = [{"algorithm": "mbcl", "tune": {"loss.tau": ["5e-2", 0.1]}}, {"algorithm": "siglip"}]
    one = study_from(TUNED | {"arms": arms}, "a.yaml")
    tune = {arm.name: arm.tune for arm in one.all_arms()}
    assert tune["mbcl"] == {"loss.tau": [0.05, 0.1]}
    assert tune["siglip"] == tune["openclip-b16"] == {"optim.lr": [5e-4, 1e-3]}
    assert one.all_arms()[4].values == {"algorithm": "mbcl"}
    assert study_from(yaml.safe_load(study_text(one)), "a.yaml") == one


def test_what_an_arm_chose_from_stays_when_others_are_added():
    own = {"algorithm": "mbcl", "tune": {"loss.tau": [0.05, 0.1]}}
    old = study_from(TUNED | {"vary": {}, "arms": [own]}, "a.yaml")
    new = study_from(TUNED | {"vary": {}, "arms": [{"algorithm": "siglip"}]}, "a.yaml")
    assert {arm.name: arm.tune for arm in grown(old, new).all_arms()} == {
        "mbcl": {"loss.tau": [0.05, 0.1]},
        "siglip": {"optim.lr": [5e-4, 1e-3]},
    }
    other = study_from(TUNED | {"vary": {}, "arms": [own | {"tune": {"loss.tau": [0.05, 0.2]}}]}, "a.yaml")
    with pytest.raises(ValueError, match="its arm mbcl chose from"):
        grown(old, other)
