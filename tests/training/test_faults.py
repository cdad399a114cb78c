"""Faults of a run are counted, survived, or reported in one line with advice; nothing hangs."""

import csv
import multiprocessing
import os
import re
import signal
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.data.decode import FastDecoder
from fastclip.data.manifest import Manifest
from fastclip.distributed.agreement import RanksDiffer
from fastclip.distributed.world import World
from fastclip.run.checkpoint import Checkpoints, load, tensor_names
from fastclip.training.trainer import Diverged, Trainer
from fastclip.training.trainer import train as train_run
from tests.data.collections import png
from tests.ranks import run_ranks
from tests.training.runs import Lab, Run, collection, final_state, metrics


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Runs with 6 steps per epoch."""
    return Lab(tmp_path_factory.mktemp("lab"), epochs=1)


@pytest.fixture
def train(lab, tmp_path, capsys):
    """Run `fastclip train` in this process; return its exit code and the lines on stderr."""

    def run(**changed):
        options = {"evaluate__pairs": "null", "checkpoint__every_steps": "null"} | changed
        code = main(["train", *lab.options(options.pop("out", tmp_path / "run"), "fastclip-v3", **options)])
        return code, capsys.readouterr().err.splitlines()

    return run


# Non-finite steps.


@pytest.fixture
def nan_steps(monkeypatch):
    """A set of steps, counted from 1, whose images are NaN."""
    steps, finish, done = set(), FastDecoder.finish, []

    def finish_with_nan(self, batch, device):
        done.append(None)
        images = finish(self, batch, device)
        return images * float("nan") if len(done) in steps else images

    monkeypatch.setattr(FastDecoder, "finish", finish_with_nan)
    return steps


@pytest.mark.slow
def test_non_finite_steps_are_skipped_and_counted_and_the_run_continues(train, nan_steps, tmp_path):
    nan_steps |= {1, 3, *range(5, 14)}  # at most nine in a row
    assert train(epochs=3)[0] == 0
    records = metrics(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, 19))
    assert [record["skipped"] for record in records] == [1, 1, 2, 2, *range(3, 12), *[11] * 5]
    assert [record["step"] for record in records if record["loss"] is None] == sorted(nan_steps)
    assert all(
        tensor.isfinite().all() for name, tensor in final_state(tmp_path / "run").items() if "model" in name
    )


@pytest.mark.slow
def test_ten_non_finite_steps_in_a_row_end_the_run_and_the_checkpoints_are_sound(
    train, lab, nan_steps, tmp_path, monkeypatch
):
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
    nan_steps |= set(range(7, 100))
    changed = {"epochs": 3, "checkpoint__every_steps": 2, "evaluate__pairs": "null"}
    with pytest.raises(Diverged) as caught:
        train_run(resolve(parse(lab.options(tmp_path / "run", "fastclip-v3", **changed))), World.alone())
    assert (caught.value.step, caught.value.skipped) == (16, 10)
    assert "--optim.lr" in str(caught.value)
    last, weights = metrics(tmp_path / "run")[-1], {}
    assert (last["step"], last["skipped"]) == (16, 10)
    for step in (12, 14):  # saved in between: as after step 6
        path = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        weights[step] = {
            name: torch.empty(size, dtype=dtype) for name, (size, dtype) in tensor_names(path).items()
        }
        load(path, weights[step])
    assert any(name.startswith("optimizer.") for name in weights[14])
    for name, tensor in weights[14].items():
        assert torch.equal(tensor, weights[12][name]), name
        assert tensor.isfinite().all() or name == "loss.log_u", name  # −inf: not visited yet
    nan_steps.clear()  # the cause is fixed: the same command resumes
    assert train(epochs=3, checkpoint__every_steps=2)[0] == 0
    assert [record["skipped"] for record in metrics(tmp_path / "run")[-4:]] == [8] * 4


# Data.


def table(folder, n):
    """A table of n image files."""
    folder.mkdir()
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "caption"])
        for i in range(n):
            (folder / f"{i}.png").write_bytes(png(i, size=(32, 32)))
            writer.writerow([f"{i}.png", f"thing {i}"])
    return folder / "pairs.csv"


def stall_at_an_image(rank):
    """Storage that does not answer when a loader worker reads this image."""
    read = Manifest.image_at

    def image_at(manifest, place):
        data = read(manifest, place)
        if data == png(17, size=(32, 32)) and get_worker_info() is not None:
            time.sleep(3600)
        return data

    Manifest.image_at = image_at


@pytest.mark.slow
def test_a_stalled_loader_worker_is_an_error_with_the_file(lab, tmp_path):
    pairs = table(tmp_path / "pairs", 32)
    changed = {"data__train": pairs, "batch__size": 8, "evaluate__pairs": "null"}
    options = lab.options(tmp_path / "run", "fastclip-v3", data__workers=2, data__timeout=2, **changed)
    run = Run(options, 1, lab.environment, prepare=stall_at_an_image)
    assert run.wait(timeout=60) == [1]
    last = run.output().splitlines()[-1]
    assert f"sample 17 of {tmp_path / 'pairs' / '17.png'}" in last
    assert "data.timeout" in last


def kill_loader_workers(step, save, rank):
    """Kill the loader workers in this step, or in the save after it, and wait until they have ended."""

    def kill_all():
        for worker in multiprocessing.active_children():
            worker.kill()
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)

    def killing(original, due):
        def call(self, *values, **named):
            if due(self):
                kill_all()
            return original(self, *values, **named)

        return call

    if save:
        Checkpoints.save = killing(Checkpoints.save, lambda _: True)
    else:
        Trainer._record = killing(Trainer._record, lambda trainer: trainer.step == (step or trainer.total))


@pytest.mark.slow
@pytest.mark.parametrize("save", [False, True], ids=["step", "save"])
def test_a_killed_loader_worker_ends_the_run_with_an_error(lab, tmp_path, save):
    """Before, in a save it became a false error of the disk, and a stall until data.timeout."""
    changed = {"epochs": 10_000, "data__workers": 1, "evaluate__pairs": "null", "checkpoint__every_steps": 2}
    options = lab.options(tmp_path / "run", "fastclip-v3", **changed)
    run = Run(options, 1, lab.environment, prepare=partial(kill_loader_workers, 1, save))
    assert run.wait(timeout=60) == [1], run.output()
    *others, last = run.output().splitlines()
    assert last.startswith("fastclip train: A loader worker was killed (SIGKILL)")
    assert not any("could not be saved" in line or "Traceback" in line for line in others)
    assert (run.folder / "checkpoints" / "last").exists() == save


@pytest.mark.slow
def test_a_loader_worker_killed_after_the_last_batch_is_not_an_error(lab, tmp_path):
    options = lab.options(tmp_path / "run", "fastclip-v3", data__workers=1, evaluate__pairs="null")
    run = Run(options, 1, lab.environment, prepare=partial(kill_loader_workers, None, False)).finish()
    assert "Traceback" not in run.output()


@pytest.mark.slow
def test_an_error_of_ours_in_a_loader_worker_is_one_line(lab, tmp_path):
    pairs = collection(tmp_path / "damaged", 96, damaged=range(96))
    changed = {"data__train": pairs, "data__workers": 1, "data__max_bad": 0.99, "evaluate__pairs": "null"}
    run = lab.start(tmp_path / "run", **changed)
    assert run.wait() == [1]
    assert "Traceback" not in run.output()
    assert run.output().splitlines()[-1].startswith("fastclip train: 32 consecutive pairs")


@pytest.mark.slow
def test_damaged_images_are_replaced_logged_and_counted(train, tmp_path, caplog):
    damaged = (5, 40, 77)
    pairs = collection(tmp_path / "damaged", 96, damaged=damaged)
    assert train(data__train=pairs, data__max_bad=0.04)[0] == 0
    counts = [record["bad"] for record in metrics(tmp_path / "run")]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    warnings = [record.args for record in caplog.records if record.levelname == "WARNING"]
    named = sorted((sample, place.partition(", byte ")[0]) for sample, place, *_ in warnings)
    assert named == [(sample, str(pairs)) for sample in damaged]
    (summary,) = [line for line in caplog.messages if f"{pairs} (3)" in line]
    assert summary.startswith("3 ")
    assert "3 × " in summary


@pytest.mark.slow
def test_too_many_damaged_images_end_the_run_with_the_worst_file(train, tmp_path):
    pairs = collection(tmp_path / "damaged", 96, damaged=range(0, 96, 4))
    code, lines = train(data__train=pairs, data__max_bad=0.1)
    assert code == 1
    assert "10.0%" in lines[-1]
    assert f"{pairs} (1" in lines[-1]  # 10 or more, depending on the batch


@pytest.mark.slow
def test_ranks_add_up_their_counts_of_damaged_images(lab, tmp_path):
    pairs = collection(tmp_path / "damaged", 96, damaged=range(0, 96, 8))
    changed = {"data__train": pairs, "evaluate__pairs": "null", "log__every_steps": 3}
    run = lab.start(tmp_path / "run", 2, data__max_bad=0.2, **changed).finish()
    assert metrics(tmp_path / "run")[-1]["bad"] == 12
    assert f"{pairs} (12)" in run.output()
    logged = re.findall(rf"sample (\d+) of {pairs}", run.output())
    assert sorted(map(int, logged)) == list(range(0, 96, 8))  # each once, by rank 0
    few = lab.start(tmp_path / "few", 2, data__max_bad=0.1, **changed)
    assert few.wait() == [1, 1]  # 10 are too many, though neither rank alone has as many
    assert "10.0%" in few.output()


# Errors before the first step.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model__name": "Vit-B-33"}, ["Vit-B-33", "ViT-B-32"]),
        ({"batch__size": 128}, ["batch.size=128", "96", "24"]),
        ({"data__train": "/nowhere/*.tar"}, ["/nowhere/*.tar"]),
        ({"precision": "tf32"}, ["precision=tf32", "bfloat16"]),
    ],
)
def test_an_error_ends_the_command_with_one_line(changed, named, train):
    code, lines = train(**changed)
    assert code == 1
    assert lines[-1].startswith("fastclip train: ")
    assert all(part in lines[-1] for part in named)
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_folder_that_cannot_be_written_is_an_immediate_error(place, train, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code, lines = train(out=tmp_path / place)
    assert code == 1
    (line,) = lines
    assert f"{tmp_path / place} " in line
    assert "--out" in line
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "option"), [("tensorboard", {"log__tensorboard": "true"}), ("wandb", {"log__wandb": "project"})]
)
def test_a_missing_package_is_reported_before_the_first_step(extra, option, train, tmp_path, monkeypatch):
    for name in (extra, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    code, lines = train(**option)
    assert code == 1
    assert f"pip install 'fastclip[{extra}]'" in lines[-1]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_batch_that_two_ranks_cannot_share_ends_both_immediately(lab, tmp_path):
    started = time.monotonic()
    run = lab.start(tmp_path / "run", 2, batch__size=15)
    assert run.wait(timeout=60) == [1, 1]
    assert time.monotonic() - started < 60
    lines = [line for line in run.output().splitlines() if line.startswith("fastclip train: batch.size=15 ")]
    assert lines
    assert all(line.endswith("14.") for line in lines)


# Ranks that differ.

DIFFERENT = {  # options of rank 1, and what is named: the name, its value, rank 0's
    "seed": ({"seed": 1}, ("seed", 1, 0)),
    "learning rate": ({"optim__lr": 0.002}, ("optim.lr", 0.002, 0.001)),
    "loss": ({"loss__rho": 3.5}, ("loss.rho", 3.5, 2.0)),
    "algorithm": ({"algorithm": "fastclip-v2"}, ("algorithm", "fastclip-v2", "fastclip-v3")),
    "batch size": ({"batch__size": 8}, ("batch.size", 8, 16)),
    "model": ({"model__name": "vit-scenes"}, ("model.name", "vit-scenes", None)),
    "evaluation": ({"evaluate__pairs": "pairs.tar"}, ("evaluate.pairs", "pairs.tar", None)),
    "folder": ({"out": "elsewhere"}, ("out", "elsewhere", None)),
    "version": ({}, ("fastclip version", "0.0.1", None)),
    "data": ({}, ("data.train (fingerprint)", None, None)),
}


def start_different_ranks(rank, size, lab, folder):
    """Train as one of two ranks that differ in one thing after another; what each error names."""
    os.environ.update(lab.environment)
    world, found = World(rank, size, rank, torch.device("cpu"), dist.group.WORLD), {}
    for case, (changed, _) in DIFFERENT.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder / (str(rank) if case == "data" else "0"))
            if case == "version" and rank == 1:
                patch.setattr("fastclip.training.between_ranks.__version__", "0.0.1")
            options = {
                "evaluate__pairs": "null",
                "data__train": "pairs.tar",
                "optim__lr": 0.001,
                "loss__rho": 2.0,
            }
            options |= {"out": folder / "run", "algorithm": "fastclip-v3"} | (changed if rank == 1 else {})
            config = resolve(parse(lab.options(options.pop("out"), options.pop("algorithm"), **options)))
            with pytest.raises(RanksDiffer) as caught:
                train_run(config, world)
            found[case] = caught.value.name, caught.value.rank, caught.value.value, caught.value.first
    return found


@pytest.mark.slow
def test_ranks_that_differ_stop_with_the_first_difference_and_the_rank_that_has_it(lab, tmp_path):
    """Before, the first three and other data trained to the end, and most others ended in an abort."""
    for rank in range(2):
        collection(tmp_path / str(rank), 96, start=500 * rank)
    found, of_the_other = run_ranks(start_different_ranks, 2, lab, tmp_path)
    assert found == of_the_other
    for case, (_, (name, value, first)) in DIFFERENT.items():
        assert found[case][:2] == (name, 1)
        assert value in (None, found[case][2])
        assert first in (None, found[case][3])
        assert found[case][2] != found[case][3]
    assert not (tmp_path / "run" / "config.yaml").exists()


# A temperature that can only fall.


@pytest.mark.slow
def test_a_rho_out_of_reach_is_reported_once_over_all_ranks(lab, tmp_path):
    changed = {"evaluate__pairs": "null", "checkpoint__every_steps": "null", "algorithm": "fastclip-v3"}
    run = lab.start(tmp_path / "run", 2, loss__rho=3.5, **changed).finish()
    (line,) = (line for line in run.output().splitlines() if "out of reach" in line)
    assert all(shown in line for shown in ("ρ = 3.5 ", "B=16 ", "2.71,", "tau_min=0.01"))
    run = lab.start(tmp_path / "within", 1, **changed).finish()  # by rule
    assert "out of reach" not in run.output()


# Two runs in one folder.


@pytest.mark.slow
def test_a_second_run_in_the_folder_is_refused_and_the_first_is_not_disturbed(lab, tmp_path):
    run = tmp_path / "run"
    first = lab.start(run, 2, epochs=2, seed=1)
    first.wait_for_step(1)
    first.signal(signal.SIGSTOP)  # or it might end too early
    before = len(first.output())
    second = lab.start(run, 2, epochs=2, seed=2)
    assert second.wait() == [1, 1]
    refused = second.output()[before:]
    first.signal(signal.SIGCONT)
    first.finish()
    owner = f"process {first.processes[0].pid} on "
    assert refused.count(f"fastclip train: {run} is in use by {owner}") == 2
    assert [record["step"] for record in metrics(run) if "evaluation" not in record] == list(range(1, 13))
    assert "seed: 1\n" in (run / "config.yaml").read_text()
    assert not list(run.glob("running*"))


# Folders that disappear


@pytest.mark.slow
def test_a_run_whose_folder_disappears_stops_on_all_ranks_and_names_it(lab, tmp_path):
    run = lab.start(tmp_path / "run", 2, epochs=500, evaluate__pairs="null")
    run.wait_for_step(2)
    run.folder.rename(tmp_path / "elsewhere")
    assert run.wait() == [1, 1], run.output()
    last = run.output().splitlines()[-1]
    assert last.startswith(f"fastclip train: {run.folder} was deleted or renamed"), run.output()
    assert "Traceback" not in run.output()
    assert not run.folder.exists()
