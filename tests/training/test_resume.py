import hashlib
import os
import re
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


def last_metadata(run):
    return read_metadata(run / "checkpoints" / "last")


def saved_steps(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def contents(folder):
    """A hash of every file, and the target of every link."""
    result = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_symlink():
            result[str(path.relative_to(folder))] = os.readlink(path)
        elif path.is_file():
            result[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return result


# Killed.


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(lab, tmp_path, ranks):
    random = Random(ranks)
    for moment in random.sample(MOMENTS, len(MOMENTS)):
        lab.start(tmp_path / "run", ranks).kill_during(moment, random)
    lab.start(tmp_path / "run", ranks).finish()
    assert len(metrics(lab.reference(ranks))) == STEPS + 4
    assert_same_run(tmp_path / "run", lab.reference(ranks))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_killed_under_torchrun_is_restarted_and_the_result_is_the_same(lab, tmp_path):
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
            (second,) = processes_with(mark, "RANK=1")
            os.kill(second, signal.SIGKILL)
            code = job.wait(timeout=200)
        finally:
            job.kill()
            for process in processes_with(mark):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    output = (tmp_path / "log").read_text()
    assert code == 0, output
    assert output.count("Resumed") == 1, output
    assert_same_run(run, lab.reference(2))


def recorded_steps(run):
    return {record["step"] for record in metrics(run)} if (run / "metrics.jsonl").exists() else set()


def processes_with(*variables):
    """Processes whose environment has all of these."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:  # it has exited, or belongs to another user
            continue
        if all(variable.encode() in environment for variable in variables):
            pids.append(int(path.parent.name))
    return pids


@pytest.mark.slow
def test_counts_between_two_records_are_not_lost_with_a_kill(lab, tmp_path):
    """Each rank has its own losses and its own damaged images; step 4 is between records."""
    damaged = collection(tmp_path / "damaged", 96, damaged=range(0, 96, 8))
    changed = {"algorithm": "openclip", "data__train": damaged, "data__max_bad": 0.5, "log__every_steps": 5}
    lab.start(tmp_path / "reference", 2, **changed).finish()
    run = lab.start(tmp_path / "run", 2, **changed)
    run.wait_for_step(5)
    run.kill()
    lab.start(tmp_path / "run", 2, **changed).finish()
    assert len(last_metadata(tmp_path / "run")["bad"]) == 12
    assert_same_run(tmp_path / "run", tmp_path / "reference")


# Interrupted by a signal.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "number", "rank"),
    [(1, signal.SIGINT, None), (2, signal.SIGTERM, 1)],
    ids=["ctrl-c", "one rank of two"],
)
def test_a_signal_saves_the_step_at_which_all_ranks_stop_and_the_run_resumes_there(
    lab, tmp_path, ranks, number, rank
):
    run = lab.start(tmp_path / "run", ranks, checkpoint__every_steps=1000)
    run.wait_for_step(3)
    run.signal(number, rank)
    assert run.wait() == [75] * ranks, run.output()
    step = last_metadata(run.folder)["step"]
    assert 3 <= step < STEPS
    assert step == run.last_step()
    assert f"step {step};" in run.output().splitlines()[-1]
    again = lab.start(tmp_path / "run", ranks).finish()
    assert f"step {step} of {STEPS}" in again.output()
    assert_same_run(tmp_path / "run", lab.reference(ranks))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_stopped_with_two_ranks_resumes_with_one_two_and_four(lab, tmp_path):
    """The same batches, and the same numbers except for rounding, after 50 more steps."""
    same = {"algorithm": "fastclip-v2", "precision": "float64", "epochs": 12, "evaluate__every_epochs": 12}
    run = lab.start(tmp_path / "2", 2, checkpoint__every_steps=1, **same)  # slow: each step is saved
    run.wait_for_step(0)
    run.signal(signal.SIGTERM)
    assert run.wait() == [75, 75], run.output()
    step = last_metadata(run.folder)["step"]
    assert step <= 72 - 50
    for ranks in (1, 4):
        shutil.copytree(tmp_path / "2", tmp_path / str(ranks), symlinks=True)
    for ranks in (1, 2, 4):
        lab.start(tmp_path / str(ranks), ranks, checkpoint__every_steps=1000, **same).finish()
    expected, records = final_state(tmp_path / "2"), metrics(tmp_path / "2")
    assert expected["loss.tau"].dtype == expected["loss.log_u"].dtype == torch.float64
    for ranks in (1, 4):
        resumed = final_state(tmp_path / str(ranks))
        assert resumed.keys() == expected.keys()
        for name, tensor in resumed.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-9, msg=name)
        for ours, theirs in zip(metrics(tmp_path / str(ranks)), records, strict=True):
            assert ours.pop("evaluation", {}) == pytest.approx(theirs.get("evaluation", {}), abs=1e-9)
            plain = {name: value for name, value in theirs.items() if name != "evaluation"}
            assert ours == pytest.approx(plain, rel=0, abs=1e-9)


# Damaged, or killed at the wrong moment.


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_newest_checkpoint_stops_the_run_and_the_one_before_ends_alike(lab, tmp_path, ranks):
    run = shutil.copytree(lab.reference(ranks), tmp_path / "run", symlinks=True)
    damaged = run / "checkpoints" / f"step-{STEPS:08d}" / f"rank-{ranks - 1:05d}.safetensors"
    with damaged.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"\x7f")
    before = contents(run)
    refused = lab.start(run, ranks)
    assert refused.wait() == [1] * ranks, refused.output()
    lines = [line for line in refused.output().splitlines() if line.startswith("fastclip train: ")]
    assert len(lines) == ranks
    for line in lines:
        assert line.startswith(f"fastclip train: {damaged} ")
        assert "--resume previous" in line
    assert contents(run) == before
    seen = len(refused.output())
    resumed = lab.start(run, ranks, resume="previous").finish()
    output = resumed.output()[seen:]
    assert output.count(str(damaged)) == 1
    assert f"step {STEPS - 4} of {STEPS}" in output
    aside = damaged.parent.with_name(damaged.parent.name + ".damaged")
    kept = {name: digest for name, digest in before.items() if damaged.parent.name in name}
    assert list(contents(aside).values()) == list(kept.values())
    assert_same_run(run, lab.reference(ranks))
    output = lab.start(run, ranks, resume="previous").finish().output()  # undamaged: like auto
    assert f"{run} is already finished, at step {STEPS}" in output


def test_leftovers_of_a_kill_are_removed_and_links_corrected_when_the_run_starts(lab, tmp_path):
    run = shutil.copytree(lab.reference(1), tmp_path / "run", symlinks=True)
    checkpoints = run / "checkpoints"
    (checkpoints / "last").unlink()
    (checkpoints / "last").symlink_to(f"step-{STEPS - 4:08d}")
    leftovers = [checkpoints / "step-00000012.old", checkpoints / "step-00000040.part"]
    for folder in leftovers:
        folder.mkdir()
    leftovers += [run / "metrics.jsonl.part", run / "config.yaml.123.part"]
    for file in leftovers[2:]:
        file.write_text("{")
    lab.start(run).finish()
    assert not any(path.exists() for path in leftovers)
    assert os.readlink(checkpoints / "last") == f"step-{STEPS:08d}"


# Refused, or nothing to do.


@pytest.mark.slow
def test_another_run_in_the_folder_is_refused_and_left_unchanged(lab, tmp_path):
    run = shutil.copytree(lab.reference(1), tmp_path / "run", symlinks=True)
    others = collection(tmp_path / "others", 96, start=500)
    cases = [
        ({"model__name": "vit-scenes"}, ["model.name: ", "'vit-scenes'"]),
        ({"data__train": others}, ["96", last_metadata(run)["fingerprint"]]),
        ({"algorithm": "fastclip-v1"}, ["algorithm: 'fastclip-v3'", "'fastclip-v1'"]),
        ({"optimizer": "lion"}, ["optimizer: 'adamw'", "'lion'"]),
        ({"batch__size": 32}, ["batch.size: 16 ", "32"]),
        ({"epochs": 7}, ["epochs: 6.0 ", "7.0"]),
        ({"resume": "never"}, ["--resume auto"]),
    ]
    before, seen = contents(run), 0
    for changed, named in cases:
        refused = lab.start(run, **changed)
        assert refused.wait() == [1], (changed, refused.output())
        output, seen = refused.output()[seen:], len(refused.output())
        assert f"fastclip train: {run} " in output
        assert all(part in output for part in [*named, "--out"]), output
        assert "Traceback" not in output
        assert contents(run) == before, changed


@pytest.mark.slow
def test_a_finished_run_is_not_trained_further(lab, tmp_path):
    run = shutil.copytree(lab.reference(1), tmp_path / "run", symlinks=True)
    before = contents(run)
    (run / "model").rename(run / "model.part")  # killed just before the end
    again = lab.start(run).finish()
    assert f"{run} is already finished, at step 36" in again.output()
    after = contents(run)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {
        "config.yaml",
        "model/README.md",
    }  # they contain the name of the folder, and this is a copy


# The same run in other ways.


@pytest.mark.slow
def test_training_from_the_config_of_a_folder_reproduces_the_run(lab, tmp_path):
    options = ["--config", str(lab.reference(1) / "config.yaml"), "--out", str(tmp_path / "run")]
    Run(options, 1, lab.environment).finish()
    assert_same_run(tmp_path / "run", lab.reference(1))


@pytest.mark.slow
def test_the_number_of_loader_workers_changes_nothing(lab, tmp_path):
    assert "workers: 0" in (lab.reference(1) / "config.yaml").read_text()
    lab.start(tmp_path / "run", data__workers=2).finish()
    assert_same_run(tmp_path / "run", lab.reference(1))


# Which checkpoints are saved and kept.


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_timed_checkpoints_keep_the_newest_and_the_best(lab, tmp_path, ranks):
    run = lab.start(tmp_path / "run", ranks, checkpoint__every_minutes=1e-4, checkpoint__every_steps="null")
    run.finish()
    evaluations = [record for record in metrics(run.folder) if "evaluation" in record]
    best = max(record["step"] for record in evaluations if record["best"])
    newest = saved_steps(run.folder)[-2:]
    assert newest[0] % 12  # not saved by an evaluation
    assert newest[1] == STEPS
    assert saved_steps(run.folder) == sorted({*newest, best})
    for link, step in (("last", STEPS), ("best", best)):
        assert read_metadata(run.folder / "checkpoints" / link)["step"] == step
    assert_same_run(run.folder, lab.reference(ranks))


@pytest.mark.slow
def test_a_full_disk_does_not_stop_training_until_the_end_and_loses_nothing(lab, tmp_path):
    run = lab.start(tmp_path / "run", 2)
    run.wait_for_step(2)
    run.signal(signal.SIGTERM)
    assert run.wait() == [75, 75], run.output()
    before, seen = contents(run.folder / "checkpoints"), len(run.output())
    step = last_metadata(run.folder)["step"]

    full = lab.start(run.folder, 2, largest_file=1 << 20)
    assert full.wait() == [1, 1], full.output()
    output = full.output()[seen:]
    assert full.last_step() == STEPS
    newest = run.folder / "checkpoints" / f"step-{step:08d}"
    failed = [int(number) for number in re.findall(rf"^Step (\d+) .*{newest}\b", output, re.MULTILINE)]
    assert failed  # training continued after each
    assert STEPS not in failed
    last = output.splitlines()[-1]
    assert last.startswith(f"fastclip train: Step {STEPS} ")
    assert str(newest) in last
    assert contents(run.folder / "checkpoints") == before

    lab.start(run.folder, 2).finish()
    assert_same_run(run.folder, lab.reference(2))
