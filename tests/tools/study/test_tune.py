"""Values are chosen for each arm on validation pairs, without the tests."""

import json

import pytest

from fastclip.tools.study.live_status import LiveStatus
from fastclip.tools.study.run_study import run_study
from fastclip.tools.study.study_state import read_study, state_of
from fastclip.tools.study.tune import choose, read_trials, trials
from tests.tools.study.fake_fastclip import PROGRAM
from tests.tools.study.grids import calls, tuned_study, write_data


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "study"


def tuning(out):
    return json.loads((out / "tuning.json").read_text())


def test_every_arm_has_the_same_grid(data):
    study = tuned_study(data, tune={"optim.lr": [1e-3, 2e-3], "loss.tau": [0.1]})
    grids = [[trial.tuned for trial in trials(arm)] for arm in study.all_arms()]
    assert grids[0] == grids[1] == [{"optim.lr": 1e-3, "loss.tau": 0.1}, {"optim.lr": 2e-3, "loss.tau": 0.1}]


@pytest.mark.slow
def test_the_best_is_chosen_and_the_arms_runs_have_it(data, out):
    study = tuned_study(data, seeds=[0, 1])
    assert run_study(study, out, 2, PROGRAM) == []
    for arm in tuning(out)["arms"]:
        assert arm["chosen"] == {"optim.lr": 0.001}
        assert [one["score"] for one in arm["tried"]] == [pytest.approx(0.999), 1.0]
        assert [one["run"] for one in arm["tried"]] == [
            f"tuning/{arm['arm']}/lr{lr}" for lr in (0.002, 0.001)
        ]
    assert [arm.tuned for arm in read_study(out).arms] == [{"optim.lr": 0.001}] * 2
    for run in read_study(out).runs:
        assert run.state == "done"
        assert "--optim.lr=0.001" in calls(run.folder)[0]
        assert f"--seed={run.seed}" in calls(run.folder)[0]


@pytest.mark.slow
def test_tuning_never_sees_a_test(data, out):
    own = {"evaluate.tasks": str(data / "tasks"), "evaluate.best": "tasks_mean"}
    study = tuned_study(data, vary={"algorithm": ["openclip"]})
    study.set |= own | {"evaluate.pairs": str(data / "tasks/some_retrieval/test/00000.tar")}
    run_study(study, out, 2, PROGRAM)
    trained = [calls(path.parent) for path in out.glob("tuning/*/*/calls")]
    assert len(trained) == 2
    for called in trained:
        assert [command for command, *_ in called] == ["train"]  # never `eval`
        options = dict(argument[2:].split("=", 1) for argument in called[0][1:])
        assert options["evaluate.pairs"] == study.validation["pairs"]
        assert options["evaluate.tasks"] == "null"
        assert options["evaluate.best"] == "mean_recall@1"
        assert float(options["evaluate.every_epochs"]) > 1e6  # only at the end
        assert options["seed"] == "1000"
        assert not any(str(data / "tasks") in argument for argument in called[0])
    for run in read_study(out).runs:
        assert [command for command, *_ in calls(run.folder)] == ["train", "eval"]


@pytest.mark.slow
def test_tuning_runs_can_be_shorter_than_the_others(data, out):
    study = tuned_study(data, vary={"algorithm": ["openclip"]}, tune_set={"epochs": 0.5})
    run_study(study, out, 2, PROGRAM)
    for path in out.glob("tuning/*/*/calls"):
        assert [one for one in calls(path.parent)[0] if one.startswith("--epochs=")] == ["--epochs=0.5"]
    for run in read_study(out).runs:
        assert "--epochs=0.5" not in calls(run.folder)[0]
    assert tuning(out)["set"] == {"epochs": 0.5}


@pytest.mark.slow
def test_the_first_of_equal_scores_wins(data, out):
    study = tuned_study(data, vary={"algorithm": ["openclip"]})
    study.validation["measure"] = "equal"
    run_study(study, out, 2, PROGRAM)
    assert [arm["chosen"] for arm in tuning(out)["arms"]] == [{"optim.lr": 0.002}]


@pytest.mark.slow
def test_interrupted_tuning_resumes_and_chooses_once_all_trials_are_done(data, out):
    study = tuned_study(data)
    assert run_study(study, out, 2, PROGRAM) == []
    (out / "tuning.json").unlink()
    unfinished = out / "tuning" / "openclip" / "lr0.002"
    (unfinished / "model").rmdir()
    chosen = choose(study, out)
    assert chosen == {"fastclip-v3": {"optim.lr": 0.001}}
    assert run_study(study, out, 2, PROGRAM) == []
    assert len(calls(unfinished)) == 2
    assert len(calls(out / "tuning" / "openclip" / "lr0.001")) == 1
    assert len(tuning(out)["arms"][0]["tried"]) == 2


@pytest.mark.slow
def test_finished_tuning_is_shown_as_done(data, out):
    study, shown = tuned_study(data), []

    def show(names, at_once):
        shown.append(LiveStatus(names, at_once))
        return shown[-1]

    run_study(study, out, 2, PROGRAM)
    run_study(study, out, 2, PROGRAM, show)
    assert [row.state for row in shown[0].rows.values()] == ["done"] * 6


@pytest.mark.slow
def test_a_choice_is_not_revised(data, out):
    study = tuned_study(data, vary={"algorithm": ["openclip"]})
    run_study(study, out, 2, PROGRAM)
    better = out / "tuning" / "openclip" / "lr0.002" / "metrics.jsonl"
    better.write_text(better.read_text().replace("0.999", "2.0"))
    assert choose(study, out)["openclip"] == {"optim.lr": 0.001}


@pytest.mark.slow
def test_a_failed_trial_cannot_win_and_has_its_error(data, out):
    study = tuned_study(data, vary={"algorithm": ["openclip"]})
    run_study(study, out, 2, PROGRAM)
    (out / "tuning.json").unlink()
    (out / "tuning" / "openclip" / "lr0.001" / "model").rmdir()
    (out / "logs" / "tuning-openclip-lr0.001.failed").write_text("diverged\n")
    assert choose(study, out) == {"openclip": {"optim.lr": 0.002}}
    assert tuning(out)["arms"][0]["tried"][1]["error"] == "diverged"
    assert tuning(out)["arms"][0]["tried"][1]["score"] is None


@pytest.mark.slow
def test_an_arm_without_a_successful_trial_is_not_trained(data, out, capsys):
    study = tuned_study(data, vary={"algorithm": ["mbcl", "openclip"]})
    failed = run_study(study, out, 2, PROGRAM)
    assert sorted(failed) == ["mbcl-seed0", "tuning-mbcl-lr0.001", "tuning-mbcl-lr0.002"]
    untuned, other = read_study(out).runs
    assert (untuned.state, other.state) == ("failed", "done")
    assert "mbcl" in untuned.error
    assert "tuning.json" in untuned.error
    assert untuned.error in capsys.readouterr().err
    assert tuning(out)["arms"][0]["chosen"] is None


def test_tuning_runs_are_listed_before_the_others(data, out):
    names = [run.name for run in state_of(tuned_study(data), out).planned]
    assert names == [
        "tuning-openclip-lr0.002", "tuning-openclip-lr0.001",
        "tuning-fastclip-v3-lr0.002", "tuning-fastclip-v3-lr0.001",
        "openclip-seed0", "fastclip-v3-seed0",
    ]  # fmt: skip


def write(folder, content):
    (folder / "tuning.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_study_without_tuning_has_no_trials(tmp_path):
    missing = []
    assert read_trials(tmp_path, missing) == []
    assert missing == []


def test_only_the_choice_is_marked(tmp_path):
    tried = [{"values": {"optim.lr": lr}, "score": lr, "error": ""} for lr in (0.1, 0.2)]
    write(tmp_path, {"arms": [{"arm": "a", "chosen": {"optim.lr": 0.1}, "tried": tried}]})
    found = read_trials(tmp_path, [])
    assert [(one["score"], one["chosen"]) for one in found] == [(0.1, True), (0.2, False)]


def test_trials_get_the_current_names_of_their_options(tmp_path):
    tried = [{"values": {"log.every": 5}, "score": 0.5}]
    write(tmp_path, {"arms": [{"arm": "a", "chosen": {"log.every": 5}, "tried": tried}]})
    (one,) = read_trials(tmp_path, [])
    assert (one["values"], one["chosen"]) == ({"log.every_steps": 5}, True)


def test_before_the_choice_nothing_is_marked(tmp_path):
    write(tmp_path, {"arms": [{"arm": "a", "chosen": None, "tried": [{"values": {}, "score": None}]}]})
    (one,) = read_trials(tmp_path, [])
    assert (one["score"], one["chosen"]) == (None, False)


@pytest.mark.parametrize("content", ["{", "[]", {"arms": [{"arm": "a"}]}, {"arms": [1]}])
def test_a_damaged_file_is_reported(tmp_path, content):
    write(tmp_path, content)
    missing = []
    assert read_trials(tmp_path, missing) == []
    assert len(missing) == 1
    assert "tuning.json" in missing[0]
