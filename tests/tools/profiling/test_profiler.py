"""The trainer's own steps under the profiler: a slowdown appears in the right part of the step.

Slowdowns are many times as long as a step of the tiny model, and the shortest of several steps is examined,
so a busy machine does not matter.
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
from fastclip.errors import OptionError
from fastclip.tools.profiling import profiler
from fastclip.tools.profiling.profiler import profile_steps
from fastclip.tools.profiling.timeline import WAITING_FOR_DATA, read_events
from fastclip.training import trainer
from fastclip.training.step import TrainStep
from tests.ranks import run_ranks
from tests.training.runs import Lab, metrics

ALONE = World(0, 1, 0, torch.device("cpu"), None)
SLOWED = 0.1  # seconds per step
ALGORITHMS = ("openclip", "fastclip-v2")  # one waits inside backward nodes, the other outside


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def config(lab, monkeypatch):
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
    return resolve(parse(lab.options("unused", "fastclip-v3")))


@contextmanager
def before_images_are_encoded(do):
    """Call `do` in the image tower's forward, for models built meanwhile."""
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


def least(rank, part):
    """Seconds of a part in the step with the least of it."""
    return min(getattr(step, part) for step in rank.steps) / 1000


def most(rank, part):
    """Seconds of a part in the step with the most of it."""
    return max(getattr(step, part) for step in rank.steps) / 1000


# Several ranks.


def profile_slowed(rank, size, lab_options, cache, folder):
    """Profile each algorithm with a slow encoder, and with rank 1 late."""
    os.environ["FASTCLIP_CACHE"] = cache
    world = World(rank, size, rank, torch.device("cpu"), dist.group.WORLD)
    slowed = {"slow encoder": compute, "late": lambda: time.sleep(SLOWED * rank)}
    profiles = {}
    for algorithm, options in lab_options.items():
        config, trace = resolve(parse(options)), Path(folder) / f"{algorithm}-{rank}.json.gz"
        for name, do in slowed.items():
            with before_images_are_encoded(do):
                profiles[algorithm, name] = profile_steps(config, world, trace, steps=6, warmup=2)
    return profiles


@pytest.fixture(scope="module")
def ranks(lab, tmp_path_factory):
    options = {name: lab.options("unused", name) for name in ALGORITHMS}
    folder = str(tmp_path_factory.mktemp("traces"))
    return run_ranks(profile_slowed, 2, options, lab.environment["FASTCLIP_CACHE"], folder)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_slow_encoder_is_computation_and_not_communication(ranks, algorithm):
    slow, late = ([rank[algorithm, name] for rank in ranks] for name in ("slow encoder", "late"))
    for rank, without in zip(slow, late, strict=True):
        assert least(rank, "computation") - least(without, "computation") > 0.8 * SLOWED
    assert min(least(rank, "communication") for rank in slow) < 0.5 * SLOWED


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_waiting_for_a_late_rank_is_communication_and_not_computation(ranks, algorithm):
    waits, late = (rank[algorithm, "late"] for rank in ranks)
    assert most(waits, "pure_communication") > 0.8 * SLOWED
    assert least(waits, "computation") < 0.5 * SLOWED
    assert least(late, "pure_communication") < 0.5 * SLOWED
    assert most(late, "others") > 0.8 * SLOWED  # it slept


def test_bytes_are_counted_by_kind(ranks):
    """Only OpenCLIP sends gradients of features; both send those of weights."""
    theirs, ours = (ranks[0][algorithm, "late"].sent for algorithm in ALGORITHMS)
    assert theirs.keys() == {"all_gather", "all_reduce", "scatter"}
    assert ours.keys() == {"all_gather", "all_reduce"}
    local, features, value = 8, 16, 4  # batch of 16 on 2 ranks, the tiny model's features, float32
    assert theirs["all_gather"] == theirs["scatter"] == 2 * local * features * value
    scalars = 6 * local + 2  # λ, log u and a gradient of τ for each side of a pair; two totals
    assert ours["all_gather"] == (2 * local * features + scalars) * value + 8 * local  # and the ids
    rows = 2 * local * 4 * value  # of the state of the global batch
    assert ours["all_reduce"] == theirs["all_reduce"] + rows - value  # their temperature is a weight


# One rank.


@pytest.mark.slow
def test_totals_of_steps_add_up_to_the_wall_time(config, tmp_path, monkeypatch):
    ends, one_step = [], TrainStep.__call__

    def timed(self, batch):
        result = one_step(self, batch)
        ends.append(time.perf_counter())
        return result

    monkeypatch.setattr(TrainStep, "__call__", timed)
    measured = profile_steps(config, ALONE, tmp_path / "trace.json", steps=10, warmup=2)
    assert len(measured.steps) == 10
    assert sum(step.total for step in measured.steps[1:]) / 1000 == pytest.approx(
        ends[11] - ends[2], rel=0.02
    )
    for step in measured.steps:
        assert step.total == pytest.approx(step.computation + step.pure_communication + step.others)
        assert 0 < step.data_wait <= step.others
        assert step.computation > 0 == step.communication


@pytest.mark.slow
def test_a_slow_loader_is_waiting_for_data_and_not_computation(config, tmp_path, monkeypatch):
    """Even if it computes in this process."""
    batches = PairLoader.__iter__

    def slow_batches(self):
        for batch in batches(self):
            compute()
            yield batch

    monkeypatch.setattr(PairLoader, "__iter__", slow_batches)
    measured = profile_steps(config, ALONE, tmp_path / "trace.json", steps=5, warmup=1)
    assert least(measured, "data_wait") > 0.9 * SLOWED
    assert least(measured, "computation") < 0.5 * SLOWED


@pytest.mark.slow
@pytest.mark.parametrize("micro", ["null", "auto"])
def test_profiled_steps_are_those_of_training(micro, lab, config, tmp_path, monkeypatch):
    short = {"epochs": 1, "evaluate__pairs": "null", "checkpoint__every_steps": "null", "batch__micro": micro}
    config = resolve(parse(lab.options(tmp_path / "run", "fastclip-v3", **short)))
    losses, one_step = [], TrainStep.__call__

    def recorded(self, batch):
        result = one_step(self, batch)
        losses.append(float(result.stats["loss"]))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", recorded)
        profile_steps(config, ALONE, tmp_path / "trace.json", steps=2, warmup=1)
    trainer.train(config, ALONE)
    assert losses == [record["loss"] for record in metrics(tmp_path / "run")][:4]


@pytest.mark.slow
def test_the_trace_contains_the_measured_steps_and_their_waits_for_data(config, tmp_path):
    trace = tmp_path / "made" / "trace.json.gz"
    measured = profile_steps(config, ALONE, trace, steps=2, warmup=1)
    names = [event["name"] for event in read_events(trace) if event.get("cat") == "user_annotation"]
    assert sorted(name for name in names if name.startswith("ProfilerStep")) == [
        "ProfilerStep#1",
        "ProfilerStep#2",
    ]
    assert names.count(WAITING_FOR_DATA) == 2
    assert measured.sent == {}
    assert "RSS" in measured.memory


@pytest.mark.slow
def test_only_the_trace_is_written(config, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    profile_steps(config, ALONE, tmp_path / "trace.json", steps=1, warmup=1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["temporary", "trace.json"]


@pytest.mark.slow
def test_a_run_of_too_few_steps_is_an_error_with_the_epochs_it_takes(config, tmp_path):
    with pytest.raises(OptionError) as caught:
        profile_steps(config, ALONE, tmp_path / "trace.json", steps=40, warmup=5)
    assert (caught.value.option, caught.value.value) == ("steps", 40)
    assert "36" in caught.value.rule
    assert "46" in caught.value.rule
    assert "--epochs 8," in caught.value.advice
