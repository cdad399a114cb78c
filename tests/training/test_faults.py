"""What goes wrong in a run is counted, survived, or told in one line that names what to do; nothing hangs."""

import csv
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from fastclip.cli import main
from fastclip.data.decode import FastDecoder
from fastclip.run.checkpoint import load, tensor_names
from tests.data.collections import png
from tests.training.runs import Lab, collection, final_state, metrics


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Runs of 6 steps an epoch."""
    return Lab(tmp_path_factory.mktemp("lab"), epochs=1)


@pytest.fixture
def train(lab, tmp_path, capsys):
    """`fastclip train` in this process: its exit code and the lines that it printed."""

    def run(**changed):
        options = {"evaluate__pairs": "null", "checkpoint__every_steps": "null"} | changed
        code = main(["train", *lab.options(options.pop("out", tmp_path / "run"), "fastclip-v3", **options)])
        return code, capsys.readouterr().err.splitlines()

    return run


# Steps that are not finite.


@pytest.fixture
def nan_steps(monkeypatch):
    """Images of the steps in this set, counted from 1, are not numbers."""
    steps, finish, done = set(), FastDecoder.finish, []

    def broken(self, batch, device):
        done.append(None)
        images = finish(self, batch, device)
        return images * float("nan") if len(done) in steps else images

    monkeypatch.setattr(FastDecoder, "finish", broken)
    return steps


def test_steps_that_are_not_finite_are_skipped_and_counted_and_the_run_goes_on(train, nan_steps, tmp_path):
    nan_steps |= {1, 3, *range(5, 14)}  # nine in a row at most
    assert train(epochs=3)[0] == 0
    found = metrics(tmp_path / "run")
    assert [record["step"] for record in found] == list(range(1, 19))
    assert [record["skipped"] for record in found] == [1, 1, 2, 2, *range(3, 12), *[11] * 5]
    assert [record["step"] for record in found if record["loss"] is None] == sorted(nan_steps)
    assert all(
        tensor.isfinite().all() for name, tensor in final_state(tmp_path / "run").items() if "model" in name
    )


def test_ten_in_a_row_stop_the_run_with_advice_and_the_checkpoints_are_sound(train, nan_steps, tmp_path):
    nan_steps |= set(range(7, 100))
    code, lines = train(epochs=3, checkpoint__every_steps=2)
    assert code == 1
    assert lines[-1].startswith("fastclip train: 10 steps in a row up to step 16 had a non-finite loss")
    assert "Try a lower --optim.lr" in lines[-1]
    last, weights = metrics(tmp_path / "run")[-1], {}
    assert (last["step"], last["skipped"]) == (16, 10)
    for step in (12, 14):  # saved in the midst of it: as after step 6
        path = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        weights[step] = {
            name: torch.empty(size, dtype=dtype) for name, (size, dtype) in tensor_names(path).items()
        }
        load(path, weights[step])
    assert any(name.startswith("optimizer.") for name in weights[14])
    for name, tensor in weights[14].items():
        assert torch.equal(tensor, weights[12][name]), name
        assert tensor.isfinite().all() or name == "loss.log_u", name  # −inf: not visited yet
    nan_steps.clear()  # the cause is mended: the same command goes on
    assert train(epochs=3, checkpoint__every_steps=2)[0] == 0
    assert [record["skipped"] for record in metrics(tmp_path / "run")[-4:]] == [8] * 4


# Data.


def table(folder, n):
    """A table of n pictures in files of their own."""
    folder.mkdir()
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "caption"])
        for i in range(n):
            (folder / f"{i}.png").write_bytes(png(i, size=(32, 32)))
            writer.writerow([f"{i}.png", f"thing {i}"])
    return folder / "pairs.csv"


def test_a_reader_that_stalls_is_an_error_that_names_the_file(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
    pairs = table(tmp_path / "pairs", 32)
    assert main(["data", "index", str(pairs)]) == 0
    silent = tmp_path / "pairs" / "17.png"
    silent.unlink()
    os.mkfifo(silent)  # whoever reads it waits for a writer
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
    assert last.startswith("fastclip train: No batch for 2 s: step ")
    assert f"waits for sample 17 of {silent}. " in last
    assert "data.timeout" in last


def children(process):
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_reading_process_that_is_killed_ends_the_run_with_an_error(lab, tmp_path):
    run = lab.start(
        tmp_path / "run",
        epochs=10_000,
        data__workers=1,
        evaluate__pairs="null",
        checkpoint__every_steps=10_000,
    )
    run.wait_for_step(2)
    readers = children(run.processes[0].pid)
    assert readers
    for reader in readers:
        os.kill(reader, signal.SIGKILL)
    assert run.wait(timeout=60) == [1]
    last = run.output().splitlines()[-1]  # torch's own words if it fell into a step
    assert last.startswith(
        ("fastclip train: A process that reads data has died", "fastclip train: DataLoader worker")
    )


def test_broken_images_are_replaced_named_and_counted(train, tmp_path, caplog):
    broken = (5, 40, 77)
    pairs = collection(tmp_path / "broken", 96, broken=broken)
    assert train(data__train=pairs, data__max_bad=0.04)[0] == 0
    counts = [record["bad"] for record in metrics(tmp_path / "run")]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    for sample in broken:
        assert sum(f"sample {sample} of {pairs} is left out" in line for line in caplog.messages) == 1
    (summary,) = [line for line in caplog.messages if "pairs could not be used" in line]
    assert summary.startswith("3 pairs could not be used: 3 × ")
    assert summary.endswith(f"The worst files: {pairs} (3).")


def test_too_many_broken_images_stop_the_run_with_the_worst_file(train, tmp_path):
    pairs = collection(tmp_path / "broken", 96, broken=range(0, 96, 4))
    code, lines = train(data__train=pairs, data__max_bad=0.1)
    assert code == 1
    assert lines[-1].startswith("fastclip train: More than 10.0% of the collection is broken. ")
    assert f"The worst files: {pairs} (1" in lines[-1]  # 10 and more, as a batch has them


def test_workers_join_their_counts_of_broken_images(lab, tmp_path):
    pairs = collection(tmp_path / "broken", 96, broken=range(0, 96, 8))
    changed = {"data__train": pairs, "evaluate__pairs": "null", "log__every_steps": 3}
    run = lab.start(tmp_path / "run", 2, data__max_bad=0.2, **changed).finish()
    assert metrics(tmp_path / "run")[-1]["bad"] == 12
    assert "12 pairs could not be used: 12 × " in run.output()
    assert f"The worst files: {pairs} (12)." in run.output()
    assert run.output().count("is left out") == 12  # each once, by worker 0
    few = lab.start(tmp_path / "few", 2, data__max_bad=0.1, **changed)
    assert few.wait() == [1, 1]  # 10 are too many, and neither worker alone has met them
    assert "More than 10.0% of the collection is broken." in few.output()


# What is refused before the first step.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model__name": "Vit-B-33"}, "is neither a model nor a JSON config; the nearest name is 'ViT-B-32'"),
        ({"batch__size": 128}, "The collection has 96 pairs, less than a batch of 128. Try --batch.size 24."),
        ({"data__train": "/nowhere/*.tar"}, "/nowhere/*.tar"),
        ({"precision": "tf32"}, "precision=tf32 has no effect without an NVIDIA GPU; try float32"),
    ],
)  # fmt: skip
def test_a_mistake_ends_the_command_with_one_line(changed, message, train):
    code, lines = train(**changed)
    assert code == 1
    assert lines[-1].startswith("fastclip train: ")
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_folder_that_cannot_be_written_is_told_at_once(place, train, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code, lines = train(out=tmp_path / place)
    assert code == 1
    (line,) = lines
    assert line.startswith(f"fastclip train: The folder {tmp_path / place} cannot be written: ")
    assert line.endswith("Choose another --out.")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize(
    ("extra", "option"), [("tensorboard", {"log__tensorboard": "true"}), ("wandb", {"log__wandb": "project"})]
)
def test_a_missing_extra_is_told_before_the_first_step(extra, option, train, tmp_path, monkeypatch):
    for name in (extra, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    code, lines = train(**option)
    assert code == 1
    assert f"pip install 'fastclip[{extra}]'" in lines[-1]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_batch_that_two_workers_cannot_share_ends_both_at_once(lab, tmp_path):
    started = time.monotonic()
    run = lab.start(tmp_path / "run", 2, batch__size=15)
    assert run.wait(timeout=60) == [1, 1]
    assert time.monotonic() - started < 60
    assert "fastclip train: batch.size=15 cannot be divided by 2 workers; try 14." in run.output()
