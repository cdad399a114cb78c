"""Which checkpoint a run continues from: its own newest one, or the one that `--from` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastclip.config.resolved import Difference, Resolved, differences, resolve_again
from fastclip.errors import PathError
from fastclip.run.check_files import check
from fastclip.run.checkpoint import Checkpoints
from fastclip.run.folder import CHECKPOINTS, CONFIG, check_schema
from fastclip.run.start_from import tensors_digest
from fastclip.run.state_file import read_metadata, read_state


class OtherRun(PathError):
    """The folder holds a run with other settings or data, which this config cannot resume.

    Args:
        differences: the settings that differ.
    """

    def __init__(self, path: Path, problem: str, differences: Sequence[Difference] = ()):
        super().__init__(path, problem)
        self.differences = differences


def open_folder(config: Resolved) -> Path | None:
    """Return the newest checkpoint of the run's folder; raise if this config cannot resume from it.

    A damaged one is an error; with `--resume previous`, the newest undamaged one is returned.
    """
    folder = Path(config.out)
    check_schema(folder)
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    newest = checkpoints.newest_undamaged() if config.resume == "previous" else checkpoints.newest()
    if newest is None:
        return None
    if config.resume == "never":
        raise PathError(folder, "already contains a run: choose another --out, or pass --resume auto.")
    if config.resume == "auto":
        check(newest)
    written = read_metadata(newest)["config"]
    try:
        saved = resolve_again(written)
    except ValueError as error:
        raise PathError(
            newest,
            f"has settings that cannot be read: {error} "
            "Use the version of fastclip that wrote it, or choose another --out.",
        ) from error
    differ = differences(saved, config)
    if differ:
        listed = "\n  ".join(map(str, differ))
        advice = "Use the same settings, or choose another --out."
        raise OtherRun(folder, f"contains a run with other settings:\n  {listed}\n{advice}", differ)
    return newest


def open_start(config: Resolved) -> Path | None:
    """The checkpoint of another run that a new run starts from; PathError if it is not as it was chosen."""
    start = config.start
    if start.checkpoint is None:
        return None
    path = Path(start.checkpoint).expanduser()
    check(path)
    state = read_state(path)
    if (state.metadata["step"], tensors_digest(state)) != (start.step, start.digest):
        raise PathError(
            path, f"is not the checkpoint of step {start.step} that this run started from. Use --from again."
        )
    return path


class FolderGone(PathError):
    """The run's folder was deleted or renamed while the run trained in it."""

    def __init__(self, path: str | Path):
        super().__init__(
            path,
            "was deleted or renamed while the run trained in it, so nothing can be saved there. Put it back "
            "and run the same command again to resume from its newest checkpoint, or choose another --out.",
        )

    def __reduce__(self):
        return type(self), (self.path,)


def is_gone(folder: Path) -> bool:
    """Whether the files that a run has at its start have disappeared; an unreachable disk does not count."""
    try:
        (folder / CONFIG).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
