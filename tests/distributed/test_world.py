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
from fastclip.distributed.watch import Watch
from fastclip.distributed.world import (
    JoinError,
    Place,
    World,
    find_place,
    join_world,
    silence_other_ranks,
)
from fastclip.errors import InputError, OptionError
from fastclip.processes import free_port

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


# Reading the environment.


def test_a_process_without_a_launcher_is_alone():
    assert find_place({"PATH": "/bin", "MASTER_ADDR": "node1"}) is None


def test_torchrun_sets_every_field():
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
def test_an_allocation_without_srun_is_alone(environ):
    assert find_place(environ) is None


def test_inside_srun_torchrun_takes_precedence():
    assert find_place({**SRUN, **TORCHRUN}) == find_place(TORCHRUN)


def test_a_batch_script_may_export_the_master_address_and_the_world_size():
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
def test_a_malformed_node_list_is_an_error(nodelist):
    with pytest.raises(OptionError) as caught:
        find_place({**SRUN, "SLURM_STEP_NODELIST": nodelist})
    assert (caught.value.option, caught.value.value) == ("SLURM_STEP_NODELIST", nodelist)
    assert "MASTER_ADDR" in caught.value.advice


@given(job=st.integers(1, 10**9), step=st.integers(0, 30), later=st.integers(1, 100))
def test_neighbouring_jobs_and_steps_have_their_own_ports(job, step, later):
    def port(job, step):
        place = find_place({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        assert place is not None
        return place.port

    assert 20_000 <= port(job, step) < 30_000  # below those of outgoing connections
    assert port(job, step) not in (port(job + later, step), port(job, step + later), port(job + later, 0))


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK"])
def test_a_partial_environment_of_torchrun_is_an_error_that_names_the_missing_variable(missing):
    with pytest.raises(InputError) as caught:
        find_place(without(TORCHRUN, missing))
    assert caught.value.argument == missing


@pytest.mark.parametrize(
    "missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"]
)
def test_a_partial_environment_of_srun_is_an_error_that_names_the_missing_variable(missing):
    with pytest.raises(InputError) as caught:
        find_place(without(SRUN, missing))
    assert caught.value.argument == missing


@pytest.mark.parametrize(
    ("variable", "given", "value"),
    [
        ("RANK", "two", "two"),
        ("RANK", "16", 16),
        ("LOCAL_RANK", "-1", -1),
        ("MASTER_PORT", "70000", 70000),
    ],
)
def test_an_invalid_variable_is_an_error(variable, given, value):
    with pytest.raises(OptionError) as caught:
        find_place({**TORCHRUN, variable: given})
    assert (caught.value.option, caught.value.value) == (variable, value)


# Joining.


@pytest.fixture
def launched(monkeypatch):
    """Set the launcher's variables, and only those."""

    def set_variables(**environ):
        for name in list(os.environ):
            if name in TORCHRUN or name.startswith("SLURM_"):
                monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.mark.parametrize("environ", [{}, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
def test_one_rank_needs_no_process_group(launched, environ):
    launched(**environ)
    with join_world() as world:
        assert (world.rank, world.size, world.is_main, world.control) == (0, 1, True, None)
        assert world.agree({"a": 1}) == {"a": 1}
        assert world.gather("x") == ["x"]
        world.barrier()
        assert not dist.is_initialized()


@pytest.mark.slow
def test_a_rank_without_an_answer_reports_where_it_waited(launched):
    port = free_port()
    launched(**{**TORCHRUN, "RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    with pytest.raises(JoinError) as caught, join_world(timeout=1):
        pass
    assert caught.value.place == Place(1, 2, 1, "127.0.0.1", port)
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert not dist.is_initialized()


def test_a_port_in_use_is_an_error_that_names_it(launched):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        launched(**{**TORCHRUN, "RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        with pytest.raises(JoinError) as caught, join_world(timeout=1):
            pass
    assert caught.value.place.port == port


@pytest.mark.slow
def test_restarted_ranks_never_meet_dead_ones():
    store, timeout = dist.HashStore(), timedelta(seconds=20)  # torchrun's outlives the ranks
    places = [Place(rank, 3, rank, "", 1) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        first = list(threads.map(lambda place: launch._meet(store, place, timeout), places))
        late = [threads.submit(launch._meet, store, place, timeout) for place in places[1:]]
        assert wait(late, timeout=0.2).not_done  # rank 0 has not named this start yet
        again = [launch._meet(store, places[0], timeout), *(future.result() for future in late)]
    for start, value in ((first, "first"), (again, "again")):
        start[0].set("key", value)
        assert [part.get("key").decode() for part in start] == [value] * 3
    assert first[0].get("key") == b"first"


@pytest.mark.slow
def test_a_rank_that_gets_no_answer_gives_up():
    store = dist.HashStore()
    store.set("fastclip/start", "of a dead rank 0")
    with pytest.raises(dist.DistStoreError):
        launch._meet(store, Place(1, 2, 1, "", 1), timedelta(seconds=0.1))


class FakeGroup:
    aborted = False

    def abort(self):
        self.aborted = True


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs, and a torch.distributed that only records calls."""
    calls = {"default": FakeGroup(), "control": FakeGroup()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.update(device=device))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **k: calls.update(backend=backend, init=k)
    )
    monkeypatch.setattr(dist, "new_group", lambda **k: calls.update(group=k) or calls["control"])
    monkeypatch.setattr(dist, "barrier", lambda group: calls.update(barrier=group))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.update(destroyed=True))
    monkeypatch.setattr(launch, "_find_store", lambda place, timeout: None)
    monkeypatch.setattr(launch, "_meet", lambda store, place, timeout: store)
    monkeypatch.setattr(launch, "_require_same_device", lambda store, place, device: None)
    monkeypatch.setattr(launch, "start_watch", lambda *place: Watch(None))
    monkeypatch.setattr(launch, "_default_group", lambda: calls["default"])
    return calls


def test_gpus_communicate_over_nccl_and_hosts_over_gloo(launched, gpus):
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
    with pytest.raises(KeyError), join_world():
        raise KeyError
    assert gpus["default"].aborted
    assert gpus["destroyed"]
    assert "barrier" not in gpus


def test_more_ranks_than_gpus_is_an_error_that_counts_them(launched, gpus):
    launched(**{**TORCHRUN, "LOCAL_RANK": "2"})
    with pytest.raises(OptionError) as caught, join_world():
        pass
    assert (caught.value.option, caught.value.value) == ("LOCAL_RANK", 2)
    assert "less than 2" in caught.value.rule


# Real processes. They take seconds to start, so those of srun play all scenarios, one after another.

SCRIPT = """
import json, os, sys, time, torch
from pathlib import Path
import torch.distributed as dist
from fastclip.distributed import world as launch
from fastclip.distributed.agreement import RanksDiffer
from fastclip.distributed.interrupts import StoppedCleanly
from fastclip.distributed.world import LostRanks, join_world

folder = Path(sys.argv[1])

def write(world, name, value):
    (folder / f"{name}{world.rank}.part").write_text(json.dumps(value))
    (folder / f"{name}{world.rank}.part").rename(folder / f"{name}{world.rank}")

def facts(world):
    shared = world.agree({"from": world.rank}), world.gather(10 + world.rank)
    world.barrier()
    place = [world.rank, world.size, world.local_rank, str(world.device), world.is_main]
    write(world, "facts", [*place, *shared])

def stop(world):  # rank 1 is late
    time.sleep(world.rank)
    write(world, "reached", True)
    raise StoppedCleanly(7)

def fail(world):  # rank 1 fails, while rank 0 does not answer it
    if world.rank == 1:
        unanswered = dist.all_reduce(torch.zeros(1), async_op=True)
        raise OSError("rank 1 failed")
    while not (folder / "rank 1 is gone").exists():
        time.sleep(0.02)
    world.barrier()

for scenario, port in zip(sys.argv[2::2], sys.argv[3::2]):
    if port != "given":
        os.environ["MASTER_PORT"] = port
    device = launch._device
    if scenario == "other_device" and world.rank == 1:  # rank 0 hosts the store
        launch._device = lambda local_rank, asked: torch.device("cuda")
    try:
        with join_world(timeout=60) as world:
            globals()[scenario](world)
    except StoppedCleanly as error:
        write(world, "stopped", [error.step, (folder / "reached1").exists()])
    except RanksDiffer as error:
        write(world, "differ", [error.name, error.rank, error.value, error.first])
    except LostRanks as error:
        write(world, "lost", [error.rank, error.timeout])
        raise
    launch._device = device
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


@pytest.mark.slow
def test_ranks_of_torchrun_meet(tmp_path):
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
    """The results of two processes started as srun would start them, except that both run on this machine."""

    folder: Path
    codes: list[int]
    errors: list[str]


@pytest.fixture(scope="module")
def srun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("srun")
    run = command(
        folder, "facts", free_port(), "stop", free_port(), "other_device", free_port(), "fail", free_port()
    )
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
        (folder / "rank 1 is gone").touch()
        noticed = processes[0].communicate(timeout=30)[1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Srun(folder, [process.returncode for process in processes], [noticed, failed])


@pytest.mark.slow
def test_ranks_of_srun_meet(srun):
    assert read(srun.folder, "facts") == facts_of_two()


@pytest.mark.slow
def test_ranks_that_stop_cleanly_leave_together(srun):
    assert read(srun.folder, "stopped") == [[7, True], [7, True]]


@pytest.mark.slow
def test_ranks_with_another_type_of_device_stop_with_the_same_error(srun):
    assert read(srun.folder, "differ") == [["device type", 1, "cuda", "cpu"]] * 2


@pytest.mark.slow
def test_no_thread_of_a_group_outlives_it(srun):
    for threads in read(srun.folder, "threads"):
        assert not [name for name in threads if "gloo" in name]


@pytest.mark.slow
def test_a_rank_that_fails_leaves_immediately_with_its_error_and_the_others_notice(srun):
    assert srun.codes == [1, 1]
    assert "OSError: rank 1 failed" in srun.errors[1]
    assert json.loads((srun.folder / "lost0").read_text()) == [0, 60]
    assert not (srun.folder / "lost1").exists()
    assert "Connection closed by peer" in srun.errors[0]  # gloo's own message


# Logging.


@pytest.fixture
def own_logging():
    """Restore the logging afterwards."""
    logger, factory = logging.getLogger("fastclip"), logging.getLogRecordFactory()
    level = logger.level
    yield logger
    logger.setLevel(level)
    logging.setLogRecordFactory(factory)


def test_other_ranks_log_only_errors_with_their_number(own_logging, caplog):
    own_logging.setLevel(logging.INFO)
    silence_other_ranks(World(3, 4, 3, torch.device("cpu"), None))
    logging.getLogger("fastclip.data.loader").warning("sample %d is skipped", 5)
    logging.getLogger("fastclip.data.loader").error("100%% of %s cannot be read", "data")
    logging.getLogger("elsewhere").error("not ours")
    assert caplog.messages == ["rank 3: 100% of data cannot be read", "not ours"]


def test_rank_0_logs_as_before(own_logging, caplog):
    own_logging.setLevel(logging.INFO)
    silence_other_ranks(World(0, 4, 0, torch.device("cpu"), None))
    logging.getLogger("fastclip.training").info("hello")
    assert caplog.messages == ["hello"]
