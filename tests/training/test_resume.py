import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch

from fastclip.run.folder import read_metadata
from tests.training.runs import (
    ALGORITHM,
    MOMENTS,
    Lab,
    Run,
    assert_same_run,
    collection,
    final_state,
    metrics,
)

STEPS = 36


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


def last_facts(run):
    return read_metadata(run / "checkpoints" / "last")


def saved_steps(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def contents(folder):
    """Every file and link, with what is in it."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.readlink(path)
        elif path.is_file():
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


# Killed.


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(lab, tmp_path, workers):
    random = Random(workers)
    for moment in random.sample(MOMENTS, len(MOMENTS)):
        lab.start(tmp_path / "run", workers).kill_during(moment, random)
    lab.start(tmp_path / "run", workers).finish()
    assert len(metrics(lab.reference(workers))) == STEPS + 4
    assert_same_run(tmp_path / "run", lab.reference(workers))


@pytest.mark.timeout(300)
def test_a_worker_killed_under_torchrun_is_started_again_and_the_result_is_the_same(lab, tmp_path):
    run, mark = tmp_path / "run", f"FASTCLIP_TEST={tmp_path}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "-m", "fastclip", "train", *lab.options(run, ALGORITHM[2])]
    environment = os.environ | lab.environment | {"FASTCLIP_TEST": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as job,
    ):
        try:
            while job.poll() is None and 10 not in recorded_steps(run):
                time.sleep(0.005)
            assert job.poll() is None, (tmp_path / "log").read_text()
            (worker,) = processes_with(mark, "RANK=1")
            os.kill(worker, signal.SIGKILL)
            code = job.wait(timeout=200)
        finally:
            job.kill()
            for process in processes_with(mark):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    assert said.count("Resumed") == 1, said
    assert_same_run(run, lab.reference(2))


def recorded_steps(run):
    return {record["step"] for record in metrics(run)} if (run / "metrics.jsonl").exists() else set()


def processes_with(*variables):
    """Processes whose environment holds all of these."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            there = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if all(variable.encode() in there for variable in variables):
            found.append(int(path.parent.name))
    return found


def test_what_is_counted_between_two_records_is_not_lost_with_a_kill(lab, tmp_path):
    """Each worker has losses of its own and meets broken pictures of its own; step 4 lies between records."""
    broken = collection(tmp_path / "broken", 96, broken=range(0, 96, 8))
    changed = {"algorithm": "openclip", "data__train": broken, "data__max_bad": 0.5, "log__every_steps": 5}
    lab.start(tmp_path / "reference", 2, **changed).finish()
    run = lab.start(tmp_path / "run", 2, **changed)
    run.wait_for_step(5)
    run.kill()
    lab.start(tmp_path / "run", 2, **changed).finish()
    assert len(last_facts(tmp_path / "run")["bad"]) == 12
    assert_same_run(tmp_path / "run", tmp_path / "reference")


# Asked to stop.


@pytest.mark.parametrize(
    ("workers", "number", "rank"),
    [(1, signal.SIGINT, None), (2, signal.SIGTERM, 1)],
    ids=["ctrl-c", "one worker of two"],
)
def test_a_signal_saves_the_step_at_which_all_stop_and_the_run_goes_on_from_it(
    lab, tmp_path, workers, number, rank
):
    run = lab.start(tmp_path / "run", workers, checkpoint__every_steps=1000)
    run.wait_for_step(3)
    run.signal(number, rank)
    assert run.wait() == [75] * workers, run.output()
    step = last_facts(run.folder)["step"]
    assert 3 <= step < STEPS
    assert step == run.last_step()
    assert f"Stopped after step {step}" in run.output()
    again = lab.start(tmp_path / "run", workers).finish()
    assert f"at step {step} of {STEPS}" in again.output()
    assert_same_run(tmp_path / "run", lab.reference(workers))


@pytest.mark.timeout(300)
def test_a_run_stopped_with_two_workers_goes_on_with_one_two_and_four(lab, tmp_path):
    """The same batches, and the same numbers but for rounding, after 50 further steps."""
    same = {"algorithm": "fastclip-v2", "precision": "float64", "epochs": 12, "evaluate__every_epochs": 12}
    run = lab.start(tmp_path / "2", 2, checkpoint__every_steps=1, **same)  # each step is saved: it is slow
    run.wait_for_step(0)
    run.signal(signal.SIGTERM)
    assert run.wait() == [75, 75], run.output()
    step = last_facts(run.folder)["step"]
    assert step <= 72 - 50
    for workers in (1, 4):
        shutil.copytree(tmp_path / "2", tmp_path / str(workers), symlinks=True)
    for workers in (1, 2, 4):
        lab.start(tmp_path / str(workers), workers, checkpoint__every_steps=1000, **same).finish()
    expected, records = final_state(tmp_path / "2"), metrics(tmp_path / "2")
    assert expected["loss.tau"].dtype == expected["loss.log_u"].dtype == torch.float64
    for workers in (1, 4):
        found = final_state(tmp_path / str(workers))
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-9, msg=name)
        for ours, theirs in zip(metrics(tmp_path / str(workers)), records, strict=True):
            assert ours.pop("evaluation", {}) == pytest.approx(theirs.get("evaluation", {}), abs=1e-9)
            plain = {name: value for name, value in theirs.items() if name != "evaluation"}
            assert ours == pytest.approx(plain, rel=0, abs=1e-9)


# Refused, or nothing to do.


def test_another_run_in_the_folder_is_refused_and_left_as_it_was(lab, tmp_path):
    run = shutil.copytree(lab.reference(1), tmp_path / "run", symlinks=True)
    others = collection(tmp_path / "others", 96, start=500)
    cases = [
        ({"model__name": "vit-scenes"}, ["model.name", "'vit-scenes' here"]),
        ({"data__train": others}, ["other data", "96 pairs", "fingerprint"]),
        ({"algorithm": "fastclip-v1"}, ["algorithm: 'fastclip-v3' there, 'fastclip-v1' here"]),
        ({"optimizer": "lion"}, ["optimizer: 'adamw' there, 'lion' here"]),
        ({"batch__size": 32}, ["batch.size: 16 there, 32 here"]),
        ({"epochs": 7}, ["epochs: 6.0 there, 7.0 here"]),
        ({"resume": "never"}, ["holds a run already", "--resume auto"]),
    ]
    before, told = contents(run), 0
    for changed, words in cases:
        refused = lab.start(run, **changed)
        assert refused.wait() == [1], (changed, refused.output())
        said, told = refused.output()[told:], len(refused.output())
        assert all(word in said for word in [*words, "another --out"]), said
        assert "Traceback" not in said
        assert contents(run) == before, changed


def test_a_finished_run_says_so_and_trains_no_further(lab, tmp_path):
    run = shutil.copytree(lab.reference(1), tmp_path / "run", symlinks=True)
    before = contents(run)
    (run / "model").rename(run / "model.part")  # killed just before the end
    again = lab.start(run).finish()
    assert "has finished already, at step 36" in again.output()
    after = contents(run)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"config.yaml", "model/README.md"}  # which name the folder: this one is a copy


# The same run by other ways.


def test_training_from_the_folder_s_config_repeats_the_run(lab, tmp_path):
    options = ["--config", str(lab.reference(1) / "config.yaml"), "--out", str(tmp_path / "run")]
    Run(options, 1, lab.environment).finish()
    assert_same_run(tmp_path / "run", lab.reference(1))


def test_the_number_of_data_workers_changes_nothing(lab, tmp_path):
    assert "workers: 0" in (lab.reference(1) / "config.yaml").read_text()
    lab.start(tmp_path / "run", data__workers=2).finish()
    assert_same_run(tmp_path / "run", lab.reference(1))


# When it saves, and what it keeps.


@pytest.mark.parametrize("workers", [1, 2])
def test_checkpoints_by_the_clock_keep_the_newest_and_the_best(lab, tmp_path, workers):
    run = lab.start(tmp_path / "run", workers, checkpoint__every_minutes=1e-4, checkpoint__every_steps="null")
    run.finish()
    evaluations = [record for record in metrics(run.folder) if "evaluation" in record]
    best = max(record["step"] for record in evaluations if record["best"])
    newest = saved_steps(run.folder)[-2:]
    assert newest[0] % 12  # no evaluation saved it
    assert newest[1] == STEPS
    assert saved_steps(run.folder) == sorted({*newest, best})
    for link, step in (("last", STEPS), ("best", best)):
        assert read_metadata(run.folder / "checkpoints" / link)["step"] == step
    assert_same_run(run.folder, lab.reference(workers))


def test_a_full_disk_stops_no_training_until_the_end_and_loses_nothing(lab, tmp_path):
    run = lab.start(tmp_path / "run", 2)
    run.wait_for_step(2)
    run.signal(signal.SIGTERM)
    assert run.wait() == [75, 75], run.output()
    whole, told = contents(run.folder / "checkpoints"), len(run.output())
    step = last_facts(run.folder)["step"]

    full = lab.start(run.folder, 2, largest_file=1 << 20)
    assert full.wait() == [1, 1], full.output()
    said = full.output()[told:]
    assert full.last_step() == STEPS
    good = f"step-{step:08d} is whole: resume from it"
    assert f"{good}. Training goes on." in said
    assert f"fastclip train: Step {STEPS} could not be saved" in said
    assert said.strip().endswith(f"{good}.")
    assert contents(run.folder / "checkpoints") == whole

    lab.start(run.folder, 2).finish()
    assert_same_run(run.folder, lab.reference(2))
