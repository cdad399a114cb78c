"""A constant or wsd run that is prolonged, or decayed later, is the run that was so planned, bit for bit."""

import json

import pytest
import torch

from fastclip.config.options import (
    BatchConfig,
    LossOptions,
    ModelConfig,
    OptimOptions,
    PatchDropout,
    TrainConfig,
)
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve, resolve_again
from fastclip.distributed.world import World
from fastclip.errors import OptionError, PathError
from fastclip.run.checkpoint import Checkpoints
from fastclip.run.folder import is_trained, read_metadata, read_run
from fastclip.run.metrics_file import read_metrics
from fastclip.run.verify import verify_run
from fastclip.training.prolonging import Course, continued, keep_records
from fastclip.training.trainer import train as train_run
from tests.training.runs import Lab, assert_same_run, final_state, metrics

ALONE = World(0, 1, 0, torch.device("cpu"), None)
N, B = 1000, 10  # 100 steps an epoch


# The rules, on checkpoints without a model


def config(schedule="wsd", epochs=1.0, share=None, min_lr=None, **changed):
    optim = OptimOptions(lr=1e-3, schedule=schedule, decay_share=share, min_lr=min_lr)
    return resolve(TrainConfig(epochs=epochs, batch=BatchConfig(B), optim=optim, **changed))


def save(folder, run, *steps):
    """Checkpoints of a run at these steps; the newest is returned."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=9)
    for step in steps:
        metadata = {"step": step, "config": json.loads(json.dumps(run.written)), "num_samples": N}
        metadata["total_steps"] = run.total_steps(N)
        checkpoints.save(step, {"x": torch.zeros(1)}, metadata)
    return checkpoints.newest()


@pytest.mark.parametrize(
    ("before", "steps", "now", "resumed"),
    [
        (("wsd", 1), [40, 60], ("wsd", 2), 60),  # stable: the same up to here
        (("wsd", 1), [60, 80], ("wsd", 2), 80),  # the decay has not begun
        (("wsd", 1), [60, 80, 90], ("wsd", 1), 90),  # the same course
        (("wsd", 1), [60, 80, 90], ("wsd", 2), 80),
        (("wsd", 1), [60, 100], ("wsd", 2), 60),  # the save at step 80 may have failed
        (("wsd", 1), [60, 80, 100], ("constant", 1), 80),
        (("wsd", 1), [60, 80, 100], ("wsd", 1, 0.1), 80),  # decayed differently
        (("wsd", 1), [60, 80, 100], ("wsd", 1, None, 1e-5), 80),
        (("constant", 1), [60, 100], ("constant", 3), 100),
        (("constant", 1), [60, 100], ("wsd", 1.25), 100),
        (("constant", 1), [60], ("wsd", 1), 60),
        (("constant", 2), [120], ("constant", 1.2), 120),  # shortened
    ],
)
def test_a_run_continues_from_the_newest_checkpoint_that_both_courses_share(
    before, steps, now, resumed, tmp_path
):
    newest = save(tmp_path, config(*before), *steps)
    course, checkpoint = continued(config(*now), newest)
    assert read_metadata(checkpoint)["step"] == resumed
    assert course.epochs == now[1]


@pytest.mark.parametrize(
    ("before", "done", "now", "shortest"),
    [
        (("constant", 1), 100, ("wsd", 1), 1.25),
        (("constant", 1), 100, ("wsd", 1.2, 0.5), 2.0),
        (("constant", 2), 120, ("constant", 1), 1.2),
        (("wsd", 1), 70, ("wsd", 0.5), 0.87),
        (("wsd", 1), 100, ("wsd", 0.9), 1.0),
    ],
)
def test_a_course_that_ends_before_the_steps_done_is_refused_and_the_example_works(
    before, done, now, shortest, tmp_path
):
    newest = save(tmp_path, config(*before), *{done, min(done, 80)})
    with pytest.raises(OptionError) as caught:
        continued(config(*now), newest)
    error = caught.value
    assert (error.option, error.value, error.example) == ("epochs", now[1], pytest.approx(shortest, abs=2e-3))
    continued(config(now[0], error.example, *now[2:]), newest)


def test_without_a_checkpoint_from_before_the_decay_it_is_an_error(tmp_path):
    newest = save(tmp_path, config("wsd", 1), 90, 100)
    with pytest.raises(PathError) as caught:
        continued(config("wsd", 2), newest)
    assert caught.value.path == str(tmp_path)
    assert "step 80" in caught.value.problem


def test_a_damaged_checkpoint_from_before_the_decay_is_named(tmp_path):
    newest = save(tmp_path, config("wsd", 1), 80, 100)
    (file,) = (tmp_path / "checkpoints/step-00000080").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(PathError) as caught:
        continued(config("wsd", 2), newest)
    assert caught.value.path == str(file)


def test_a_cosine_keeps_its_own_length_and_is_never_prolonged(tmp_path):
    run = config("cosine", 1)
    newest = save(tmp_path, run, 60)
    assert continued(run, newest) == (run, newest)
    saved = read_metadata(newest)
    older = saved | {"total_steps": 99}  # versions before counted complete batches
    assert Course.of(run, N, older) == (99, None, {}, 0)
    assert Course.of(run, N, None) == (100, None, {}, 0)


def test_values_derived_from_the_epochs_stay_those_of_the_first_plan(tmp_path):
    """Also when the run is prolonged twice, and without the config.yaml of the run."""
    values = {
        "loss": LossOptions(gamma="auto"),
        "model": ModelConfig(patch_dropout=PatchDropout(0.5, until=0.9)),
    }
    first = config("constant", 20.0, **values)
    newest = save(tmp_path / "first", first, 2000)
    second, _ = continued(config("constant", 30.0, **values), newest)
    assert (second.epochs, second.planned_epochs) == (30.0, 20.0)
    assert second.loss == first.loss != config("constant", 30.0, **values).loss
    assert resolve_again(json.loads(json.dumps(second.written))) == second
    course = Course.of(second, N, read_metadata(newest))
    assert (course.total, course.changes["total_steps"]) == (3000, 3000)
    assert course.changes["config"]["planned_epochs"] == 20.0

    third, _ = continued(config("wsd", 50.0, **values), save(tmp_path / "second", second, 3000))
    assert (third.epochs, third.planned_epochs, third.loss) == (50.0, 20.0, first.loss)
    same, _ = continued(config("constant", 30.0, **values), save(tmp_path / "third", second, 3000))
    assert same == second
    assert Course.of(same, N, read_metadata(tmp_path / "third/checkpoints/last")).changes == {}


def test_records_beyond_the_step_are_copied_before_they_are_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    keep_records(file, 3)  # there is none
    file.write_text("".join(json.dumps({"step": step, "epoch": 0.1 * step}) + "\n" for step in range(6)))
    keep_records(file, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    keep_records(file, 3)
    assert read_metrics(tmp_path / "metrics-00000005.jsonl") == read_metrics(file)


# Whole runs


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Runs with 6 steps per epoch."""
    return Lab(tmp_path_factory.mktemp("lab"), epochs=2)


@pytest.fixture
def train(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])

    def run(name, **changed):
        defaults = {"evaluate__pairs": "null", "loss__gamma": "auto"}
        options = lab.options(tmp_path / name, "fastclip-v3", **defaults | changed)
        train_run(resolve(parse(options)), ALONE)
        return tmp_path / name

    return run


def again(run, name):
    """Train from the run's config.yaml in another folder."""
    options = ["--config", str(run / "config.yaml"), "--out", str(run.with_name(name))]
    train_run(resolve(parse(options)), ALONE)
    return run.with_name(name)


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_constant_run_is_prolonged_and_then_decayed_exactly(train):
    run = train("run", optim__schedule="constant", model__ema=0.9)
    assert len(metrics(run)) == 12
    assert is_trained(run)
    train("run", optim__schedule="constant", epochs=3, model__ema=0.9)
    assert [record["lr"] for record in metrics(run)][1:] == [2.5e-4] * 17
    assert_same_run(run, again(run, "constant"))

    train("run", optim__schedule="wsd", epochs=4, model__ema=0.9)
    read = read_run(run)
    assert (read.step, read.total_steps, read.state().kind, read.config.epochs) == (24, 24, "finished", 4)
    assert_same_run(run, again(run, "wsd"))  # a run that was wsd from the start
    rates = [record["lr"] for record in metrics(run)]
    assert rates[1:19] == [2.5e-4] * 18
    assert rates[-1] < 5e-5


@pytest.mark.slow
def test_a_decayed_run_is_prolonged_from_before_its_decay_and_nothing_is_lost(train):
    run = train("run", optim__schedule="wsd", checkpoint__keep=1, checkpoint__every_steps="null")
    assert checkpoints(run) == ["step-00000010", "step-00000012"]
    assert "lowered in the last 20 % of the steps |" in (run / "model" / "README.md").read_text()
    decayed = metrics(run)
    train("run", optim__schedule="wsd", epochs=3, checkpoint__every_steps="null")
    assert checkpoints(run) == ["step-00000012.decayed", "step-00000014", "step-00000018"]
    assert [{k: v for k, v in one.items() if k != "time"} for one in read_metrics(
        run / "metrics-00000012.jsonl"
    )] == decayed  # fmt: skip
    assert metrics(run)[:10] == decayed[:10]
    assert_same_run(run, again(run, "again"))
    findings = {finding.file: finding.state for finding in verify_run(run)}
    assert findings.pop("checkpoints/step-00000012.decayed") == "unknown"
    assert set(findings.values()) == {"fine"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wsd_run_with_an_average_killed_and_prolonged_ends_with_the_bits_of_the_longer_one(lab, tmp_path):
    changed = {"optim__schedule": "wsd", "model__ema": 0.9}
    kill_after(lab.start(tmp_path / "run", 2, **changed), 6)  # the rate is constant up to step 10
    lab.start(tmp_path / "run", 2, epochs=3, **changed).finish()
    lab.start(tmp_path / "planned", 2, epochs=3, planned_epochs=2, **changed).finish()
    assert_same_run(tmp_path / "run", tmp_path / "planned")
    assert any(name.startswith("ema.") for name in final_state(tmp_path / "run"))


@pytest.mark.slow
def test_records_of_a_decay_are_kept_even_if_the_prolonged_run_dies_at_its_start(train, monkeypatch):
    run = train("run", optim__schedule="wsd")

    def fail(*_):
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr("fastclip.training.trainer.write_schema", fail)
        with pytest.raises(RuntimeError):
            train("run", optim__schedule="wsd", epochs=2.5)
    train("run", optim__schedule="wsd", epochs=2.5)
    assert len(read_metrics(run / "metrics-00000012.jsonl")) == 12
    assert len(metrics(run)) == 15


def kill_after(run, step):
    """Kill a run when it has recorded this step; if it has ended meanwhile, the result is the same."""
    try:
        run.wait_for_step(step)
    except AssertionError:
        assert run.last_step() >= step, run.output()
    run.kill()


@pytest.mark.slow
def test_a_prolonged_run_that_dies_at_once_is_not_finished_and_its_folder_is_consistent(train, monkeypatch):
    run = train("run", optim__schedule="constant")

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fastclip.training.trainer.Trainer._train", kill)
        with pytest.raises(Killed):
            train("run", optim__schedule="constant", epochs=3)
    assert not is_trained(run)
    assert (read_run(run).step, read_run(run).total_steps) == (12, 18)
    assert {finding.state for finding in verify_run(run)} == {"fine"}
    train("run", optim__schedule="constant", epochs=3)
    assert is_trained(run)
