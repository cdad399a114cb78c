"""Logging of a run: records are never lost, and no failure of logging stops the run."""

import errno
import json
import logging
import os
import resource
import sys
import time
from functools import partial

import pytest
from rich.console import Console

from fastclip.errors import OptionError
from fastclip.run import metrics_file as metrics_module
from fastclip.run.metrics_file import MetricsFile, read_metrics, truncate_metrics
from fastclip.training.display import Display
from fastclip.training.telemetry import NullTelemetry, Plan, Telemetry

RECORD = {
    "step": 120,
    "epoch": 3.25,
    "samples": 3840,
    "loss": 3.4,
    "tau": 0.07,
    "bad": 0,
    "time": {"elapsed": 1.5, "samples_per_second": 1240.0, "data_wait": 0.03, "step": 0.2},
}
EVALUATION = {"step": 120, "epoch": 3.25, "evaluation": {"retrieval/r1": 0.125}, "best": True}


@pytest.fixture
def plan(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    return Plan(
        run,
        "openclip · tiny",
        total_steps=200,
        epochs=5,
        steps_per_epoch=40.0,
        global_batch=32,
        rho=None,
        ranks=1,
    )


def resumed(plan, step):
    return Plan(**{**plan.__dict__, "start_step": step})


def test_records_are_written_unchanged_one_per_line(plan):
    path = plan.run / "metrics.jsonl"
    with Telemetry(plan) as telemetry:
        for step in range(1, 121):
            telemetry.tick(step)
        assert not path.exists()  # a tick writes nothing
        telemetry.log(RECORD)
        assert read_metrics(path) == [RECORD]  # immediately, not when closed
        telemetry.evaluated(EVALUATION)
        telemetry.message("saved checkpoint 120")
    records = read_metrics(path)
    assert records == [RECORD, EVALUATION]
    assert [list(record) for record in records] == [list(RECORD), list(EVALUATION)]
    assert list(records[0]["time"]) == list(RECORD["time"])


def test_values_that_are_not_finite_become_null(plan):
    nan, inf = float("nan"), float("inf")
    with Telemetry(plan) as telemetry:
        telemetry.log(RECORD | {"loss": nan, "log_u_q05": -inf, "time": {"elapsed": inf}})
    text = (plan.run / "metrics.jsonl").read_text()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(text, parse_constant=refuse)
    assert (record["loss"], record["log_u_q05"], record["time"]["elapsed"]) == (None, None, None)
    assert record["tau"] == 0.07


def test_closing_twice_is_harmless_and_an_error_closes_as_well(plan, capsys):
    telemetry = Telemetry(plan)
    telemetry.log(RECORD)
    telemetry.log(RECORD | {"step": 121})
    with pytest.raises(KeyboardInterrupt), telemetry:
        raise KeyboardInterrupt
    telemetry.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["120/200", "121/200"]


def test_null_telemetry_accepts_every_call_and_prints_nothing(capfd):
    with NullTelemetry() as telemetry:
        telemetry.tick(1)
        telemetry.log(RECORD)
        telemetry.evaluated(EVALUATION)
        telemetry.message("not printed")
    assert capfd.readouterr() == ("", "")


def test_truncation_drops_later_steps_and_an_incomplete_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step},  "loss": 0.5}}' for step in (10, 20, 20, 30)]  # spaces are preserved
    path.write_text("\n".join(lines) + '\n{"step": 40, "lo')
    assert [record["step"] for record in read_metrics(path)] == [10, 20, 20, 30]
    truncate_metrics(path, 20)
    assert path.read_text() == "\n".join(lines[:3]) + "\n"
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["metrics.jsonl"]
    truncate_metrics(path, 5)
    assert path.read_text() == ""


def test_truncation_drops_an_evaluation_that_is_to_be_repeated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 10, "evaluation": {}}', '{"step": 20, "loss": 0.5}', '{"step": 20, "evaluation": {}}']
    path.write_text("\n".join(lines) + "\n")
    truncate_metrics(path, 20)
    assert len(read_metrics(path)) == 3
    truncate_metrics(path, 20, evaluated=19)
    assert path.read_text().splitlines() == lines[:2]


def test_a_line_that_only_lacks_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n{"step": 20}')
    truncate_metrics(path, 20)
    assert path.read_text() == '{"step": 10}\n{"step": 20}\n'


@pytest.mark.parametrize("torn", [b'{"step": 1', b"12", b'"', b"\0\0\0\0", b"\xe2\x82"])
def test_an_incomplete_line_never_hides_the_others(tmp_path, torn, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 10}\n' + torn)
    assert read_metrics(path) == [{"step": 10}]
    assert not caplog.records
    path.write_bytes(torn + b'\n{"step": 10}\n')  # not at the end, so not left by a kill: a warning
    assert read_metrics(path) == [{"step": 10}]
    assert [record.args for record in caplog.records] == [(path, 1)]


def test_truncating_a_missing_file_does_nothing(tmp_path):
    truncate_metrics(tmp_path / "metrics.jsonl", 0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_truncation_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n{"step": 20}\n')

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics_module.os, "fsync", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        truncate_metrics(path, 10)
    assert [record["step"] for record in read_metrics(path)] == [10, 20]


def test_a_full_disk_logs_one_warning_and_loses_no_record(plan, caplog):
    path = plan.run / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with Telemetry(plan) as telemetry:
        for step in (10, 20, 30):
            telemetry.log(RECORD | {"step": step})
        (warning,) = caplog.records
        assert (warning.levelname, warning.args) == ("WARNING", (path, os.strerror(errno.ENOSPC)))
        path.unlink()  # space again
        telemetry.log(RECORD | {"step": 40})
        assert [record["step"] for record in read_metrics(path)] == [10, 20, 30, 40]
    assert len(caplog.records) == 1
    assert len(read_metrics(path)) == 4


def test_half_a_line_on_a_full_disk_is_removed(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write({"step": 1, "epoch": 0.1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # the system writes up to here
    try:
        metrics.write(RECORD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == '{"step": 1, "epoch": 0.1}\n'
    assert len(caplog.records) == 1
    metrics.flush()
    assert [record["step"] for record in read_metrics(path)] == [1, 120]


def test_a_closed_terminal_or_full_log_file_does_not_stop_the_run(plan):
    with open("/dev/full", "w", buffering=1) as full:
        with Telemetry(plan, display=partial(Display, console=Console(file=full))) as telemetry:
            telemetry.tick(120)
            telemetry.log(RECORD)
            telemetry.evaluated(EVALUATION)
            telemetry.message("saved")
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            full.close()
    assert len(read_metrics(plan.run / "metrics.jsonl")) == 2


def test_a_resumed_run_still_shows_its_best_evaluation(plan):
    shown = []
    with open(plan.run / "metrics.jsonl", "w") as file:
        for record in (RECORD, EVALUATION):
            file.write(json.dumps(record) + "\n")
    Telemetry(resumed(plan, 120), display=lambda plan, evaluations: shown.append(evaluations))
    assert shown == [[EVALUATION]]


def test_tensorboard_events_can_be_read_back_after_a_resume(plan):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Telemetry(plan, tensorboard=True) as telemetry:
        telemetry.log(RECORD | {"gamma": None})
        telemetry.evaluated(EVALUATION)
        telemetry.log(RECORD | {"step": 130, "loss": 9.0})  # after the checkpoint: logged again
    with Telemetry(resumed(plan, 120), tensorboard=True) as telemetry:
        telemetry.log(RECORD | {"step": 130, "loss": 3.0})
    events = EventAccumulator(str(plan.run / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(120, pytest.approx(3.4)), (130, 3.0)]
    assert [event.value for event in events.Scalars("evaluation/retrieval/r1")] == [0.125]
    tags = set(events.Tags()["scalars"])
    assert {"train/tau", "train/epoch", "time/samples_per_second", "time/step"} <= tags
    assert not {"train/gamma", "train/step", "train/time"} & tags


@pytest.mark.slow
def test_weights_and_biases_offline_keeps_its_id_over_a_resume(plan, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    started = time.monotonic()
    for one in (plan, resumed(plan, 120)):
        with Telemetry(one, wandb_project="fastclip-test", config={"seed": 1}) as telemetry:
            telemetry.log(RECORD)
            telemetry.evaluated(EVALUATION)
        if time.monotonic() - started > 10:
            pytest.skip("Weights & Biases is slow here")
    files = list((plan.run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    name = b"evaluation/retrieval/r1"
    while not all(name in file.read_bytes() for file in files):  # written by another process, a moment later
        assert time.monotonic() - started < 30
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("package", "options", "value"),
    [("tensorboard", {"tensorboard": True}, True), ("wandb", {"wandb_project": "test"}, "test")],
)
def test_a_missing_package_is_named(plan, monkeypatch, package, options, value):
    for name in [package, "torch.utils.tensorboard"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError) as caught:
        Telemetry(plan, **options)
    assert (caught.value.option, caught.value.value) == (f"log.{package}", value)
    assert f"fastclip[{package}]" in caught.value.advice


@pytest.mark.slow
def test_optional_packages_are_imported_only_when_used():
    import subprocess

    code = (
        "import sys, fastclip.training.telemetry as t; from pathlib import Path;"
        "t.Telemetry(t.Plan(Path('.'), '', 10, 10, 1.0, 8, None, 1)).close();"
        "print([name for name in ('torch', 'wandb', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_failing_service_is_dropped_with_one_warning(plan, caplog):
    class Failing:
        name = "Failing service"

        def write(self, step, numbers):
            raise ConnectionError("no route to host")

        def close(self, failed):
            raise AssertionError("was used after it failed")

    with caplog.at_level(logging.WARNING), Telemetry(plan, sinks=[Failing()]) as telemetry:
        telemetry.log(RECORD)
        telemetry.log(RECORD | {"step": 130})
    (warning,) = caplog.records
    assert [str(argument) for argument in warning.args] == ["Failing service", "no route to host"]
    assert len(read_metrics(plan.run / "metrics.jsonl")) == 2
