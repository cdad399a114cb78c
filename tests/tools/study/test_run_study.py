"""Whole studies, also with real runs: killed and continued, the results are the same."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fastclip.tools.study.check_study import ArmError
from fastclip.tools.study.definition import Study
from fastclip.tools.study.jobs import PROGRAM
from fastclip.tools.study.result_tables import study_tables
from fastclip.tools.study.run_study import run_study
from fastclip.tools.study.study_state import read_study
from tests.ranks import CONTEXT
from tests.tools.study import fake_fastclip, forked
from tests.tools.study.grids import calls, is_free, small_study, tuned_study, write_data
from tests.training.runs import Lab, assert_same_run, collection


def test_nothing_is_written_before_every_arm_is_checked(tmp_path):
    study = small_study(write_data(tmp_path / "data"), vary={"algorithm": ["openclip", "opencilp"]})
    with pytest.raises(ArmError) as caught:
        run_study(study, tmp_path / "study", 1, fake_fastclip.PROGRAM)
    assert caught.value.arm == "opencilp"
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_only_added_seeds_and_arms_are_trained(tmp_path):
    data, out = write_data(tmp_path / "data"), tmp_path / "study"
    run_study(small_study(data, seeds=[0]), out, 2, fake_fastclip.PROGRAM)
    run_study(
        small_study(data, ["openclip", "fastclip-v3", "siglip"], seeds=[0, 1]), out, 2, fake_fastclip.PROGRAM
    )
    runs = read_study(out).runs
    assert len(runs) == 6
    assert [len(calls(run.folder)) for run in runs] == [1] * 6
    assert {run.state for run in runs} == {"done"}


@pytest.mark.slow
def test_a_failing_arm_does_not_stop_the_others(tmp_path):
    data, out = write_data(tmp_path / "data"), tmp_path / "study"
    failed = run_study(small_study(data, ["mbcl", "openclip"]), out, 1, fake_fastclip.PROGRAM)
    assert failed == ["mbcl-seed0", "mbcl-seed1"]
    runs = read_study(out).runs
    assert [run.state for run in runs] == ["failed", "failed", "done", "done"]
    assert "mbcl always fails" in runs[0].error


@pytest.mark.slow
def test_a_stopped_run_ends_the_study_with_exit_code_75(tmp_path):
    study = tuned_study(write_data(tmp_path / "data"))
    with pytest.raises(SystemExit) as stop:
        run_study(study, tmp_path / "study", 1, ("/bin/sh", "-c", "exit 75", "x"))
    assert stop.value.code == 75
    assert {run.state for run in read_study(tmp_path / "study").runs} == {"unfinished"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), epochs=2)


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory):
    with forked.serve(tmp_path_factory.mktemp("server") / "socket"):
        yield


def real_study(lab, algorithms, **changed):
    """A study of real runs on the lab's pairs."""
    arguments = [one.removeprefix("--") for one in lab.options("", "")]
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    config = options.pop("config")
    del options["out"], options["algorithm"]
    return Study(config, options, {"algorithm": algorithms}, **changed)


@pytest.mark.slow
def test_a_study_that_is_killed_twice_has_the_same_tables_as_one_that_is_not(lab, tmp_path):
    arms, out, undisturbed = (
        ["openclip", "siglip", "fastclip-v3"],
        tmp_path / "study",
        tmp_path / "other" / "study",
    )
    study = real_study(
        lab, arms, seeds=[0, 1, 2], tasks=str(lab.held_out), baseline={"algorithm": "openclip"}
    )
    for _ in range(2):
        assert compare(lab, study, out, stop=signal.SIGKILL) == -signal.SIGKILL
    assert compare(lab, study, out) == compare(lab, study, undisturbed) == 0
    for killed, other in zip(read_study(out).runs, read_study(undisturbed).runs, strict=True):
        assert killed.state == "done"
        assert_same_run(killed.folder, other.folder)
    assert numbers(out) == numbers(undisturbed)
    logs = "".join(log.read_text() for log in (out / "logs").glob("*.log"))
    assert logs.count("Resumed") >= 2


def numbers(out):
    """The tables of a study, without the clock."""
    found = study_tables(read_study(out))
    for row in found["effort"]["rows"]:
        del row["seconds"]
    return found


def compare(lab, study, out, stop=None):
    """Run the study in a process and return its exit code; it gets the signal when a run saves."""
    before = {*out.glob("runs/*/checkpoints/step-*")}
    process = CONTEXT.Process(target=_compare, args=(study, out, os.environ | lab.environment))
    process.start()
    while stop is not None and process.is_alive():
        if {*out.glob("runs/*/checkpoints/step-????????")} - before:
            os.kill(process.pid, stop)
            break
        time.sleep(0.005)
    process.join()
    while not is_free(out):  # until its children have saved
        time.sleep(0.005)
    return process.exitcode


def _compare(study, out, environment):
    os.setpgrp()
    os.environ.update(environment)
    sys.exit(len(run_study(study, out, 2, forked.PROGRAM)))


@pytest.mark.slow
def test_a_real_study_is_tuned_and_scored(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
    pairs, out = collection(tmp_path / "validation", 24, start=2000), tmp_path / "study"
    tune, validation = (
        {"optim.lr": [0.0, 0.01]},
        {"pairs": str(pairs), "measure": "image_retrieval_recall@10"},
    )
    study = real_study(
        lab, ["openclip"], seeds=[0], tune=tune, validation=validation, tasks=str(lab.held_out)
    )
    assert run_study(study, out, 2, forked.PROGRAM) == []
    run = read_study(out).runs[0]
    assert run.state == "done"
    assert run.arm.tuned["optim.lr"] in (0.0, 0.01)
    assert "mean_recall@1" in (run.folder / "evaluation" / "results.jsonl").read_text()
    assert json.loads((run.folder / "evaluation" / "scores.json").read_text())["results"][0]["task"]
    trials = json.loads((out / "tuning.json").read_text())["arms"][0]["tried"]
    assert all(0 <= trial["score"] <= 1 for trial in trials)


def test_the_program_of_a_study_is_fastclip_itself():
    done = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("fastclip ")
