"""SIGTERM and Ctrl-C in every phase of `fastclip train` outside the loop: exit code 75, nothing left."""

import ctypes
import os
import signal
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from fastclip.run.folder import MODEL
from tests.processes import wait_for
from tests.training.runs import ALGORITHM, Lab, Run, assert_same_run

PHASES = {  # what is running when the signal comes: a function that is stuck from then on
    "joining": "fastclip.distributed.world.start_watch",
    "indexing": "fastclip.training.training_pairs.open_manifest",
    "building": "fastclip.training.trainer.build_towers",
    "loading": "fastclip.training.trainer.load",
    "exporting": "fastclip.training.trainer.export",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Runs of 6 steps."""
    return Lab(tmp_path_factory.mktemp("lab"), epochs=1)


def stick(phase, folder, at, rank):
    """On this rank, make the phase never end, in C code; it writes a file first."""
    if rank == at:
        module, _, name = PHASES[phase].rpartition(".")

        def stuck(*_, **__):
            (folder / "stuck").touch()
            ctypes.CDLL(None).sleep(600)

        setattr(import_module(module), name, stuck)


def start_stuck(lab, out, ranks, phase, at=0):
    options = lab.options(out, ALGORITHM[ranks])
    run = Run(options, ranks, lab.environment, prepare=partial(stick, phase, out, at))
    assert wait_for(lambda: (out / "stuck").exists()), run.output()
    return run


def lines(run):
    return [line for line in run.output().splitlines() if "same command" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "number"),
    [("indexing", signal.SIGTERM), ("building", signal.SIGINT), ("exporting", signal.SIGTERM)],
)
def test_a_signal_outside_the_loop_ends_with_75_and_the_same_command_does_the_rest(
    lab, tmp_path, phase, number
):
    out = tmp_path / "run"
    run = start_stuck(lab, out, 1, phase)
    run.signal(number)
    assert run.wait() == [75], run.output()
    (line,) = lines(run)
    assert line.startswith(f"{number.name}: ")
    assert ("export" in line) == (phase == "exporting")
    assert not list(out.glob("running*"))
    assert not (out / MODEL).exists()
    assert lab.start(out).finish().output().count("Resumed") == (phase == "exporting")
    assert (out / MODEL / "open_clip_config.json").exists()
    assert_same_run(out, lab.reference(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "at", "signalled"),
    [("joining", 1, None), ("building", 1, 1), ("exporting", 0, 0), ("exporting", 0, 1)],
)
def test_two_ranks_end_alike_wherever_each_is_and_whichever_is_signalled(lab, tmp_path, phase, at, signalled):
    """The rank that is not stuck waits for the other in C++ code."""
    out = tmp_path / "run"
    run = start_stuck(lab, out, 2, phase, at)
    run.signal(signal.SIGTERM, signalled)
    assert run.wait() == [75, 75], run.output()
    assert len(lines(run)) == 1
    assert not list(out.glob("running*"))


@pytest.mark.slow
def test_a_stop_before_training_resumes_names_the_checkpoint_that_is_kept(lab, tmp_path):
    out = tmp_path / "run"
    start_stuck(lab, out, 1, "exporting").kill()
    (out / "stuck").unlink()
    run = start_stuck(lab, out, 1, "loading")
    run.signal(signal.SIGTERM)
    assert run.wait() == [75]
    assert "step 6." in lines(run)[-1]


def fail_or_wait(folder, rank):
    """Rank 1 fails while rank 0 builds its towers."""
    stick("building", folder, 0, rank)
    if rank == 1:

        def fail(*_, **__):
            assert wait_for(lambda: (folder / "stuck").exists())
            raise OSError("no such disk")

        import_module("fastclip.training.trainer").build_towers = fail


@pytest.mark.slow
def test_a_rank_that_is_ended_because_another_failed_does_not_ask_to_be_resumed(lab, tmp_path):
    """As a launcher does that ends the others; 75 would make a chain of jobs repeat the error for ever."""
    out = tmp_path / "run"
    run = Run(lab.options(out, ALGORITHM[2]), 2, lab.environment, prepare=partial(fail_or_wait, out))
    run.processes[1].join(60)
    assert run.processes[1].exitcode == 1, run.output()
    run.signal(signal.SIGTERM, 0)
    assert run.wait() == [1, 1], run.output()
    assert "rank 1 failed with OSError: no such disk" in run.output()
    assert not list(out.glob("running*"))


def signal_in_last_step(rank):
    from fastclip.training.trainer import Trainer

    record = Trainer._record

    def record_and_signal(self, *values):
        record(self, *values)
        if self.step == self.total and rank == self.world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer._record = record_and_signal


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_in_the_last_step_saves_it_and_the_same_command_exports(lab, tmp_path, ranks):
    out = tmp_path / "run"
    options = lab.options(out, ALGORITHM[ranks])
    run = Run(options, ranks, lab.environment, prepare=signal_in_last_step)
    assert run.wait() == [75] * ranks, run.output()
    assert "export" in lines(run)[-1]
    assert not (out / MODEL).exists()
    lab.start(out, ranks).finish()
    assert (out / MODEL).exists()
    assert_same_run(out, lab.reference(ranks))


@pytest.mark.slow
def test_the_command_answers_a_signal_while_it_still_imports_torch(lab, tmp_path):
    """A package of that name that never comes to an end, and tells that it has begun."""
    torch, begun = tmp_path / "torch", tmp_path / "begun"
    torch.mkdir()
    (torch / "__init__.py").write_text(f"open({str(begun)!r}, 'w')\nimport time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "fastclip", "train", *lab.options(tmp_path / "run", ALGORITHM[1])]
    source = str(Path(import_module("fastclip").__file__).parent.parent)
    environment = os.environ | lab.environment | {"PYTHONPATH": f"{tmp_path}:{source}"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert wait_for(begun.exists)
            process.terminate()
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75, error
    assert error.startswith("SIGTERM: ")
    assert len(error.splitlines()) == 1
