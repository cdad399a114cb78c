"""`fastclip verify RUN`: read every file of a run's folder, and report what is damaged.

Files of checkpoints are compared with their digests. The weights of the exported model are stored twice, and
must agree. Other files must be valid JSON or YAML, and consistent. Nothing is changed.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from fastclip.config.parse import parse
from fastclip.config.resolved import differences, resolve, resolve_again
from fastclip.errors import PathError
from fastclip.run.folder import (
    ABOUT,
    CHECKPOINTS,
    CONFIG,
    METRICS,
    MODEL,
    RESULTS,
    check_is_run,
    check_schema,
    newest_checkpoint,
    number,
    skipped_lines,
)
from fastclip.run.metrics_file import JsonLines
from fastclip.run.results import read_all
from fastclip.run.state_file import (
    STATE,
    STEP,
    DamagedCheckpoint,
    check_digest,
    read_metadata,
    read_state,
    tensor_files,
)
from fastclip.terminal import console, progress

if TYPE_CHECKING:
    from torch import Tensor

State = Literal["fine", "damaged", "unknown"]
Update = Callable[[int], None]
_COLOURS = {"fine": "green", "damaged": "bold red", "unknown": "yellow"}


class Finding(NamedTuple):
    """The state of one file."""

    file: str
    """Its path in the run's folder."""
    state: State
    about: str = ""
    """What is wrong with it, or why its state is unknown."""


def verify(run: Path, json: bool = False) -> None:
    """Read every file of a run and compare it with what was written; exit code 1 if one is damaged.

    Checkpoints of earlier versions have no digests: of these, sizes and headers are checked.

    Args:
        run: the run's folder, e.g. runs/emoji-fastclip-v3.
        json: print JSON instead of a table.
    """
    folder = run.expanduser()
    with progress("checking", "bytes") as update:
        findings = verify_run(folder, update)
    if json:
        print(json_text.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        _print_table(findings)
    if damaged := [finding.file for finding in findings if finding.state == "damaged"]:
        raise PathError(run, f"has damaged files: {', '.join(damaged)}.")


def verify_run(folder: Path, update: Callable[[int, int], None] = lambda done, total: None) -> list[Finding]:
    """What is known about each file of a run.

    Args:
        update: called with the number of bytes read, and of all bytes to read.
    """
    check_is_run(folder)
    check_schema(folder)
    large = [*folder.glob(f"{CHECKPOINTS}/step-*/*.safetensors"), *folder.glob(f"{MODEL}/*.*")]
    done, total = 0, sum(file.stat().st_size for file in large if file.exists())

    def read(size: int) -> None:
        nonlocal done
        done += size
        update(min(done, total), total)

    findings = [*_settings(folder), *_records(folder), *_checkpoints(folder, read), *_exported(folder, read)]
    return [Finding(str(Path(file).relative_to(folder)), state, about) for file, state, about in findings]


# Each function yields the findings about some of the files, with full paths


def _settings(folder: Path) -> Iterator[Finding]:
    own = ("open_clip_config.json", "text_tower/config.json", "image_tower/config.json")
    for name in (ABOUT, *own, *(f"{MODEL}/{one}" for one in own)):
        if (folder / name).exists():
            yield _found(folder / name, lambda file: json_text.loads(file.read_bytes()))
    if (folder / CONFIG).exists():
        yield _found(folder / CONFIG, _check_config)


def _check_config(file: Path) -> None:
    """ValueError if it is not a valid config, or not that of the newest checkpoint."""
    config, newest = resolve(parse(["--config", str(file)])), newest_checkpoint(file.parent)
    try:
        saved = None if newest is None else resolve_again(read_metadata(newest)["config"])
    except (ValueError, KeyError, TypeError):
        return  # the checkpoint has its own line, or is of another version
    if saved is not None and (differ := differences(saved, config)):
        raise ValueError(f"it differs from {newest}: {', '.join(map(str, differ))}")


def _records(folder: Path) -> Iterator[Finding]:
    readers: list[tuple[str, str, Callable[[JsonLines], object]]] = [
        (METRICS, "record", _read_metrics),
        (RESULTS, "result", read_all),
    ]
    for name, kind, read in readers:
        lines = JsonLines(folder / name)
        if not lines.path.exists():
            continue
        finding = _found(lines.path, lambda _, read=read, lines=lines: read(lines))  # type: ignore[misc]
        if finding.state == "fine":
            state: State = "damaged" if lines.skipped else "fine"  # an incomplete last line is left by a kill
            finding = Finding(str(lines.path), state, " ".join(skipped_lines(lines, name, kind)))
        yield finding


def _read_metrics(lines: JsonLines) -> None:
    """Steps are in order; lines without a step and an epoch are added to `lines.skipped`."""
    last = 0.0
    for line, record in lines:
        step, epoch = number(record.get("step")), number(record.get("epoch"))
        if step is None or epoch is None:
            lines.skipped.append(line)
        elif step < last:
            raise ValueError(f"line {line} is of step {step:.0f}, after step {last:.0f}")
        last = max(last, step or 0.0)


def _checkpoints(folder: Path, read: Update) -> Iterator[Finding]:
    newest = newest_checkpoint(folder)
    for path in sorted((folder / CHECKPOINTS).glob("*")):
        if path.is_symlink():
            yield _found(path, lambda link: _check_link(link, newest))
        elif STEP.fullmatch(path.name):
            findings = [*_checkpoint(path, read)]
            yield from findings if path.exists() else []  # training may have just deleted it
        elif ".damaged" in path.name:
            yield Finding(str(path), "unknown", "set aside, as it was damaged; delete it if it is not needed")
        elif ".decayed" in path.name:
            about = "set aside, as the run was prolonged from an earlier step; delete it if it is not needed"
            yield Finding(str(path), "unknown", about)
        elif path.name.endswith((".part", ".old")):
            yield Finding(str(path), "unknown", "being written, or left by a killed run: resuming deletes it")


def _check_link(link: Path, newest: Path | None) -> None:
    target = link.resolve()
    if not (target / STATE).is_file():
        raise ValueError(f"it points to {target.name}, which does not exist. Resuming the run corrects it")
    if link.name == "last" and newest is not None and target != newest.resolve():
        raise ValueError(
            f"it points to {target.name}, but {newest.name} is newer. Resuming the run corrects it"
        )


def _checkpoint(path: Path, read: Update) -> Iterator[Finding]:
    finding = _found(path / STATE, lambda file: read_state(file.parent))
    yield finding
    if finding.state == "damaged":
        yield from (
            Finding(str(file), "unknown", f"its digest is in {STATE}, which is damaged")
            for file in sorted(path.glob("*.safetensors"))
        )
        return
    state = read_state(path)
    for name in tensor_files(path, state):
        finding = _found(path / name, lambda file: check_digest(path, file.name, state, read))
        if finding.state == "fine" and name not in state.digests:
            finding = _found(path / name, _tensors)
            if finding.state == "fine":
                about = "no digest: written by an earlier version. Its size and header are right"
                finding = Finding(str(path / name), "unknown", about)
        yield finding


def _exported(folder: Path, read: Update) -> Iterator[Finding]:
    """The exported weights are in two files; the .pt is a zip archive, which has checksums."""
    weights: dict[str, dict[str, Tensor]] = {}
    for file in sorted((folder / MODEL).glob("*.pt")):
        yield _found(file, lambda file: weights.update({file.stem: _torch_tensors(file)}))
        read(file.stat().st_size)
    for file in sorted((folder / MODEL).glob("*.safetensors")):
        finding = _found(file, lambda file: _check_weights(file, weights.get(file.stem)))
        read(file.stat().st_size)
        if finding.state == "fine" and file.stem not in weights:
            finding = Finding(str(file), "unknown", f"there is no intact {file.stem}.pt to compare it with")
        yield finding


def _check_weights(file: Path, expected: dict[str, Tensor] | None) -> None:
    """ValueError if a tensor differs in any bit from the expected ones, if they are known."""
    import torch

    tensors = _tensors(file)
    if expected is None:
        return
    for name in sorted({*tensors, *expected}):
        if name not in tensors or name not in expected:
            raise ValueError(f"{name} is missing in one of {file.name} and {file.stem}.pt")
        one, other = tensors[name], expected[name]
        same_type = one.shape == other.shape and one.dtype == other.dtype
        if not same_type or not torch.equal(*(part.reshape(-1).view(torch.uint8) for part in (one, other))):
            raise ValueError(f"{name} is not as in {file.stem}.pt")


def _torch_tensors(file: Path) -> dict[str, Tensor]:
    from zipfile import ZipFile

    import torch

    with ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} in it is wrong")
    return torch.load(file, map_location="cpu", weights_only=True)["state_dict"]


def _tensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def _found(file: Path, check: Callable[[Path], object]) -> Finding:
    """Fine, unless the check raises."""
    try:
        check(file)
    except DamagedCheckpoint as error:
        return Finding(str(file), "damaged", f"{error.reason}.")
    except Exception as error:  # a damaged file can raise anything
        return Finding(str(file), "damaged", f"{str(error).rstrip('.') or type(error).__name__}.")
    return Finding(str(file), "fine")


def _print_table(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("file", "state", "", box=None, pad_edge=False)
    for file, state, about in findings:
        table.add_row(Text(file), Text(state, _COLOURS[state]), Text(about))
    console().print(table)
