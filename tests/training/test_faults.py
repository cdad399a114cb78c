"""Faults of a run are counted, survived, or reported in one line with advice; nothing hangs."""

import csv
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.data.decode import FastDecoder
from fastclip.distributed.world import World
from fastclip.run.checkpoint import load, tensor_names
from fastclip.training.trainer import Diverged
from fastclip.training.trainer import train as train_run
from tests.data.collections import png
from tests.training.runs import Lab, collection, final_state, metrics


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


@pytest.mark.slow
def test_a_stalled_loader_worker_is_an_error_with_the_file(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
    pairs = table(tmp_path / "pairs", 32)
    assert main(["data", "index", str(pairs)]) == 0
    stalling = tmp_path / "pairs" / "17.png"
    stalling.unlink()
    os.mkfifo(stalling)  # a reader waits for a writer
    run = lab.start(
        tmp_path / "run",
        data__train=pairs,
        batch__size=8,
        evaluate__pairs="null",
        data__workers=2,
        data__timeout=2,
    )
    assert run.wait(timeout=60) == [1]
    last = run.output().splitlines()[-1]
    assert f"sample 17 of {stalling}" in last
    assert "data.timeout" in last


def children(process):
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_loader_worker_ends_the_run_with_an_error(lab, tmp_path):
    run = lab.start(
        tmp_path / "run",
        epochs=10_000,
        data__workers=1,
        evaluate__pairs="null",
        checkpoint__every_steps=10_000,
    )
    run.wait_for_step(2)
    loader_workers = children(run.processes[0].pid)
    assert loader_workers
    for worker in loader_workers:
        os.kill(worker, signal.SIGKILL)
    assert run.wait(timeout=60) == [1]
    last = run.output().splitlines()[-1]  # torch's own message if it happened during a step
    assert last.startswith("fastclip train: ")
    assert re.search("(loader|DataLoader) worker", last)


@pytest.mark.slow
def test_damaged_images_are_replaced_logged_and_counted(train, tmp_path, caplog):
    damaged = (5, 40, 77)
    pairs = collection(tmp_path / "damaged", 96, damaged=damaged)
    assert train(data__train=pairs, data__max_bad=0.04)[0] == 0
    counts = [record["bad"] for record in metrics(tmp_path / "run")]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    warnings = [record.args for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(warning[:2] for warning in warnings) == [(sample, str(pairs)) for sample in damaged]
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
