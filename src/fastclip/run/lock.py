"""RUN/running.json: the lock of the process that trains in a run's folder, so that two never mix their files.

The file names its owner, rank 0 of a job, which touches it every 30 seconds. A lock is out of date when its
owner is not alive on this machine, when this is the same Slurm job, requeued, or when it was not touched for
three minutes. Ages are differences between times that the file system itself sets, so clocks of machines may
differ and jump. It is created by a hard link, which is atomic on network file systems too.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from fastclip.distributed.stop_at_once import CLEAN_UP
from fastclip.distributed.world import World
from fastclip.errors import PathError
from fastclip.files import make_writable
from fastclip.text import duration

log = logging.getLogger(__name__)
LOCK = "running.json"
TOUCH_EVERY, STALE_AFTER = 30.0, 180.0  # seconds
_TRIES = 1000  # each fails only if another process takes or releases the lock at the same moment
_UNKNOWN = "an unknown process"


@dataclass(frozen=True)
class Owner:
    """A process that trains, and the job it belongs to."""

    host: str
    pid: int
    started: str
    """Clock ticks from the machine's boot to the start of the process: a later one may have the same pid."""
    machine: str
    """The boot of the machine and the container, within which a pid has a meaning."""
    since: str
    """When it took the lock, by its own clock."""
    slurm_job: str = ""
    slurm_restart: str = ""
    """How often Slurm has requeued the job."""
    slurm_step: str = ""
    torchrun: str = ""
    """The run id of torchrun."""

    def __str__(self) -> str:
        job = f", Slurm job {self.slurm_job}" if self.slurm_job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def is_requeue_of(self, other: Owner) -> bool:
        """Whether this is the same Slurm job, started again; two steps of one start may run side by side."""
        same_start = self.slurm_restart == other.slurm_restart
        side_by_side = same_start and self.slurm_step != other.slurm_step
        return bool(self.slurm_job) and self.slurm_job == other.slurm_job and not side_by_side


class RunInUse(PathError):
    """Another process trains in the folder.

    Args:
        owner: of the lock; None if its file cannot be read.
        problem: the rest of the sentence, and what to do.
    """

    def __init__(self, path: str | Path, owner: Owner | None, problem: str):
        self.owner = owner
        super().__init__(path, problem)

    def __reduce__(self):
        return type(self), (self.path, self.owner, self.problem)


class _Held(NamedTuple):
    """The content of a lock file, and when it was last touched, by the clock of the file system."""

    raw: bytes
    touched: float


def this_process(environ: Mapping[str, str] = os.environ) -> Owner:
    """The owner that this process would be."""
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")
    job = [environ.get(name, "") for name in names]
    return Owner(socket.gethostname(), pid, _process(pid)[1], _machine(), since, *job)


def is_alive(owner: Owner) -> bool:
    """Whether a process of this machine still exists."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        pass
    state, started = _process(owner.pid)
    return state not in ("Z", "X") and started in ("", owner.started)


class RunLock:
    """Inside, this job alone trains in the folder; RunInUse on every rank if another one does.

        with RunLock(folder, world) as lock:
            for batch in loader:
                lock.check()

    Args:
        owner: this process.
        is_alive: whether a process of this machine exists.
        touch_every: seconds.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        owner: Owner | None = None,
        is_alive: Callable[[Owner], bool] = is_alive,
        touch_every: float = TOUCH_EVERY,
    ):
        self.folder, self.path, self.world = folder, folder / LOCK, world
        self.owner, self.is_alive, self.touch_every = owner or this_process(), is_alive, touch_every
        self._raw = (json.dumps(asdict(self.owner), indent=1) + "\n").encode()
        self._taken = False
        self._taken_over: RunInUse | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._touch_regularly, name="run lock", daemon=True)

    def __enter__(self) -> RunLock:
        failed: Exception | None = None
        if self.world.is_main:
            CLEAN_UP.append(self._delete)
        try:
            if self.world.is_main:
                try:
                    make_writable(self.folder)
                    self._take()
                except (OSError, PathError) as error:
                    failed = error
            if failed := self.world.agree(failed):
                raise failed
        except BaseException:
            self._release()
            raise
        if self.world.is_main:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._release()

    def check(self) -> None:
        """Raise RunInUse if another process has taken over, as after a long suspension; reads no file."""
        if self._taken_over is not None:
            raise self._taken_over

    # The methods below run on rank 0 only.

    def _take(self) -> None:
        own = self.path.with_name(f"{LOCK}.{secrets.token_hex(8)}")
        try:
            own.write_bytes(self._raw)
            for _ in range(_TRIES):
                if self._create(self.path, own):
                    break
                held = _read(self.path)
                if held is not None:  # None: just released
                    self._require_out_of_date(held, own)
                    self._remove(held, own)
            else:
                raise PathError(self.path, "cannot be replaced: delete it if nothing trains in its folder.")
            self._taken = True
            self._delete_remains(own.stat().st_mtime)
        finally:
            own.unlink(missing_ok=True)

    def _create(self, path: Path, own: Path) -> bool:
        """Make a lock file of this owner; False if there is one."""
        try:
            os.link(own, path)
        except FileExistsError:
            return own.stat().st_nlink == 2  # the reply of a network file system was lost, and it tried again
        except OSError:  # it has no hard links
            try:
                with open(path, "xb") as file:
                    file.write(self._raw)
            except FileExistsError:
                return False
        return True

    def _remove(self, held: _Held, own: Path) -> None:
        """Remove a lock that is out of date; one process at a time, or it might be another's new lock."""
        takeover = self.path.with_name(f"{LOCK}.takeover")
        if self._create(takeover, own):
            found = _read(self.path)
            if found is not None and found.raw == held.raw:
                self.path.unlink()
                log.info("%s: took over from %s, which has ended.", self.folder, _owner(held.raw) or _UNKNOWN)
            takeover.unlink()
            return
        other = _read(takeover)
        if other is not None and self._is_out_of_date(other, own):  # killed between these lines
            takeover.unlink(missing_ok=True)
        time.sleep(0.01)

    def _require_out_of_date(self, held: _Held, own: Path) -> None:
        if self._is_out_of_date(held, own):
            return
        owner = _owner(held.raw)
        advice = "" if self._is_here(owner) else (
            f" If it has died, this command works {duration(STALE_AFTER)} after its last sign of life, "
            f"which was {duration(max(0.0, _age(held, own)))} ago."
        )  # fmt: skip
        problem = f"is in use by {owner or _UNKNOWN}. Wait for it, stop it, or choose another --out.{advice}"
        raise RunInUse(self.folder, owner, problem)

    def _is_out_of_date(self, held: _Held, own: Path) -> bool:
        owner = _owner(held.raw)
        if owner is not None and self._is_here(owner):
            return not self.is_alive(owner)  # whatever the age: it may be suspended
        requeued = owner is not None and self.owner.is_requeue_of(owner)
        return requeued or _age(held, own) > STALE_AFTER

    def _is_here(self, owner: Owner | None) -> bool:
        return owner is not None and owner.machine == self.owner.machine

    def _delete_remains(self, now: float) -> None:
        """Delete what processes left that were killed while they took the lock."""
        for path in self.folder.glob(f"{LOCK}.*"):
            with suppress(OSError):
                if now - path.stat().st_mtime > STALE_AFTER:
                    path.unlink()

    def _touch_regularly(self) -> None:
        warned = False
        while self._taken_over is None and not self._ended.wait(self.touch_every):
            try:
                self._touch()
                warned = False
            except OSError as error:
                if not warned:
                    log.warning("%s cannot be touched: %s. Retrying.", self.path, error.strerror)
                warned = True

    def _touch(self) -> None:
        held = _read(self.path)
        if held is None:  # deleted by hand
            with suppress(FileExistsError), open(self.path, "xb") as file:
                file.write(self._raw)
        elif held.raw == self._raw:
            os.utime(self.path)
        else:
            owner = _owner(held.raw)
            self._taken_over = RunInUse(
                self.folder,
                owner,
                f"was taken over by {owner or _UNKNOWN}: this one was not seen for "
                f"{duration(STALE_AFTER)}, or its Slurm job was requeued. It stops here.",
            )

    def _release(self) -> None:
        if self._taken:
            self._delete()
        if self.world.is_main:
            CLEAN_UP.remove(self._delete)

    def _delete(self) -> None:
        with suppress(OSError):
            held = _read(self.path)
            if held is not None and held.raw == self._raw:
                self.path.unlink()


def _read(path: Path) -> _Held | None:
    """None if there is no lock."""
    try:
        with open(path, "rb") as file:  # opening makes network file systems ask for the current times
            return _Held(file.read(), os.fstat(file.fileno()).st_mtime)
    except FileNotFoundError:
        return None


def _age(held: _Held, own: Path) -> float:
    """Seconds since the lock was touched, by the clock of the file system."""
    os.utime(own)
    return own.stat().st_mtime - held.touched


def _owner(raw: bytes) -> Owner | None:
    """The owner of a lock; None if its file is damaged or still being written."""
    try:
        values = json.loads(raw)
        owner = Owner(**{field.name: values[field.name] for field in fields(Owner)})
        return owner if isinstance(owner.pid, int) and 0 < owner.pid < 2**31 else None
    except (ValueError, KeyError, TypeError):
        return None


def _process(pid: int) -> tuple[str, str]:
    """The state of a process and its start; empty if unknown, as without /proc."""
    try:
        values = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return values[0].decode(), values[19].decode()
    except (OSError, IndexError):
        return "", ""


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
