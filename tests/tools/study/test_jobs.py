"""Runs as processes: several in parallel, none twice, none left behind."""

import os
import signal
import time

import pytest
import torch

from fastclip.errors import PathError
from fastclip.files import cores as available_cores
from fastclip.tools.study.jobs import Job, Jobs, Stopped, locked, places
from fastclip.tools.study.live_status import LiveStatus
from tests.ranks import CONTEXT
from tests.tools.study.fake_fastclip import PROGRAM
from tests.tools.study.grids import calls, is_free


def make_jobs(out, *algorithms, tests=()):
    return [
        Job(name, out / "runs" / name, [f"--algorithm={name}", "--epochs=2"], 2.0, list(tests))
        for name in algorithms
    ]


def run(out, jobs, at_once=2):
    runner = Jobs(out, [{"OMP_NUM_THREADS": str(i + 1)} for i in range(at_once)],
                  LiveStatus([job.name for job in jobs], at_once), program=PROGRAM)  # fmt: skip
    runner.run(jobs)
    return runner


@pytest.mark.slow
def test_jobs_are_trained_and_then_scored(tmp_path):
    jobs = make_jobs(tmp_path, "openclip", "siglip", "fastclip-v3", tests=["--tasks", "t"])
    runner = run(tmp_path, jobs)
    assert not runner.failed
    assert {row.state for row in runner.status.rows.values()} == {"done"}
    for job in jobs:
        assert [call[0] for call in calls(job.folder)] == ["train", "eval"]
        assert calls(job.folder)[1] == ["eval", str(job.folder), "--tasks", "t", "--json"]
        assert '"results"' in (job.folder / "evaluation" / "scores.json").read_text()
        assert (tmp_path / "logs" / f"{job.name}.log").read_text().startswith("$ fastclip train --algorithm=")


@pytest.mark.slow
def test_a_place_is_used_by_one_job_at_a_time(tmp_path):
    jobs = make_jobs(tmp_path, "openclip", "siglip", tests=["--tasks", "t"])
    run(tmp_path, jobs, at_once=1)
    scores = [(job.folder / "evaluation" / "scores.json").read_text() for job in jobs]
    assert all('"threads": "1"' in text for text in scores)


def test_finished_runs_are_not_repeated(tmp_path):
    jobs = make_jobs(tmp_path, "openclip", "siglip")
    run(tmp_path, jobs)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    runner = run(tmp_path, jobs)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before
    assert {row.state for row in runner.status.rows.values()} == {"done"}


@pytest.mark.slow
def test_tests_added_later_are_scored_without_training_again(tmp_path):
    run(tmp_path, make_jobs(tmp_path, "openclip"))
    later = make_jobs(tmp_path, "openclip", tests=["--tasks", "t"])
    run(tmp_path, later)
    assert [call[0] for call in calls(later[0].folder)] == ["train", "eval"]


@pytest.mark.slow
def test_a_failure_is_reported_and_does_not_stop_the_others(tmp_path, capsys):
    jobs = make_jobs(tmp_path, "mbcl", "openclip", "fastclip-v3")
    runner = run(tmp_path, jobs, at_once=1)
    assert runner.failed == ["mbcl"]
    assert [runner.status.rows[job.name].state for job in jobs] == ["failed", "done", "done"]
    failure, log = tmp_path / "logs" / "mbcl.failed", tmp_path / "logs" / "mbcl.log"
    printed = capsys.readouterr().err
    for fact in ("mbcl always fails", "exit code 1", str(log)):
        assert fact in printed
        assert fact in failure.read_text()
    jobs[0].train[0] = "--algorithm=openclip"  # fixed
    assert not run(tmp_path, jobs).failed
    assert not failure.exists()


def test_a_run_that_succeeds_without_a_model_has_failed(tmp_path):
    jobs = make_jobs(tmp_path, "openclip")
    runner = Jobs(tmp_path, [{}], LiveStatus(["openclip"], 1), program=("/bin/true",))
    runner.run(jobs)
    assert runner.failed == ["openclip"]
    assert "exit code 0" in (tmp_path / "logs" / "openclip.failed").read_text()


def test_a_run_that_is_killed_has_failed(tmp_path):
    runner = Jobs(tmp_path, [{}], LiveStatus(["openclip"], 1), program=("/bin/sh", "-c", "kill -9 $$", "x"))
    runner.run(make_jobs(tmp_path, "openclip"))
    assert "SIGKILL" in (tmp_path / "logs" / "openclip.failed").read_text()


def start(out, *algorithms):
    """Run jobs in another process; when this returns, sogclr hangs at its step 5."""
    process = CONTEXT.Process(target=_run_locked, args=(out, algorithms))
    process.start()
    metrics = out / "runs" / "sogclr" / "metrics.jsonl"
    _wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") == 5)
    return process


def _run_locked(out, algorithms):
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    jobs = make_jobs(out, *algorithms)
    with locked(out) as lock:
        try:
            Jobs(out, [{}], LiveStatus([job.name for job in jobs], 1), lock, PROGRAM).run(jobs)
        except Stopped:
            os._exit(75)
    os._exit(0)


def _wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_children_save_and_the_same_call_resumes_them(tmp_path, number):
    process = start(tmp_path, "sogclr", "openclip")
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 75
    saved = tmp_path / "runs" / "sogclr" / "checkpoints" / "step-00000005"
    assert saved.exists()
    assert not (tmp_path / "runs" / "openclip").exists()
    assert not (tmp_path / "logs" / "sogclr.failed").exists()
    assert not run(tmp_path, make_jobs(tmp_path, "sogclr", "openclip")).failed
    assert len(calls(saved.parents[1])) == 2


def test_children_end_with_a_parent_that_is_killed_and_hold_its_lock_until_then(tmp_path):
    process = start(tmp_path, "sogclr")
    with pytest.raises(PathError) as caught, locked(tmp_path):
        pass
    assert caught.value.path == str(tmp_path)
    process.kill()
    process.join()
    _wait_until(lambda: is_free(tmp_path))
    assert (tmp_path / "runs" / "sogclr" / "checkpoints" / "step-00000005").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_quits_immediately(tmp_path):
    jobs = make_jobs(tmp_path, "openclip")
    stubborn = "trap '' TERM; mkdir -p runs; touch runs/on; while :; do sleep 0.05; done"
    process = CONTEXT.Process(target=_run_stubborn, args=(tmp_path, jobs, stubborn))
    process.start()
    _wait_until((tmp_path / "runs" / "on").exists)
    os.kill(process.pid, signal.SIGINT)
    process.join(0.5)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 75


def _run_stubborn(out, jobs, code):
    os.setpgrp()
    os.chdir(out)
    try:
        Jobs(out, [{}], LiveStatus([job.name for job in jobs], 1), program=("/bin/sh", "-c", code, "x")).run(
            jobs
        )
    except Stopped:
        os._exit(75)


def test_a_run_stopped_from_outside_is_not_a_failure(tmp_path):
    runner = Jobs(tmp_path, [{}], LiveStatus(["a", "b"], 1), program=("/bin/sh", "-c", "exit 75", "x"))
    runner.run(make_jobs(tmp_path, "a", "b"))
    assert (runner.stopped, runner.failed) == (["a", "b"], [])


def test_places_are_gpus_or_cores_over_threads(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(None, gpus=2)] == ["5", "7"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(3, gpus=2)] == ["5", "7", "5"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert places(None, gpus=0, cores=8) == [{"OMP_NUM_THREADS": "3"}] * 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert places(None, gpus=0, cores=8) == [{"OMP_NUM_THREADS": "1"}] * 8
    assert places(1, gpus=0, cores=8) == [{"OMP_NUM_THREADS": "1"}]


def test_places_by_default_are_those_of_this_machine():
    assert places(None) == places(None, torch.cuda.device_count(), available_cores())
