"""A study's file: valid and invalid settings, and what can be added later."""

from pathlib import Path

import pytest
import yaml

from fastclip.config.renamed import RENAMED
from fastclip.errors import OptionError, PathError
from fastclip.tools.study.definition import (
    DifferentStudy,
    Study,
    extend_study,
    load_study,
    study_from,
    study_text,
    write_study,
)

SETTINGS = {"config": "emoji", "vary": {"algorithm": ["openclip", "fastclip-v3"], "batch.size": [16, 64]}}
TUNED = SETTINGS | {"tune": {"optim.lr": ["5e-4", 0.001]}, "validation": {"pairs": "held-back.tar"}}


def study(**changed):
    return study_from(SETTINGS | changed, "a.yaml")


def extend(old, new):
    return extend_study(old, new, Path("studies/a"))


def names(one):
    return [arm.name for arm in one.all_arms()]


def test_arms_are_the_grid_and_the_explicit_ones():
    one = study(arms=[{"algorithm": "mbcl", "loss.tau": "1e-1"}, {"algorithm": "siglip", "name": "sig"}])
    assert names(one)[:4] == ["openclip-b16", "openclip-b64", "fastclip-v3-b16", "fastclip-v3-b64"]
    assert names(one)[4:] == ["mbcl-tau0.1", "sig"]
    assert one.all_arms()[4].values == {"algorithm": "mbcl", "loss.tau": 0.1}
    assert one.all_arms()[5].values == {"algorithm": "siglip"}


def test_explicit_arms_only_and_no_arms_at_all():
    assert names(Study("emoji", arms=[{"algorithm": "mbcl"}])) == ["mbcl"]
    assert names(Study("recipes/mine.yaml")) == ["mine"]


def test_a_run_has_the_options_of_the_study_its_arm_and_its_seed():
    arm = study(set={"epochs": 8, "batch.size": 1}).all_arms()[1]
    arm.tuned = {"optim.lr": 0.5}
    assert study(set={"epochs": 8, "batch.size": 1}).options(arm, 7) == {
        "config": "emoji", "epochs": 8, "algorithm": "openclip", "batch.size": 64, "optim.lr": 0.5, "seed": 7,
    }  # fmt: skip


def test_a_study_reads_as_it_was_written(tmp_path):
    one = study_from(TUNED | {"suite": "emoji", "tasks": "t", "seeds": [3], "set": {"epochs": 2}}, "x")
    write_study(one, tmp_path / "deep" / "study.yaml")
    assert load_study(tmp_path / "deep" / "study.yaml") == one
    assert one.tune == {"optim.lr": [5e-4, 1e-3]}
    assert "suite" not in yaml.safe_load(study_text(study()))


ARM = {"algorithm": "mbcl"}


@pytest.mark.parametrize(
    ("changed", "option", "value"),
    [
        ({"config": None}, "config", ""),
        ({"vary": ["algorithm"]}, "vary", ["algorithm"]),
        ({"vary": {"algorithm": "openclip"}}, "vary.algorithm", "openclip"),
        ({"vary": {"seed": [1, 2]}}, "vary.seed", [1, 2]),
        ({"set": {"out": "here"}}, "set.out", "here"),
        ({"sets": {}}, "sets", {}),
        ({"batch.size": 4}, "batch.size", 4),
        ({"seeds": []}, "seeds", []),
        ({"seeds": [0, 0]}, "seeds", [0, 0]),
        ({"seeds": [True]}, "seeds", [True]),
        ({"seeds": 3}, "seeds", 3),
        ({"arms": ["mbcl"]}, "arms", "mbcl"),
        ({"arms": [ARM | {"name": "a/b"}]}, "arms.name", "a/b"),
        (
            {"arms": [{"algorithm": "openclip", "batch.size": 16}]},
            "arms",
            {"algorithm": "openclip", "batch.size": 16},
        ),
        ({"vary": {"optim.lr": ["1e-3", 0.001]}}, "vary", {"optim.lr": 0.001}),
        ({"baseline": {"algorithm": "mbcl"}}, "baseline", {"algorithm": "mbcl"}),
        ({"tasks": ["a"]}, "tasks", ["a"]),
        ({"suite": "emoji"}, "suite", "emoji"),
        ({"suite": "emojis", "tasks": "t"}, "suite", "emojis"),
        ({"tune": {"optim.lr": [1]}}, "validation.pairs", None),
        ({"validation": {"pairs": "x.tar"}}, "validation", {"pairs": "x.tar"}),
        ({"tune_set": {"epochs": 1}}, "tune_set", {"epochs": 1}),
        ({**TUNED, "tune_set": 3}, "tune_set", 3),
        ({**TUNED, "tune_set": {"batch.size": 8}}, "tune_set.batch.size", 8),
        ({**TUNED, "tune_set": {"seed": 8}}, "tune_set.seed", 8),
        ({**TUNED, "validation": {"pair": "x"}}, "validation", "pair"),
        ({**TUNED, "tune": {"batch.size": [8]}}, "tune.batch.size", [8]),
        ({**TUNED, "seeds": [1000]}, "tune_seed", 1000),
        ({**TUNED, "arms": [ARM | {"tune": [1]}]}, "arms.tune", [1]),
        ({**TUNED, "arms": [ARM | {"tune": {"loss.tau": 0.1}}]}, "arms.tune.loss.tau", 0.1),
        ({**TUNED, "arms": [ARM | {"tune": {"seed": [1, 2]}}]}, "arms.tune.seed", [1, 2]),
        ({**TUNED, "arms": [ARM | {"tune": {"loss.tau": [0.1]}}]}, "tune", {"loss.tau": [0.1]}),
        ({"arms": [ARM | {"tune": {"loss.tau": [0.1]}}]}, "tune", {"loss.tau": [0.1]}),
        ({**TUNED, "arms": [ARM | {"loss.tau": 1, "tune": {"loss.tau": [1, 2]}}]}, "tune.loss.tau", [1, 2]),
    ],
)
def test_an_error_names_the_file_the_setting_and_the_value(changed, option, value):
    with pytest.raises(OptionError) as caught:
        study(**changed)
    assert (caught.value.option, caught.value.value) == (option, value)
    assert str(caught.value).startswith("a.yaml: ")


@pytest.mark.parametrize(
    ("changed", "hints"),
    [
        ({"sets": {}}, ["set"]),
        ({"suite": "emojis", "tasks": "t"}, ["datacomp", "emoji", "icons"]),
        ({"vary": {"seed": [1, 2]}}, ["seeds: [0, 1, 2]"]),
        ({"batch.size": 4}, ["set"]),
        ({**TUNED, "seeds": [1000]}, ["1001"]),
    ],
)
def test_an_error_says_what_works(changed, hints):
    with pytest.raises(OptionError) as caught:
        study(**changed)
    error = caught.value
    assert all(hint in f"{error.rule} {error.example} {error.advice}" for hint in hints)


def test_missing_validation_pairs_are_reported_with_an_example_that_works():
    with pytest.raises(OptionError) as caught:
        study(tune={"optim.lr": [1, 2]}, validation={"measure": "mean_recall@5"})
    lines = [line for line in caught.value.advice.splitlines() if line.startswith("  ")]
    example = yaml.safe_load("\n".join(lines))
    assert study(tune={"optim.lr": [1, 2]}, **example).validation == example["validation"]


@pytest.mark.parametrize("text", [None, "a: [", "- a"])
def test_a_file_that_is_not_a_study_is_refused(tmp_path, text):
    path = tmp_path / "study.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PathError) as caught:
        load_study(path)
    assert caught.value.path == str(path)


OLD, NEW = "evaluate.every", "evaluate.every_epochs"


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_renamed_options_get_their_current_names(old, new):
    settings = {
        "config": "emoji",
        "set": {"epochs": 1},
        "vary": {old: [1, 2]},
        "arms": [{old: 3, "tune": {"optim.lr": [1]}}],
        "tune": {"loss.tau": [1]},
        "validation": {"pairs": "x.tar"},
        "baseline": {old: 1},
    }
    one = study_from(settings)
    assert one.vary == {new: [1, 2]}
    assert one.arms == [{new: 3, "tune": {"optim.lr": [1]}}]
    assert one.baseline == {new: 1}
    tuned = {"config": "emoji", "tune": {old: ["1e-3"]}, "tune_set": {"epochs": 1}, "set": {"batch.size": 1}}
    pairs = {"validation": {"pairs": "x.tar"}}
    assert study_from(tuned | pairs).tune == {new: [0.001]}
    assert study_from(tuned | pairs | {"tune": {"loss.tau": [1]}, "tune_set": {old: 5}}).tune_set == {new: 5}
    own = [ARM | {"tune": {old: [1]}}]
    assert study_from({"config": "emoji", "arms": own} | pairs).arms == [ARM | {"tune": {new: [1]}}]
    assert study_from({"config": "emoji", "set": {old: 5}}).set == {new: 5}


def test_a_folder_with_old_names_continues_with_the_current_ones(tmp_path):
    (tmp_path / "study.yaml").write_text(
        yaml.safe_dump(SETTINGS | {"set": {OLD: 3, "epochs": 8}, "seeds": [0]})
    )
    old, new = load_study(tmp_path / "study.yaml"), study(set={NEW: 3, "epochs": 8}, seeds=[0])
    assert extend_study(old, new, tmp_path) == new
    write_study(old, tmp_path / "study.yaml")
    assert yaml.safe_load((tmp_path / "study.yaml").read_text())["set"] == {NEW: 3, "epochs": 8}


@pytest.mark.parametrize("names", [(OLD, NEW), (NEW, OLD)])
def test_an_option_under_its_old_and_its_current_name_is_refused(names):
    with pytest.raises(OptionError) as caught:
        study(set=dict(zip(names, (1, 2), strict=True)))
    assert (caught.value.option, caught.value.value) == (f"set.{names[1]}", 2)


def test_more_seeds_and_more_values_are_added():
    longer = SETTINGS["vary"] | {"batch.size": [16, 32, 64]}
    both = extend(study(seeds=[0, 1]), study(seeds=[2], vary=longer))
    assert both.seeds == [0, 1, 2]
    assert both.vary == longer
    assert not both.arms


def test_arms_that_are_no_longer_in_the_file_keep_their_names():
    old, new = study(seeds=[0]), study(seeds=[0], vary={"algorithm": ["mbcl"]})
    both = extend(old, new)
    assert names(both) == [*names(old), "mbcl"]
    assert [arm.values for arm in both.all_arms()][:4] == [arm.values for arm in old.all_arms()]
    assert extend(both, new) == both
    alone = extend(Study("emoji", seeds=[0]), new)
    assert names(alone) == ["emoji", "mbcl"]


def differences(old, new):
    """The settings that prevent a folder's study from becoming the new one."""
    with pytest.raises(DifferentStudy) as caught:
        extend(old, new)
    assert caught.value.path == "studies/a"
    for name, (there, _) in caught.value.differs.items():
        assert name.rpartition(".")[2] in str(caught.value)
        assert str(there or "nothing") in str(caught.value)
    return caught.value.differs


def test_another_study_is_refused_with_what_differs():
    other = study(set={"epochs": 3}, config="scenes")
    assert differences(study(), other) == {"config": ("emoji", "scenes"), "set": ({}, {"epochs": 3})}
    found = differences(study_from(TUNED), study())
    assert found == {
        "tune": ({"optim.lr": [0.0005, 0.001]}, {}),
        "validation": ({"pairs": "held-back.tar"}, {}),
    }


def test_an_arm_cannot_change_its_name():
    old = Study("emoji", arms=[{"algorithm": "openclip"}])
    new = Study("emoji", arms=[{"algorithm": "openclip", "name": "clip"}])
    assert differences(old, new) == {"arms.name": ("openclip", "clip")}


def test_tests_can_be_added_later_and_the_baseline_can_change():
    later = extend(study(), study(tasks="data/emoji/tasks", suite="emoji", baseline={"batch.size": 16}))
    assert later.tasks == "data/emoji/tasks"
    assert later.baseline == {"batch.size": 16}
    without = differences(later, study())
    assert without == {"tasks": ("data/emoji/tasks", None), "suite": ("emoji", None)}


def test_an_explicit_arm_can_have_its_own_values_to_tune():
    arms = [{"algorithm": "mbcl", "tune": {"loss.tau": ["5e-2", 0.1]}}, {"algorithm": "siglip"}]
    one = study_from(TUNED | {"arms": arms})
    tune = {arm.name: arm.tune for arm in one.all_arms()}
    assert tune["mbcl"] == {"loss.tau": [0.05, 0.1]}
    assert tune["siglip"] == tune["openclip-b16"] == {"optim.lr": [5e-4, 1e-3]}
    assert one.all_arms()[4].values == {"algorithm": "mbcl"}
    assert study_from(yaml.safe_load(study_text(one)), "a.yaml") == one


def test_the_values_that_an_arm_was_tuned_over_stay_when_others_are_added():
    own = {"algorithm": "mbcl", "tune": {"loss.tau": [0.05, 0.1]}}
    old = study_from(TUNED | {"vary": {}, "arms": [own]}, "a.yaml")
    new = study_from(TUNED | {"vary": {}, "arms": [{"algorithm": "siglip"}]}, "a.yaml")
    assert {arm.name: arm.tune for arm in extend(old, new).all_arms()} == {
        "mbcl": {"loss.tau": [0.05, 0.1]},
        "siglip": {"optim.lr": [5e-4, 1e-3]},
    }
    other = study_from(TUNED | {"vary": {}, "arms": [own | {"tune": {"loss.tau": [0.05, 0.2]}}]}, "a.yaml")
    assert differences(old, other) == {"arms.tune": ({"loss.tau": [0.05, 0.1]}, {"loss.tau": [0.05, 0.2]})}
