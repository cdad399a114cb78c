"""The trainer's own steps under the profiler: what is slow shows where it belongs.

Effects are many times as large as a step of the tiny model, and the calmest of several steps is looked at, so
that a busy machine does not matter: what must be short is short in one of them, what must be long is long.
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.data.loader import PairLoader
from fastclip.distributed.world import World
from fastclip.tools.profiling import profiler
from fastclip.tools.profiling.profiler import profile_steps
from fastclip.tools.profiling.timeline import WAITING_FOR_DATA, read_events
from fastclip.training import trainer
from fastclip.training.step import TrainStep
from tests.training.runs import Lab, metrics
from tests.workers import run_workers

ALONE = World(0, 1, 0, torch.device("cpu"), None)
SLOWED = 0.1  # seconds, in each step
ALGORITHMS = ("openclip", "fastclip-v2")  # one waits inside of backward nodes, the other outside


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def config(lab, monkeypatch):
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
    return resolve(parse(lab.options("unused", "fastclip-v3")))


@contextmanager
def before_images_are_encoded(do):
    """Inside the tower's forward, of models that are built meanwhile."""
    build = profiler.build_towers

    def build_slowed(config, world):
        towers = build(config, world)
        towers.clip.visual.register_forward_pre_hook(lambda module, inputs: do())
        return towers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "build_towers", build_slowed)
        yield


def compute():
    """Matrix products for a fixed time, however busy the machine is."""
    end, square = time.perf_counter() + SLOWED, torch.ones(384, 384)
    while time.perf_counter() < end:
        torch.mm(square, square)


def least(worker, part):
    """Seconds of a part in the step that has least of it."""
    return min(getattr(step, part) for step in worker.steps) / 1000


def most(worker, part):
    """Seconds of a part in the step that has most of it."""
    return max(getattr(step, part) for step in worker.steps) / 1000


# Several workers.


def in_all_ways(rank, size, lab_options, cache, folder):
    """With a slow encoder, and with worker 1 late; for each algorithm."""
    os.environ["FASTCLIP_CACHE"] = cache
    world = World(rank, size, rank, torch.device("cpu"), dist.group.WORLD)
    slowed = {"slow encoder": compute, "late": lambda: time.sleep(SLOWED * rank)}
    found = {}
    for algorithm, words in lab_options.items():
        config, trace = resolve(parse(words)), Path(folder) / f"{algorithm}-{rank}.json.gz"
        for name, do in slowed.items():
            with before_images_are_encoded(do):
                found[algorithm, name] = profile_steps(config, world, trace, steps=6, warmup=2)
    return found


@pytest.fixture(scope="module")
def workers(lab, tmp_path_factory):
    options = {name: lab.options("unused", name) for name in ALGORITHMS}
    folder = str(tmp_path_factory.mktemp("traces"))
    return run_workers(in_all_ways, 2, options, lab.environment["FASTCLIP_CACHE"], folder)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_slow_encoder_is_computation_and_no_communication(workers, algorithm):
    slow, late = ([worker[algorithm, name] for worker in workers] for name in ("slow encoder", "late"))
    for worker, without in zip(slow, late, strict=True):
        assert least(worker, "computation") - least(without, "computation") > 0.8 * SLOWED
    assert min(least(worker, "communication") for worker in slow) < 0.5 * SLOWED


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_waits_for_a_late_worker_communicates_and_does_not_compute(workers, algorithm):
    waits, late = (worker[algorithm, "late"] for worker in workers)
    assert most(waits, "pure_communication") > 0.8 * SLOWED
    assert least(waits, "computation") < 0.5 * SLOWED
    assert least(late, "pure_communication") < 0.5 * SLOWED
    assert most(late, "others") > 0.8 * SLOWED  # it slept


def test_bytes_are_counted_by_kind(workers):
    """Gradients of features go over the wire in OpenCLIP alone; those of weights in both."""
    theirs, ours = (workers[0][algorithm, "late"].sent for algorithm in ALGORITHMS)
    assert theirs.keys() == {"all_gather", "all_reduce", "scatter"}
    assert ours.keys() == {"all_gather", "all_reduce"}
    local, features, value = 8, 16, 4  # of 2 workers' batch of 16, the tiny model's, float32
    assert theirs["all_gather"] == theirs["scatter"] == 2 * local * features * value
    scalars = 6 * local + 2  # λ, log u and a gradient of τ for each side of a pair; two totals
    assert ours["all_gather"] == (2 * local * features + scalars) * value + 8 * local  # and the ids
    rows = 2 * local * 4 * value  # of the state of the global batch
    assert ours["all_reduce"] == theirs["all_reduce"] + rows - value  # their temperature is a weight


# One worker.


def test_totals_of_steps_add_up_to_the_time_by_another_clock(config, tmp_path, monkeypatch):
    ends, one_step = [], TrainStep.__call__

    def timed(self, batch):
        result = one_step(self, batch)
        ends.append(time.perf_counter())
        return result

    monkeypatch.setattr(TrainStep, "__call__", timed)
    found = profile_steps(config, ALONE, tmp_path / "trace.json", steps=10, warmup=2)
    assert len(found.steps) == 10
    assert sum(step.total for step in found.steps[1:]) / 1000 == pytest.approx(ends[11] - ends[2], rel=0.02)
    for step in found.steps:
        assert step.total == pytest.approx(step.computation + step.pure_communication + step.others)
        assert 0 < step.data_wait <= step.others
        assert step.computation > 0 == step.communication


def test_a_slow_loader_is_waiting_for_data_and_no_computation(config, tmp_path, monkeypatch):
    """Even if it computes in this process."""
    batches = PairLoader.__iter__

    def slow_batches(self):
        for batch in batches(self):
            compute()
            yield batch

    monkeypatch.setattr(PairLoader, "__iter__", slow_batches)
    found = profile_steps(config, ALONE, tmp_path / "trace.json", steps=5, warmup=1)
    assert least(found, "data_wait") > 0.9 * SLOWED
    assert least(found, "computation") < 0.5 * SLOWED


def test_profiled_steps_are_those_of_training(lab, config, tmp_path, monkeypatch):
    short = {"epochs": 1, "evaluate__pairs": "null", "checkpoint__every_steps": "null"}
    config = resolve(parse(lab.options(tmp_path / "run", "fastclip-v3", **short)))
    losses, one_step = [], TrainStep.__call__

    def told(self, batch):
        result = one_step(self, batch)
        losses.append(float(result.stats["loss"]))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", told)
        profile_steps(config, ALONE, tmp_path / "trace.json", steps=2, warmup=1)
    trainer.train(config, ALONE)
    assert losses == [record["loss"] for record in metrics(tmp_path / "run")][:4]


def test_the_trace_has_the_measured_steps_and_each_wait_for_data(config, tmp_path):
    trace = tmp_path / "made" / "trace.json.gz"
    found = profile_steps(config, ALONE, trace, steps=2, warmup=1)
    names = [event["name"] for event in read_events(trace) if event.get("cat") == "user_annotation"]
    assert sorted(name for name in names if name.startswith("ProfilerStep")) == [
        "ProfilerStep#1",
        "ProfilerStep#2",
    ]
    assert names.count(WAITING_FOR_DATA) == 2
    assert found.sent == {}
    assert "RSS" in found.memory


def test_only_the_trace_is_written(config, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    profile_steps(config, ALONE, tmp_path / "trace.json", steps=1, warmup=1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["temporary", "trace.json"]


def test_a_run_of_too_few_steps_is_refused_with_how_many_epochs_it_takes(config, tmp_path):
    with pytest.raises(ValueError, match=r"36 steps, and 46 are needed: give --epochs 8\b"):
        profile_steps(config, ALONE, tmp_path / "trace.json", steps=40, warmup=5)
