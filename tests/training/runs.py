"""Runs of `fastclip train` in their own processes, with one rank or several, to be killed and resumed."""

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from fastclip.processes import free_port
from fastclip.run.checkpoint import load, tensor_names
from fastclip.run.folder import read_metadata
from fastclip.run.metrics_file import read_metrics
from tests.data.collections import png, write_tar
from tests.ranks import CONTEXT

MOMENTS = ("start-up", "step", "save")  # when a run may be killed
ALGORITHM = {1: "fastclip-v3", 2: "fastclip-v2"}  # one temperature; individual ones, sharded over ranks
MODEL = {  # tiny except for the vocabulary: a step takes 20 ms, a checkpoint 10 MB
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
}
WORDS = ["red", "green", "blue", "black", "small", "large", "round", "flat"]


def collection(folder, n=96, start=0, damaged=(), longer=0):
    """A tar of n small images with captions; `start` gives others, `longer` adds words to half of them."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = {}
    for i in range(start, start + n):
        pairs[f"{i:05d}.png"] = b"not an image" if i in damaged else png(i, size=(32, 32))
        pairs[f"{i:05d}.txt"] = (
            f"a {WORDS[i % 8]} {WORDS[i // 8 % 8]} thing number {i}{' too' * (i % 2 * longer)}".encode()
        )
    write_tar(folder / "pairs.tar", pairs.items())
    return folder / "pairs.tar"


class Lab:
    """Pairs, a model, and runs with 6 steps per epoch, evaluated every 2 epochs, saved every 4 steps."""

    def __init__(self, folder, epochs=6):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.epochs = folder, epochs
        self.environment = {"FASTCLIP_CACHE": str(folder / "cache")}
        self.model = folder / "tiny-run.json"
        self.model.write_text(json.dumps(MODEL))
        self.train = collection(folder / "train", 96)
        self.held_out = collection(folder / "held-out", 24, start=1000)
        self._references = {}

    def options(self, out, algorithm, **changed):
        options = {
            "config": "scenes",
            "out": out,
            "algorithm": algorithm,
            "model.name": self.model,
            "data.train": self.train,
            "data.keep_decoded": "false",
            "evaluate.pairs": self.held_out,
            "evaluate.every_epochs": 2,
            "batch.size": 16,
            "epochs": self.epochs,
            "log.every_steps": 1,
            "checkpoint.every_steps": 4,
        } | {name.replace("__", "."): value for name, value in changed.items()}
        return [str(part) for name, value in options.items() for part in (f"--{name}", value)]

    def start(self, out, ranks=1, algorithm=None, largest_file=None, **changed):
        options = self.options(out, algorithm or ALGORITHM[ranks], **changed)
        return Run(options, ranks, self.environment, largest_file)

    def reference(self, ranks):
        """The folder of an uninterrupted run."""
        if ranks not in self._references:
            out = self.folder / f"reference-{ranks}"
            self.start(out, ranks).finish()
            self._references[ranks] = out
        return self._references[ranks]


class Run:
    """`fastclip train` with these options, as `ranks` processes.

    No file can grow beyond `largest_file` bytes, as on a disk that is nearly full. `prepare` is called
    with the rank in its process; it must be at the top level of a module.
    """

    def __init__(self, options, ranks=1, environment=None, largest_file=None, prepare=None):
        self.options, self.ranks = options, ranks
        port = free_port() if ranks > 1 else 0
        self.folder = Path(options[options.index("--out") + 1])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder.with_name(self.folder.name + ".log")
        self._step_before, self._started = self.last_step(), time.time()
        common = (str(self.log), environment or {}, largest_file, prepare)
        self.processes = [
            CONTEXT.Process(target=_main, args=(options, rank, ranks, port, *common)) for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def wait(self, timeout=90):
        """Exit codes, in the order of ranks."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = any(process.is_alive() for process in self.processes)
        self.kill()
        assert not late, f"did not end within {timeout} s:\n{self.output()}"
        return [process.exitcode for process in self.processes]

    def finish(self, timeout=90):
        """Wait for a run that must succeed."""
        codes = self.wait(timeout)
        assert codes == [0] * self.ranks, f"{codes}\n{self.output()}"
        return self

    def wait_for_step(self, step, timeout=60):
        """Wait until metrics.jsonl has a record of this step or a later one; requires log.every_steps 1."""
        self._wait_until(lambda: self.last_step() >= step, f"step {step}", timeout)

    def last_step(self):
        """The step of the newest record; -1 if there is none."""
        try:
            return max((record["step"] for record in read_metrics(self.folder / "metrics.jsonl")), default=-1)
        except FileNotFoundError:
            return -1

    def _wait_until(self, condition, event, timeout=60):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(process.is_alive() for process in self.processes):
            if condition():
                return
            time.sleep(0.005)
        raise AssertionError(f"{event} did not happen:\n{self.output()}")

    def signal(self, number, rank=None):
        for process in self.processes if rank is None else [self.processes[rank]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self):
        """Kill all processes, like a power cut."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()

    def kill_during(self, moment, random):
        """Kill −9 at a random time during start-up, one of the next steps, or the next save."""
        longest = 0.05  # seconds, about as long as a step or a save
        if moment == "start-up":
            longest = 1.0
        elif moment == "step":
            self.wait_for_step(max(0, self._step_before) + random.randint(1, 4))
        else:
            self._wait_until(self._is_saving, "a save")
        time.sleep(random.uniform(0, longest))
        self.kill()
        codes = [process.exitcode for process in self.processes]
        assert codes == [-signal.SIGKILL] * self.ranks, f"killed too late: {codes}\n{self.output()}"

    def _is_saving(self):
        """Whether a checkpoint is being written; an earlier process may have left an incomplete one."""
        for part in (self.folder / "checkpoints").glob("step-*.part"):
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_ctime > self._started:
                    return True
        return False

    def output(self):
        return self.log.read_text() if self.log.exists() else ""


def final_state(folder):
    """All full tensors of the newest checkpoint."""
    path = (Path(folder) / "checkpoints" / "last").resolve()
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in tensor_names(path).items()}
    load(path, tensors)
    return tensors


def metrics(folder):
    """Records without values that differ between two identical runs."""
    records = read_metrics(Path(folder) / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name != "time"} for record in records]


def assert_same_run(one, other):
    """Compare bit for bit: weights, moments, state per sample, counters and metrics."""
    first, second = final_state(one), final_state(other)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different[:5]
    assert json.dumps(metrics(one)) == json.dumps(metrics(other))
    assert _metadata(one) == _metadata(other)


def _metadata(folder):
    """The metadata of the newest checkpoint, without values that differ between two identical runs."""
    metadata = read_metadata(Path(folder) / "checkpoints" / "last")
    return {name: value for name, value in metadata.items() if name not in ("config", "elapsed")}


def _main(options, rank, ranks, port, log, environment, largest_file, prepare):
    from fastclip.cli import main

    os.setpgrp()  # signals of the test's terminal are not for it
    multiprocessing.set_start_method("fork", force=True)  # or loader workers would import torch again
    torch.set_num_threads(1)
    os.environ.update(environment)
    if prepare is not None:
        prepare(rank)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main(["train", *options]))
