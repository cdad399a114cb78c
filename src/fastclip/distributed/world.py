"""How ranks find each other: under torchrun, under Slurm's srun, or alone; no options are needed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fastclip.distributed.agreement import first_difference
from fastclip.distributed.device import DeviceChoice
from fastclip.distributed.device import find_device as _device
from fastclip.distributed.interrupts import StoppedCleanly
from fastclip.distributed.stop_at_once import CLEAN_UP, await_signal
from fastclip.distributed.watch import Watch, start_watch
from fastclip.errors import InputError, OptionError

Value = TypeVar("Value")


@dataclass(frozen=True)
class World:
    """All ranks of a run, as seen by one of them."""

    rank: int
    size: int
    local_rank: int  # this rank's number on its machine, and its GPU's
    device: torch.device
    control: dist.ProcessGroup | None  # gloo, for messages that bypass the GPU; None if alone or left

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """One rank, and no process group."""
        return cls(0, 1, 0, torch.device(device), None)

    @property
    def is_main(self) -> bool:
        """Whether this rank logs, and writes the files that exist once."""
        return self.rank == 0

    @property
    def device_bytes(self) -> int | None:
        """The device's memory; None on a CPU, where running out of it is not an error that can be caught."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.get_device_properties(self.device).total_memory

    def agree(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        return value if self.size == 1 else broadcast_object(value, self.control)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order, on every rank."""
        return [value] if self.size == 1 else gather_objects(value, self.control)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.control)


def broadcast_object(value: Value, group: dist.ProcessGroup | None = None) -> Value:
    """Return rank 0's value on every rank of the group; without a group, the value itself."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def gather_objects(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the values of all ranks of the group, in their order; without a group, only this one."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def join_world(*, timeout: float = 1800, device: DeviceChoice = "auto") -> Iterator[World]:
    """Join the world of this run; a process group exists inside if there are several ranks.

    Args:
        timeout: seconds to wait for other ranks, at the start and in every collective.
        device: `auto` is this rank's GPU if torch can use one.
    """
    place = find_place(os.environ)
    if place is None or place.size == 1:
        local_rank = 0 if place is None else place.local_rank
        yield World(0, 1, local_rank, _device(local_rank, device), control=None)
        return
    (world, watch), stopped = _join(place, timedelta(seconds=timeout), device), None
    try:
        try:
            yield world
        except StoppedCleanly as error:  # all ranks stop at the same step, and leave together
            stopped = error
        world.barrier()  # rank 0 holds the store, which the others need until they leave
    except BaseException as error:
        # gloo raises a plain RuntimeError, which names its source file
        lost = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo/" in str(error)
        )
        watch.failed(error, lost=lost)
        _break_off(world)
        if lost:
            await_signal()
            raise LostRanks(world, timeout, error) from error
        raise
    finally:
        CLEAN_UP.remove(watch.stopped)
    watch.done()
    _leave(world)
    if stopped is not None:
        raise stopped


class LostRanks(RuntimeError):
    """A collective of this `rank` failed, or got no answer for `timeout` seconds."""

    def __init__(self, world: World, timeout: float, error: BaseException):
        self.rank, self.timeout = world.rank, timeout
        super().__init__(
            f"Rank {world.rank} lost contact with the other {world.size - 1}: a collective failed, or got no "
            f"answer for {timeout:.0f} s (--timeout). If another rank reports a different error, fix that; "
            "otherwise check that all machines are up and reach each other. Then run the same command: "
            f"training resumes from the last checkpoint. torch says: {error}"
        )


def silence_other_ranks(world: World) -> None:
    """Make all ranks except 0 log only errors, prefixed with their rank."""
    if world.is_main:
        return
    logging.getLogger("fastclip").setLevel(logging.ERROR)
    make_record = logging.getLogRecordFactory()

    def make_ours(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if record.name.split(".")[0] == "fastclip":
            record.msg = f"rank {world.rank}: {record.msg}"
        return record

    logging.setLogRecordFactory(make_ours)  # a filter on a logger misses the records of its children


class Place(NamedTuple):
    """This process's place among the ranks, and where they meet."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def find_place(environ: Mapping[str, str]) -> Place | None:
    """Read the launcher's environment variables; None for a process that runs alone.

    Only srun sets SLURM_STEP_NUM_TASKS. SLURM_NTASKS is also set in a batch script, whose python runs alone
    and would wait for other ranks forever.
    """
    if "RANK" in environ:
        return _under_torchrun(environ)
    if "SLURM_STEP_NUM_TASKS" in environ and _integer(environ, "SLURM_STEP_NUM_TASKS") > 1:
        return _under_srun(environ)
    if "WORLD_SIZE" in environ or "LOCAL_RANK" in environ:
        return _under_torchrun(environ)  # raises: RANK is missing
    return None


def _under_torchrun(environ: Mapping[str, str]) -> Place:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    _require(environ, names, "torchrun sets all of them: `torchrun --nproc-per-node 8 …`")
    rank, size, local_rank, port = (_integer(environ, name) for name in names if name != "MASTER_ADDR")
    return _checked(Place(rank, size, local_rank, environ["MASTER_ADDR"], port), "RANK", "LOCAL_RANK")


def _under_srun(environ: Mapping[str, str]) -> Place:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    _require(environ, (*names, "SLURM_STEP_NODELIST"), "srun sets all of them: `srun --ntasks 8 …`")
    rank, size, local_rank = (_integer(environ, name) for name in names)
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT")
    else:  # one per step of each job: several may share a machine
        ids = ("SLURM_JOB_ID", "SLURM_STEP_ID")
        _require(environ, ids, "srun sets both; or set MASTER_PORT yourself, e.g. to 29500")
        job, step = (_integer(environ, name) for name in ids)
        port = 20_000 + (31 * job + step) % 10_000  # outgoing connections get ports from 32,768 on
    address = environ.get("MASTER_ADDR") or _first_host(environ["SLURM_STEP_NODELIST"])
    return _checked(Place(rank, size, local_rank, address, port), "SLURM_PROCID", "SLURM_LOCALID")


def _first_host(nodelist: str) -> str:
    """ "node003" of "node[003-005,7],gpu1": Slurm puts task 0 on the first machine."""
    first = re.match(r"((?:[^\[\],\s]|\[\d[\d,-]*\])+)(?:,|$)", nodelist)
    if first is None:
        raise OptionError(
            "SLURM_STEP_NODELIST",
            nodelist,
            "must be a list of hosts",
            example="node[003-005],gpu1",
            advice="If Slurm set it so, set MASTER_ADDR to the name of the first host.",
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[1])


def _checked(place: Place, rank_variable: str, local_rank_variable: str) -> Place:
    rank, size, local_rank, _, port = place
    if not 0 <= rank < size:
        raise OptionError(rank_variable, rank, f"must be in [0, {size}), as there are {size} ranks")
    if local_rank < 0:
        raise OptionError(local_rank_variable, local_rank, "must be at least 0")
    if not 0 < port < 65_536:
        raise OptionError("MASTER_PORT", port, "must be in [1, 65535]", example=29500)
    return place


def _require(environ: Mapping[str, str], names: tuple[str, ...], advice: str) -> None:
    if missing := [name for name in names if not environ.get(name)]:
        present = [f"{name}={environ[name]}" for name in names if environ.get(name)]
        beside = f" beside {', '.join(present)}" if present else ""
        raise InputError(", ".join(missing), f"must be set in the environment{beside}. {advice}.")


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise OptionError(name, environ[name], "must be an integer") from None


def _join(place: Place, timeout: timedelta, asked: DeviceChoice) -> tuple[World, Watch]:
    device, watch = _device(place.local_rank, asked), Watch(None)
    on_gpu = device.type == "cuda"
    try:
        store = _meet(_find_store(place, timeout), place, timeout)
        _require_same_device(store, place, device)
        watch = start_watch(store, place.rank, place.size, place.address, timeout.total_seconds())
        CLEAN_UP.append(watch.stopped)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        control: Any = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else _default_group()
    except RuntimeError as error:  # torch's errors of the network and of timeouts derive from it
        watch.failed(error, lost=True)
        await_signal()
        raise JoinError(place, timeout, error) from error
    return World(place.rank, place.size, place.local_rank, device, control), watch


class JoinError(RuntimeError):
    """A rank did not meet the others at its `place`."""

    def __init__(self, place: Place, timeout: timedelta, error: RuntimeError):
        self.place = place
        super().__init__(
            f"Rank {place.rank} did not meet the other {place.size - 1} at {place.address}:{place.port} "
            f"(timeout: {timeout.total_seconds():.0f} s). Check that all {place.size} ranks are running, "
            f"that {place.address!r} is the machine of rank 0 everywhere, and that port {place.port} is free "
            f"and open there (set MASTER_PORT to use another). torch says: {error}"
        )


def _find_store(place: Place, timeout: timedelta) -> dist.Store:
    """Open the key-value store that the ranks share: torchrun's, or one that rank 0 hosts."""
    os.environ.update(MASTER_ADDR=place.address, MASTER_PORT=str(place.port))  # env:// reads them
    return next(rendezvous("env://", place.rank, place.size, timeout=timeout))[0]


def _meet(store: dist.Store, place: Place, timeout: timedelta) -> dist.Store:
    """Return a part of the store that only the ranks of this start use.

    After a failure torchrun starts new ranks with the same store, which still holds the addresses of the dead
    ones, and nothing that it sets distinguishes the starts on all machines. So rank 0 names each start, and
    the others trust a name only if rank 0 answers them under it.
    """
    name = secrets.token_hex(8)  # of the start on rank 0, else of this process
    if place.rank == 0:
        store.set("fastclip/start", name)
        for rank in range(1, place.size):
            process = store.get(f"{name}/{rank}").decode()
            store.set(f"{name}/{rank}/{process}", "welcome")
        return dist.PrefixStore(name, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        start = store.get("fastclip/start").decode()
        store.set(f"{start}/{place.rank}", name)
        try:
            store.wait([f"{start}/{place.rank}/{name}"], timedelta(seconds=1))
        except dist.DistStoreError:  # no answer: it may be the name of a start that failed
            if time.monotonic() > deadline:
                raise
        else:
            return dist.PrefixStore(start, store)


def _require_same_device(store: dist.Store, place: Place, device: torch.device) -> None:
    """Raise RanksDiffer on every rank if one has another type of device: NCCL and gloo would both wait."""
    store.set(f"device/{place.rank}", device.type)
    if place.rank == 0:
        types = [store.get(f"device/{rank}").decode() for rank in range(place.size)]
        store.set("devices", json.dumps(types))
    types = json.loads(store.get("devices"))
    if differ := first_difference([{"device type": name} for name in types]):
        store.set(f"device/{place.rank}/read", "")
        if place.rank == 0:  # it may host the store, which the others need until they have read
            store.wait([f"device/{rank}/read" for rank in range(1, place.size)])
        raise differ


def _leave(world: World) -> None:
    """Drop the last reference to gloo's threads: they end here, not while Python exits, which may crash."""
    object.__setattr__(world, "control", None)
    dist.destroy_process_group()


_broken_off: list[object] = []


def _break_off(world: World) -> None:
    """Leave the group without waiting for other ranks: after a failure they may never answer.

    A reference to the group is kept, as deleting a gloo group waits for its last collective.
    """
    _broken_off.extend([_default_group(), world.control])
    with contextlib.suppress(RuntimeError):  # the original failure is the one to report
        if world.device.type == "cuda":
            _default_group().abort()  # or NCCL waits for kernels that wait for other ranks
        dist.destroy_process_group()


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
