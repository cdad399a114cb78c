"""The state of a study, read from its folder in whatever state that is."""

import json

import pytest

from fastclip.errors import PathError
from fastclip.tools.study.definition import Study, write_study
from fastclip.tools.study.study_state import is_study, read_study
from tests.tools.study.test_folder import save

SETTINGS = {"vary": {"algorithm": ["openclip", "fastclip-v3"]}, "seeds": [0, 1]}


@pytest.fixture
def out(tmp_path):
    write_study(Study("emoji", **SETTINGS, baseline={"algorithm": "openclip"}), tmp_path / "study.yaml")
    return tmp_path


def states(out):
    return {run.folder.name: run.state for run in read_study(out).runs}


def test_all_runs_are_listed_before_the_study_starts(out):
    state = read_study(out)
    assert [arm.name for arm in state.arms] == ["openclip", "fastclip-v3"]
    assert [(run.arm.name, run.seed) for run in state.runs] == [
        ("openclip", 0), ("openclip", 1), ("fastclip-v3", 0), ("fastclip-v3", 1),
    ]  # fmt: skip
    assert {run.state for run in state.runs} == {"unfinished"}
    assert state.runs[0].folder == out / "runs" / "openclip-seed0"
    assert (state.study.baseline, state.study.suite) == ({"algorithm": "openclip"}, None)
    assert state.study.config == "emoji"
    assert is_study(out)
    assert not is_study(out / "runs")


def test_a_run_is_done_once_it_has_its_last_step_and_its_model(out):
    run = out / "runs" / "openclip-seed0"
    save(run, step=20)
    (run / "model").mkdir()
    assert states(out)["openclip-seed0"] == "unfinished"
    save(run, step=30)
    assert states(out)["openclip-seed0"] == "done"
    (run / "model").rmdir()
    assert states(out)["openclip-seed0"] == "unfinished"


def test_with_tests_a_run_is_done_once_they_are_scored(out):
    write_study(Study("emoji", **SETTINGS, tasks="tasks"), out / "study.yaml")
    run = out / "runs" / "openclip-seed0"
    save(run)
    (run / "model").mkdir()
    assert states(out)["openclip-seed0"] == "unfinished"
    (run / "evaluation").mkdir()
    (run / "evaluation" / "scores.json").write_text("{}")
    assert states(out)["openclip-seed0"] == "done"


def test_a_failure_is_reported_until_the_run_is_done(out):
    run = out / "runs" / "openclip-seed1"
    (out / "logs").mkdir()
    (out / "logs" / "openclip-seed1.failed").write_text("out of memory\n")
    found = read_study(out).runs[1]
    assert (found.state, found.error) == ("failed", "out of memory")
    save(run)
    (run / "model").mkdir()
    assert states(out)["openclip-seed1"] == "done"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"facts": 3}', '{"facts": {"step": 30}}'])
def test_a_damaged_checkpoint_is_reported_without_an_exception(out, text):
    run = out / "runs" / "openclip-seed0"
    save(run)
    (run / "checkpoints" / "step-00000030" / "state.json").write_text(text)
    found = read_study(out).runs[0]
    assert found.state == "unfinished"
    assert str(run / "checkpoints" / "step-00000030" / "state.json") in found.error


@pytest.mark.parametrize(
    "text", [None, "{", '{"arms": 3}', '{"arms": [{"arm": "openclip", "chosen": null}]}']
)
def test_without_a_choice_nothing_is_tuned(out, text):
    if text is not None:
        (out / "tuning.json").write_text(text)
    assert read_study(out).arms[0].tuned == {}


def test_tuned_values_belong_to_the_arm(out):
    chosen = [{"arm": "openclip", "chosen": {"optim.lr": 0.1}}, {"arm": "fastclip-v3", "chosen": None}]
    (out / "tuning.json").write_text(json.dumps({"arms": chosen}))
    state = read_study(out)
    assert [arm.tuned for arm in state.arms] == [{"optim.lr": 0.1}, {}]
    assert state.runs[1].arm.tuned == {"optim.lr": 0.1}


def test_tuned_values_get_their_current_names(out):
    chosen = [{"arm": "openclip", "chosen": {"evaluate.every": 2, "optim.lr": 0.1}}]
    (out / "tuning.json").write_text(json.dumps({"arms": chosen}))
    assert read_study(out).arms[0].tuned == {"evaluate.every_epochs": 2, "optim.lr": 0.1}


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(PathError) as caught:
        read_study(tmp_path / "nowhere")
    assert caught.value.path == str(tmp_path / "nowhere" / "study.yaml")
