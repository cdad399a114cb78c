"""A rank's share of its machine: of the cores, and of the shared memory that loader workers send through."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

from fastclip.distributed.world import World
from fastclip.files import cores

SHARED_MEMORY = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # equal in all containers of a machine


class Share(NamedTuple):
    """What one rank may use."""

    cores: int
    shared_memory: int | None
    """Bytes that are free in /dev/shm; None on a system without it."""

    @classmethod
    def of(cls, world: World) -> Share:
        """This rank's share. All ranks must call it, before they start loader workers."""
        mine = _Resources.here()
        return mine.divided(world.gather(mine))


class _Resources(NamedTuple):
    """What a process sees of its machine."""

    machine: str
    allowed: tuple[int, ...]  # its cores: those of all ranks, or its own, if the launcher assigns them
    cores: int
    mount: int | None  # the file system at /dev/shm: containers may have their own
    free: int

    @classmethod
    def here(cls) -> _Resources:
        machine = _BOOT.read_text() if _BOOT.exists() else platform.node()
        allowed = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
        if not SHARED_MEMORY.is_dir():
            return cls(machine, allowed, cores(), None, 0)
        space = os.statvfs(SHARED_MEMORY)
        mount = SHARED_MEMORY.stat().st_dev
        return cls(machine, allowed, cores(), mount, space.f_bavail * space.f_frsize)

    def divided(self, ranks: list[_Resources]) -> Share:
        """Divide what this rank shares with others."""
        near = [rank for rank in ranks if rank.machine == self.machine]
        same_cores = sum(rank.allowed == self.allowed for rank in near)
        if self.mount is None:
            return Share(max(1, self.cores // same_cores), None)
        same_mount = [rank for rank in near if rank.mount == self.mount]
        free = min(rank.free for rank in same_mount)
        return Share(max(1, self.cores // same_cores), free // len(same_mount))
