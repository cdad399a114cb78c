"""state.json of a checkpoint: its metadata, the size and digest of each of its files, and its own digest.

    {"digest": "9a0c…",                                   of the rest of this file
     "facts": {"step": 1234, …},                          the metadata
     "files": {"rank-00000.safetensors": 632110088},      sizes
     "digests": {"rank-00000.safetensors": "c2f1…"}}      see `files.file_digest`

Checkpoints of earlier versions have only "facts" and "files", and are read as before: damage to them is found
only if it changes a size, the step, or the structure of a file. Nothing here needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from xxhash import xxh3_128_hexdigest

from fastclip.errors import PathError
from fastclip.files import file_digest, sync

STATE = "state.json"
STEP = re.compile(r"step-(\d{8,})")  # the name of a complete checkpoint
_SEAL = re.compile(rb'\{"digest": "([0-9a-f]{32})",')  # begins the file; its digest is of what remains


class DamagedCheckpoint(PathError):
    """A file of a checkpoint that is missing, or not as it was written.

    Args:
        path: the file.
        reason: what is wrong with it.
    """

    def __init__(self, path: str | Path, reason: str):
        self.reason = reason
        super().__init__(
            path,
            f"is damaged: {reason}. Copy it again from a backup, or train with --resume previous to resume "
            "from the checkpoint before it. `fastclip verify RUN` checks every file of a run.",
        )

    def __reduce__(self):
        return type(self), (self.path, self.reason)


class Metadata(dict):
    """A checkpoint's metadata. A key that is missing is damage to its state.json."""

    def __init__(self, facts: dict, file: Path):
        super().__init__(facts)
        self.file = file

    def __missing__(self, key: str) -> None:
        raise DamagedCheckpoint(self.file, f"it has no {key!r}")

    def __reduce__(self):
        return type(self), (dict(self), self.file)


@dataclass
class SavedState:
    """The contents of a state.json."""

    metadata: Metadata
    sizes: dict[str, int]
    """Of each file, in bytes."""
    digests: dict[str, str]
    """Of each file; empty in checkpoints of earlier versions."""


def write_state(checkpoint: Path, metadata: dict, sizes: dict[str, int], digests: dict[str, str]) -> Path:
    """Write a checkpoint's state.json, and return its path."""
    text = json.dumps({"facts": metadata, "files": sizes, "digests": digests}, indent=1)
    rest = text.removeprefix("{").encode()
    file = checkpoint / STATE
    file.write_bytes(f'{{"digest": "{xxh3_128_hexdigest(rest)}",'.encode() + rest)
    return file


def read_state(checkpoint: Path) -> SavedState:
    """Read and check a checkpoint's state.json; DamagedCheckpoint if it is missing or not as written."""
    file = Path(checkpoint) / STATE
    try:
        raw = file.read_bytes()
        state = json.loads(raw)
        facts, sizes, digests = state["facts"], state["files"], state.get("digests", {})
        if not all(isinstance(part, dict) for part in (facts, sizes, digests)):
            raise ValueError("facts, files or digests are not a dict")
        for name in {"step", "total_steps"} & facts.keys():
            if type(facts[name]) is not int or not 0 <= facts[name] < 2**63:
                raise ValueError(f"{name} is not a whole number")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(file, f"it cannot be read ({error!r})") from error
    if state.keys() != {"facts", "files"}:  # not of an earlier version
        seal = _SEAL.match(raw)
        if seal is None or seal[1].decode() != xxh3_128_hexdigest(raw[seal.end() :]):
            raise DamagedCheckpoint(file, "its content does not match its digest")
        if digests.keys() != sizes.keys():
            raise DamagedCheckpoint(file, "it does not have the digest of every file")
    name = STEP.fullmatch(file.resolve().parent.name)
    if name and facts.get("step", int(name[1])) != int(name[1]):
        raise DamagedCheckpoint(file, f"it is of step {facts['step']}, but its folder is called {name[0]}")
    return SavedState(Metadata(facts, file), sizes, digests)


def amend_state(checkpoint: Path, changes: dict) -> bool:
    """Change values of a checkpoint's metadata: its state.json is the old or the new one, never a mixture."""
    state = read_state(checkpoint)
    with TemporaryDirectory(dir=checkpoint) as part:
        new = write_state(Path(part), {**state.metadata, **changes}, state.sizes, state.digests)
        sync(new)
        new.replace(checkpoint / STATE)
    sync(checkpoint)
    return True


def read_metadata(checkpoint: Path) -> Metadata:
    """The contents of a checkpoint besides tensors."""
    return read_state(checkpoint).metadata


def tensor_files(checkpoint: Path, state: SavedState) -> list[str]:
    """The names of the files with tensors: those that were written, and those that are there."""
    return sorted({*state.sizes, *(file.name for file in Path(checkpoint).glob("*.safetensors"))})


def check_size(checkpoint: Path, name: str, state: SavedState) -> None:
    """DamagedCheckpoint if a file is missing, has another size, or is not one of the checkpoint's."""
    file = Path(checkpoint) / name
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DamagedCheckpoint(file, f"it cannot be read ({error.strerror})") from error
    if name not in state.sizes:
        raise DamagedCheckpoint(file, "it is not one of this checkpoint's files")
    if size != state.sizes[name]:
        raise DamagedCheckpoint(file, f"bytes written: {state.sizes[name]}, bytes on disk: {size}")


def check_digest(
    checkpoint: Path, name: str, state: SavedState, progress: Callable[[int], None] | None = None
) -> None:
    """Read a file and compare it with its digest, if it has one; DamagedCheckpoint if it differs."""
    check_size(checkpoint, name, state)
    if name not in state.digests:
        return
    file = Path(checkpoint) / name
    try:
        digest = file_digest(file, progress)
    except OSError as error:
        raise DamagedCheckpoint(file, f"it cannot be read ({error.strerror})") from error
    if digest != state.digests[name]:
        raise DamagedCheckpoint(file, f"digest written: {state.digests[name]}, digest on disk: {digest}")
