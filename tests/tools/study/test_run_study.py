"""A study from its plan to its end, with real runs: killed and gone on with, it is the same."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fastclip.tools.study.definition import Study
from fastclip.tools.study.jobs import PROGRAM
from fastclip.tools.study.result_tables import study_tables
from fastclip.tools.study.run_study import run_study
from fastclip.tools.study.study_state import read_study
from tests.tools.study import forked, pretender
from tests.tools.study.grids import calls, is_free, small_study, tuned_study, write_data
from tests.training.runs import Lab, assert_same_run, collection
from tests.workers import CONTEXT


def test_nothing_is_written_before_every_arm_was_checked(tmp_path):
    study = small_study(write_data(tmp_path / "data"), vary={"algorithm": ["openclip", "opencilp"]})
    with pytest.raises(ValueError, match="The arm opencilp cannot be trained"):
        run_study(study, tmp_path / "study", 1, pretender.PROGRAM)
    assert not (tmp_path / "study").exists()


def test_seeds_and_arms_that_were_added_are_trained_alone(tmp_path):
    data, out = write_data(tmp_path / "data"), tmp_path / "study"
    run_study(small_study(data, seeds=[0]), out, 2, pretender.PROGRAM)
    run_study(
        small_study(data, ["openclip", "fastclip-v3", "siglip"], seeds=[0, 1]), out, 2, pretender.PROGRAM
    )
    runs = read_study(out).runs
    assert len(runs) == 6
    assert [len(calls(run.folder)) for run in runs] == [1] * 6
    assert {run.state for run in runs} == {"done"}


def test_a_failing_arm_does_not_stop_the_rest(tmp_path):
    data, out = write_data(tmp_path / "data"), tmp_path / "study"
    failed = run_study(small_study(data, ["mbcl", "openclip"]), out, 1, pretender.PROGRAM)
    assert failed == ["mbcl-seed0", "mbcl-seed1"]
    runs = read_study(out).runs
    assert [run.state for run in runs] == ["failed", "failed", "done", "done"]
    assert "this one always fails" in runs[0].error


def test_a_run_that_was_stopped_ends_the_study_with_75(tmp_path):
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
    """Of real runs on the lab's pairs."""
    words = [word.removeprefix("--") for word in lab.options("", "")]
    options = dict(zip(words[::2], words[1::2], strict=True))
    config = options.pop("config")
    del options["out"], options["algorithm"]
    return Study(config, options, {"algorithm": algorithms}, **changed)


def test_a_real_study_that_was_killed_twice_has_the_tables_of_one_that_was_not(lab, tmp_path):
    arms, out, calm = ["openclip", "siglip", "fastclip-v3"], tmp_path / "study", tmp_path / "calm" / "study"
    study = real_study(
        lab, arms, seeds=[0, 1, 2], tasks=str(lab.held_out), baseline={"algorithm": "openclip"}
    )
    for _ in range(2):
        assert compare(lab, study, out, stop=signal.SIGKILL) == -signal.SIGKILL
    assert compare(lab, study, out) == compare(lab, study, calm) == 0
    for killed, whole in zip(read_study(out).runs, read_study(calm).runs, strict=True):
        assert killed.state == "done"
        assert_same_run(killed.folder, whole.folder)
    assert numbers(out) == numbers(calm)
    logs = "".join(log.read_text() for log in (out / "logs").glob("*.log"))
    assert logs.count("Resumed") >= 2


def numbers(out):
    """All that a study's tables say, but for the clock."""
    found = study_tables(read_study(out))
    for row in found["effort"]["rows"]:
        del row["seconds"]
    return found


def compare(lab, study, out, stop=None):
    """The exit code of a process that runs the study; it gets the signal once a run has saved again."""
    before = {*out.glob("runs/*/checkpoints/step-*")}
    process = CONTEXT.Process(target=_compare, args=(study, out, os.environ | lab.environment))
    process.start()
    while stop is not None and process.is_alive():
        if {*out.glob("runs/*/checkpoints/step-????????")} - before:
            os.kill(process.pid, stop)
            break
        time.sleep(0.005)
    process.join()
    while not is_free(out):  # those that were left behind save
        time.sleep(0.005)
    return process.exitcode


def _compare(study, out, environment):
    os.setpgrp()
    os.environ.update(environment)
    sys.exit(len(run_study(study, out, 2, forked.PROGRAM)))


def test_a_real_run_is_tuned_and_scored_on_its_tests(lab, tmp_path, monkeypatch):
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
