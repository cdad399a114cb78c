"""How workers find each other: under torchrun, under Slurm's srun, or alone; without flags of our own."""

from __future__ import annotations

import contextlib
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

from fastclip.distributed.interrupts import StoppedCleanly

Value = TypeVar("Value")


@dataclass(frozen=True)
class World:
    """All workers of a run, as seen by one of them."""

    rank: int
    size: int
    local_rank: int  # this worker's number on its machine, which is that of its GPU
    device: torch.device
    control: dist.ProcessGroup | None  # gloo, for words that must not touch the GPU; None alone and when left

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """One worker, and no process group."""
        return cls(0, 1, 0, torch.device(device), None)

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that speaks, and writes what exists once."""
        return self.rank == 0

    def agree(self, value: Value) -> Value:
        """Worker 0's value, on every worker."""
        return value if self.size == 1 else broadcast_object(value, self.control)

    def gather(self, value: Value) -> list[Value]:
        """Everyone's values in the order of ranks, on every worker."""
        return [value] if self.size == 1 else gather_objects(value, self.control)

    def barrier(self) -> None:
        """Wait until every worker is here."""
        if self.size > 1:
            dist.barrier(group=self.control)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Worker 0 builds what is cached; the others then find it."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()


def broadcast_object(value: Value, group: dist.ProcessGroup | None = None) -> Value:
    """Rank 0's value on every rank of the group; the value itself where there is no group."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def gather_objects(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """The values of all ranks of the group, in their order; this one alone where there is no group."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def join_world(*, timeout: float = 1800) -> Iterator[World]:
    """The world of this run; a process group exists inside if there are several workers.

    Args:
        timeout: seconds to wait for the other workers, at the start and in every exchange.
    """
    place = find_place(os.environ)
    if place is None or place.size == 1:
        local_rank = 0 if place is None else place.local_rank
        yield World(0, 1, local_rank, _device(local_rank), control=None)
        return
    world, stopped = _join(place, timedelta(seconds=timeout)), None
    try:
        try:
            yield world
        except StoppedCleanly as error:  # all workers stop at the same step, and leave together
            stopped = error
        world.barrier()  # nobody leaves while another may still need what worker 0 keeps for all
    except BaseException as error:
        _break_off(world)
        # gloo's errors are of no kind of their own, but name its source file
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error)):
            raise RuntimeError(_lost(world, timeout, error)) from error
        raise
    _leave(world)
    if stopped is not None:
        raise stopped


def silence_other_ranks(world: World) -> None:
    """Worker 0 speaks; the others only log errors, which say whose they are."""
    if world.is_main:
        return
    logging.getLogger("fastclip").setLevel(logging.ERROR)
    make_record = logging.getLogRecordFactory()

    def make_ours(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if record.name.split(".")[0] == "fastclip":
            record.msg = f"worker {world.rank}: {record.msg}"
        return record

    logging.setLogRecordFactory(make_ours)  # a filter of a logger would miss the records of its children


class Place(NamedTuple):
    """This process's place among the workers, and where they meet."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def find_place(environ: Mapping[str, str]) -> Place | None:
    """What the launcher said in the environment; None for a process that runs alone.

    Only srun sets SLURM_STEP_NUM_TASKS. SLURM_NTASKS is there in a batch script too, whose python runs alone
    and would wait for others in vain.
    """
    if "RANK" in environ:
        return _under_torchrun(environ)
    if "SLURM_STEP_NUM_TASKS" in environ and _integer(environ, "SLURM_STEP_NUM_TASKS") > 1:
        return _under_srun(environ)
    if "WORLD_SIZE" in environ or "LOCAL_RANK" in environ:
        return _under_torchrun(environ)  # which says what is missing
    return None


def _under_torchrun(environ: Mapping[str, str]) -> Place:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    _require(environ, names, "torchrun sets all of them: `torchrun --nproc-per-node 8 …`")
    rank, size, local_rank, port = (_integer(environ, name) for name in names if name != "MASTER_ADDR")
    return _checked(Place(rank, size, local_rank, environ["MASTER_ADDR"], port))


def _under_srun(environ: Mapping[str, str]) -> Place:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    _require(environ, (*names, "SLURM_STEP_NODELIST"), "srun sets all of them: `srun --ntasks 8 …`")
    rank, size, local_rank = (_integer(environ, name) for name in names)
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT")
    else:  # another one for each step of each job: several may share a machine
        ids = ("SLURM_JOB_ID", "SLURM_STEP_ID")
        _require(environ, ids, "srun sets both, or set MASTER_PORT, say to 29500")
        job, step = (_integer(environ, name) for name in ids)
        port = 20_000 + (31 * job + step) % 40_000
    address = environ.get("MASTER_ADDR") or _first_host(environ["SLURM_STEP_NODELIST"])
    return _checked(Place(rank, size, local_rank, address, port))


def _first_host(nodelist: str) -> str:
    """ "node003" of "node[003-005,7],gpu1": Slurm puts task 0 on the first machine."""
    first = re.match(r"((?:[^\[\],\s]|\[\d[\d,-]*\])+)(?:,|$)", nodelist)
    if first is None:
        raise ValueError(
            f"SLURM_STEP_NODELIST={nodelist!r} is no list of machines such as 'node[003-005],gpu1'; "
            "set MASTER_ADDR to the name of the first machine."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[1])


def _checked(place: Place) -> Place:
    rank, size, local_rank, _, port = place
    if not 0 <= rank < size:
        raise ValueError(f"This is worker {rank} of {size}: the number must lie in [0, {size}).")
    if local_rank < 0:
        raise ValueError(f"The local rank is {local_rank}; try 0 with one worker on each machine.")
    if not 0 < port < 65_536:
        raise ValueError(f"MASTER_PORT={port} must lie in [1, 65535]; try 29500.")
    return place


def _require(environ: Mapping[str, str], names: tuple[str, ...], advice: str) -> None:
    if missing := [name for name in names if not environ.get(name)]:
        there = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
        raise ValueError(f"{', '.join(missing)} not set in the environment, beside {there}. {advice}.")


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]!r} in the environment must be a whole number.") from None


def _join(place: Place, timeout: timedelta) -> World:
    device = _device(place.local_rank)
    on_gpu = device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=_meet(_find_store(place, timeout), place, timeout),
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        control: Any = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else _default_group()
    except RuntimeError as error:  # what torch raises for the network and for time-outs derives from it
        raise RuntimeError(
            f"Worker {place.rank} did not meet the other {place.size - 1} at {place.address}:{place.port} "
            f"(waiting at most {timeout.total_seconds():.0f} s). Were all {place.size} started, and do they "
            f"still run? Does {place.address!r} name the machine of worker 0 everywhere, and is port "
            f"{place.port} free and open there (set MASTER_PORT to use another)? torch says: {error}"
        ) from error
    return World(place.rank, place.size, place.local_rank, device, control)


def _find_store(place: Place, timeout: timedelta) -> dist.Store:
    """Where workers leave words for each other: torchrun's store, or one that worker 0 opens."""
    os.environ.update(MASTER_ADDR=place.address, MASTER_PORT=str(place.port))  # where env:// looks
    return next(rendezvous("env://", place.rank, place.size, timeout=timeout))[0]


def _meet(store: dist.Store, place: Place, timeout: timedelta) -> dist.Store:
    """A part of the store for these processes alone.

    When workers die, torchrun starts new ones with the same store, in which the addresses of the dead still
    are, and nothing that it says tells the starts apart on all machines. So worker 0 gives each start a name,
    and the others believe a name that they find only if worker 0 answers them.
    """
    name = secrets.token_hex(8)  # of the start if this is worker 0, else of this worker alone
    if place.rank == 0:
        store.set("fastclip/start", name)
        for rank in range(1, place.size):
            who = store.get(f"{name}/{rank}").decode()
            store.set(f"{name}/{rank}/{who}", "welcome")
        return dist.PrefixStore(name, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        start = store.get("fastclip/start").decode()
        store.set(f"{start}/{place.rank}", name)
        try:
            store.wait([f"{start}/{place.rank}/{name}"], timedelta(seconds=1))
        except dist.DistStoreError:  # no answer: perhaps it is the name of a start that has failed
            if time.monotonic() > deadline:
                raise
        else:
            return dist.PrefixStore(start, store)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        local_rank = 0  # srun --gpus-per-task shows each worker its own GPU alone
    if local_rank >= count:
        raise ValueError(
            f"This is worker {local_rank} of its machine, counted from 0, but it sees {count} "
            f"GPU{'s' if count > 1 else ''}. Start at most {count} on each machine."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _leave(world: World) -> None:
    """Without the last reference to them gloo's threads end here, not while Python exits, which may crash."""
    object.__setattr__(world, "control", None)
    dist.destroy_process_group()


_broken_off: list[object] = []


def _break_off(world: World) -> None:
    """Leave the group without waiting for anybody: after a failure the others may never answer.

    Without the reference a gloo group would be deleted, which waits until its last exchange has ended.
    """
    _broken_off.extend([_default_group(), world.control])
    with contextlib.suppress(RuntimeError):  # the failure itself is what has to be seen
        if world.device.type == "cuda":
            _default_group().abort()  # or NCCL would wait for kernels that wait for the others
        dist.destroy_process_group()


def _lost(world: World, timeout: float, error: BaseException) -> str:
    return (
        f"Worker {world.rank} lost touch with the other {world.size - 1}: an exchange broke off, or nothing "
        f"came for {timeout:.0f} s (`timeout`). If another worker names a fault of its own, mend that; else "
        "see whether all machines are up and reach each other. Then call again: a run goes on from its last "
        f"checkpoint. torch says: {error}"
    )


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
