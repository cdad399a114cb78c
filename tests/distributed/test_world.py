import json
import logging
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fastclip.distributed import world as launch
from fastclip.distributed.world import Place, World, find_place, join_world, silence_other_ranks

TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[003-004]",
}
SALLOC = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODELIST": "node1"}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


# What the environment says.


def test_a_process_without_a_launcher_is_alone():
    assert find_place({"PATH": "/bin", "MASTER_ADDR": "node1"}) is None


def test_torchrun_says_it_all():
    assert find_place(TORCHRUN) == Place(9, 16, 1, "node1", 29500)


def test_srun_on_one_machine():
    place = find_place({**SRUN, "SLURM_STEP_NODELIST": "gpu7", "SLURM_LOCALID": "3"})
    assert place is not None
    assert place[:4] == (3, 4, 3, "gpu7")


def test_srun_on_two_machines_meets_on_the_first():
    place = find_place(SRUN)
    assert place is not None
    assert place[:4] == (3, 4, 1, "node003")


@pytest.mark.parametrize("environ", [SALLOC, {**SALLOC, "SLURM_STEP_NUM_TASKS": "1"}])
def test_an_allocation_without_srun_waits_for_nobody(environ):
    assert find_place(environ) is None


def test_torchrun_inside_srun_counts_by_torchrun():
    assert find_place({**SRUN, **TORCHRUN}) == find_place(TORCHRUN)


def test_a_batch_script_may_export_the_meeting_place_and_the_number_of_workers():
    exported = {"MASTER_ADDR": "ib-node3", "MASTER_PORT": "12345", "WORLD_SIZE": "4"}
    assert find_place({**SRUN, **exported}) == Place(3, 4, 1, "ib-node3", 12345)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("localhost", "localhost"),
        ("node[003-005,7],gpu1", "node003"),
        ("node[12,3-5]", "node12"),
        ("gpu-a,gpu-b[1-2]", "gpu-a"),
        ("rack[1-2]node[08-10]-ib,x", "rack1node08-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, host):
    place = find_place({**SRUN, "SLURM_STEP_NODELIST": nodelist})
    assert place is not None
    assert place.address == host


@pytest.mark.parametrize("nodelist", ["node[003-005", "node[]", ",", "node]3"])
def test_a_broken_node_list_is_named(nodelist):
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST"):
        find_place({**SRUN, "SLURM_STEP_NODELIST": nodelist})


@given(job=st.integers(1, 10**9), step=st.integers(0, 30), later=st.integers(1, 100))
def test_neighbouring_jobs_and_steps_have_ports_of_their_own(job, step, later):
    def port(job, step):
        place = find_place({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        assert place is not None
        return place.port

    assert 20_000 <= port(job, step) < 60_000
    assert port(job, step) not in (port(job + later, step), port(job, step + later), port(job + later, 0))


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK"])
def test_a_partial_environment_of_torchrun_is_an_error_that_names_what_is_missing(missing):
    with pytest.raises(ValueError, match=f"^{missing} not set"):
        find_place(without(TORCHRUN, missing))


@pytest.mark.parametrize(
    "missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"]
)
def test_a_partial_environment_of_srun_is_an_error_that_names_what_is_missing(missing):
    with pytest.raises(ValueError, match=f"^{missing} not set"):
        find_place(without(SRUN, missing))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "two"}, "RANK='two'"),
        ({"RANK": "16"}, "worker 16 of 16"),
        ({"LOCAL_RANK": "-1"}, "local rank is -1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    ],
)
def test_an_impossible_environment_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        find_place({**TORCHRUN, **change})


# Joining.


@pytest.fixture
def launched(monkeypatch):
    """Sets the launcher's variables, and only those."""

    def set_variables(**environ):
        for name in list(os.environ):
            if name in TORCHRUN or name.startswith("SLURM_"):
                monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("environ", [{}, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
def test_one_worker_needs_no_process_group(launched, environ):
    launched(**environ)
    with join_world() as world:
        assert (world.rank, world.size, world.is_main, world.control) == (0, 1, True, None)
        assert world.agree({"a": 1}) == {"a": 1}
        assert world.gather("x") == ["x"]
        world.barrier()
        assert not dist.is_initialized()


def test_a_worker_that_nobody_answers_says_where_it_waited(launched):
    port = free_port()
    launched(**{**TORCHRUN, "RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}.*MASTER_PORT"), join_world(timeout=1):
        pass
    assert not dist.is_initialized()


def test_a_port_in_use_is_named(launched):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        launched(**{**TORCHRUN, "RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        with pytest.raises(RuntimeError, match=f"port {port} free"), join_world(timeout=1):
            pass


def test_workers_that_are_started_again_never_meet_the_dead():
    store, timeout = dist.HashStore(), timedelta(seconds=20)  # torchrun's outlives the workers
    places = [Place(rank, 3, rank, "", 1) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        first = list(threads.map(lambda place: launch._meet(store, place, timeout), places))
        late = [threads.submit(launch._meet, store, place, timeout) for place in places[1:]]
        assert wait(late, timeout=0.2).not_done  # worker 0 has not said anything yet, only the dead one has
        again = [launch._meet(store, places[0], timeout), *(future.result() for future in late)]
    for start, word in ((first, "first"), (again, "again")):
        start[0].set("word", word)
        assert [part.get("word").decode() for part in start] == [word] * 3
    assert first[0].get("word") == b"first"


def test_a_worker_that_gets_no_answer_gives_up():
    store = dist.HashStore()
    store.set("fastclip/start", "of the dead")
    with pytest.raises(RuntimeError, match="timeout"):
        launch._meet(store, Place(1, 2, 1, "", 1), timedelta(seconds=0.1))


class FakeGroup:
    aborted = False

    def abort(self):
        self.aborted = True


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs, and a torch.distributed that only takes notes."""
    notes = {"default": FakeGroup(), "control": FakeGroup()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: notes.update(device=device))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **k: notes.update(backend=backend, init=k)
    )
    monkeypatch.setattr(dist, "new_group", lambda **k: notes.update(group=k) or notes["control"])
    monkeypatch.setattr(dist, "barrier", lambda group: notes.update(barrier=group))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: notes.update(destroyed=True))
    monkeypatch.setattr(launch, "_find_store", lambda place, timeout: None)
    monkeypatch.setattr(launch, "_meet", lambda store, place, timeout: store)
    monkeypatch.setattr(launch, "_default_group", lambda: notes["default"])
    return notes


def test_gpus_talk_over_nccl_and_hosts_over_gloo(launched, gpus):
    launched(**TORCHRUN)
    with join_world() as world:
        assert world.device == torch.device("cuda:1")
        assert world.control is gpus["control"]
    assert (gpus["backend"], gpus["init"]["device_id"]) == ("nccl", torch.device("cuda:1"))
    assert (gpus["device"], gpus["group"]["backend"]) == (1, "gloo")
    assert gpus["destroyed"]
    assert gpus["barrier"] is gpus["control"]
    assert not gpus["default"].aborted


def test_a_failure_on_gpus_aborts_instead_of_waiting_for_kernels(launched, gpus):
    launched(**TORCHRUN)
    with pytest.raises(OSError, match="disk"), join_world():
        raise OSError("disk")
    assert gpus["default"].aborted
    assert gpus["destroyed"]
    assert "barrier" not in gpus


def test_more_workers_than_gpus_is_an_error_that_counts_them(launched, gpus):
    launched(**{**TORCHRUN, "LOCAL_RANK": "2"})
    with pytest.raises(ValueError, match="2 GPUs"), join_world():
        pass


# Real processes. They take seconds to start, so those of srun play all scenarios, one after the other.

SCRIPT = """
import json, os, sys, time, torch
from pathlib import Path
import torch.distributed as dist
from fastclip.distributed.interrupts import StoppedCleanly
from fastclip.distributed.world import join_world

folder = Path(sys.argv[1])

def write(world, name, value):
    (folder / f"{name}{world.rank}.part").write_text(json.dumps(value))
    (folder / f"{name}{world.rank}.part").rename(folder / f"{name}{world.rank}")

def facts(world):
    said = world.agree({"from": world.rank}), world.gather(10 + world.rank)
    world.barrier()
    write(world, "facts", [world.rank, world.size, world.local_rank, str(world.device), world.is_main, *said])

def stop(world):  # worker 1 is late
    time.sleep(world.rank)
    write(world, "reached", True)
    raise StoppedCleanly(7)

def fail(world):  # worker 1 does, and worker 0 is not there to answer it
    if world.rank == 1:
        unanswered = dist.all_reduce(torch.zeros(1), async_op=True)
        raise OSError("worker 1 broke")
    while not (folder / "worker 1 is gone").exists():
        time.sleep(0.02)
    world.barrier()

for scenario, port in zip(sys.argv[2::2], sys.argv[3::2]):
    if port != "given":
        os.environ["MASTER_PORT"] = port
    try:
        with join_world(timeout=60) as world:
            globals()[scenario](world)
    except StoppedCleanly as error:
        write(world, "stopped", [error.step, (folder / "reached1").exists()])
    assert not dist.is_initialized()
    write(world, "threads", [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()])
"""


def command(folder, *scenarios):
    (folder / "script.py").write_text(SCRIPT)
    return [str(folder / "script.py"), str(folder), *map(str, scenarios)]


def clean_environment():
    kept = {k: v for k, v in os.environ.items() if k not in TORCHRUN and not k.startswith("SLURM_")}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def read(folder, name):
    return [json.loads((folder / f"{name}{rank}").read_text()) for rank in range(2)]


def facts_of_two():
    return [[rank, 2, rank, "cpu", rank == 0, {"from": 0}, [10, 11]] for rank in range(2)]


def test_workers_of_torchrun_meet(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*torchrun, *command(tmp_path, "facts", "given")],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ran.returncode == 0, ran.stderr
    assert read(tmp_path, "facts") == facts_of_two()


class Srun(NamedTuple):
    """What two processes left that were started as srun would, but for the machine, which is this one."""

    folder: Path
    codes: list[int]
    errors: list[str]


@pytest.fixture(scope="module")
def srun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("srun")
    run = command(folder, "facts", free_port(), "stop", free_port(), "fail", free_port())
    environ = {
        **clean_environment(),
        **SRUN,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *run],
            env={**environ, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        failed = processes[1].communicate(timeout=50)[1]  # were it to wait for an answer: 60 s
        (folder / "worker 1 is gone").touch()
        noticed = processes[0].communicate(timeout=30)[1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Srun(folder, [process.returncode for process in processes], [noticed, failed])


def test_workers_of_srun_meet(srun):
    assert read(srun.folder, "facts") == facts_of_two()


def test_workers_that_stop_cleanly_leave_together(srun):
    assert read(srun.folder, "stopped") == [[7, True], [7, True]]


def test_no_thread_of_a_group_outlives_it(srun):
    for threads in read(srun.folder, "threads"):
        assert not [name for name in threads if "gloo" in name]


def test_a_worker_that_fails_leaves_at_once_with_its_error_and_the_others_notice(srun):
    assert srun.codes == [1, 1]
    assert "OSError: worker 1 broke" in srun.errors[1]
    assert "Worker 0 lost touch with the other 1" in srun.errors[0]
    assert "goes on from its last checkpoint" in srun.errors[0]
    assert "Connection closed by peer" in srun.errors[0]


# Who speaks.


@pytest.fixture
def own_logging():
    """Puts the logging back as it was."""
    logger, factory = logging.getLogger("fastclip"), logging.getLogRecordFactory()
    level = logger.level
    yield logger
    logger.setLevel(level)
    logging.setLogRecordFactory(factory)


def test_other_workers_log_only_errors_with_their_number(own_logging, caplog):
    own_logging.setLevel(logging.INFO)
    silence_other_ranks(World(3, 4, 3, torch.device("cpu"), None))
    logging.getLogger("fastclip.data.loader").warning("sample %d is left out", 5)
    logging.getLogger("fastclip.data.loader").error("100%% of %s is broken", "data")
    logging.getLogger("elsewhere").error("not ours")
    assert caplog.messages == ["worker 3: 100% of data is broken", "not ours"]


def test_worker_0_speaks_as_before(own_logging, caplog):
    own_logging.setLevel(logging.INFO)
    silence_other_ranks(World(0, 4, 0, torch.device("cpu"), None))
    logging.getLogger("fastclip.training").info("hello")
    assert caplog.messages == ["hello"]
