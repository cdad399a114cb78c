"""Collections by name: real images with the names their makers gave them, or generated scenes."""

from __future__ import annotations

import logging
import shutil
from importlib import import_module
from pathlib import Path

from fastclip.config.collections import COLLECTIONS
from fastclip.datasets.iconify import DataUnavailable
from fastclip.datasets.resumable_build import RECORDS, Record, finish, read_plan, read_record
from fastclip.errors import OptionError, PathError
from fastclip.files import atomic_write, build_lock, cores

__all__ = ["DataUnavailable", "FolderInUse", "get"]

log = logging.getLogger(__name__)


class FolderInUse(PathError, FileExistsError):
    """The output folder has other files."""


def get(name: str, out: str | Path, *, jobs: int | None = None, progress: bool = True) -> Path:
    """Build the collection `name` in the folder `out`, with `jobs` processes (default: one per core).

    Training pairs go to `train/*.tar`, evaluation tasks to `tasks/`. A call after an interruption resumes,
    with the same result to the byte; a complete folder is left unchanged.
    """
    if name not in COLLECTIONS:
        raise OptionError.unknown("name", name, COLLECTIONS)
    if jobs is not None and jobs < 1:
        raise OptionError("jobs", jobs, "must be at least 1", advice="Omit it to use all cores.")
    out = Path(out)
    with build_lock(out):
        if (summary := _complete(out, name)) is not None:
            shutil.rmtree(out / RECORDS, ignore_errors=True)
            log.info("%s is already complete: %s. Delete the folder to rebuild it.", out, _counts(summary))
            return out
        if (out / "complete.json").exists():  # but files are missing
            (out / RECORDS).mkdir(exist_ok=True)
            (out / "complete.json").unlink()
        build = import_module(COLLECTIONS[name].module).build
        summary = build(name, out, processes=jobs or cores(), progress=progress)
        atomic_write(out / "README.md", card(summary))
        finish(out, summary)
        log.info("%s: %s", out, _counts(summary))
        return out


def _complete(out: Path, name: str) -> Record | None:
    """The summary of a complete folder; FolderInUse if it has something else."""
    marker = out / "complete.json"
    if not marker.exists():
        if out.exists() and not (out / RECORDS).exists() and (not out.is_dir() or any(out.iterdir())):
            raise FolderInUse(out, "has other files. Choose an empty or a new folder with --out.")
        started = (read_plan(out) or {}).get("name", name)
        if started != name:
            raise FolderInUse(out, f"has a part of {started!r}, not of {name!r}. Choose another --out.")
        return None
    summary = read_record(marker, name=str, pairs=int, shards=dict, tasks=dict)
    if summary["name"] != name:
        raise FolderInUse(out, f"has {summary['name']!r}, not {name!r}. Choose another --out.")
    parts = [*(out / "train" / s for s in summary["shards"]), *(out / "tasks" / t for t in summary["tasks"])]
    if missing := [path for path in parts if not path.exists()]:
        log.warning("%s was complete, but %s is missing: rebuilding.", out, missing[0])
        return None
    return summary


def _counts(summary: Record) -> str:
    return f"{summary['pairs']:,} pairs in {len(summary['shards'])} shards, {len(summary['tasks'])} tasks"


def card(summary: Record) -> str:
    """The folder's README.md."""
    name = summary["name"]
    fields = {"package": "package", "renderer": "renderer", "seed": "seed", "picture": "images"}
    about = [f"- {label}: {summary[key]}" for key, label in fields.items() if key in summary]
    lines = [f"# {name}", "", f"Made by `fastclip data get {name}`: {_counts(summary)}.", "", *about]
    lines += ["- captions: the names that their makers gave them, cleaned"] if "package" in summary else []
    lines += ["- licences: LICENSES.md", "", "## Tasks", ""]
    if any(task.startswith("hard_") for task in summary["tasks"]):
        note = "The classes of `hard_…` tasks are category headings, not objects: report them separately."
        lines += [note, ""]
    lines += ["| task | kind | images | classes |", "|---|---|---|---|"]
    for task, counts in summary["tasks"].items():
        lines.append(f"| {task} | {counts['kind']} | {counts['pictures']:,} | {counts['classes'] or ''} |")
    lines += ["", "## Skipped", ""]
    for reason, skipped in summary["left_out"].items():
        lines.append(f"- {reason}: {', '.join(skipped) if isinstance(skipped, list) else f'{skipped:,}'}")
    if sets := summary.get("sets"):
        lines += ["", "## Sets", "", "| set | use | icons |", "|---|---|---|"]
        lines += [f"| {prefix} | {of['role']} | {of['icons']:,} |" for prefix, of in sets.items()]
    return "\n".join(lines) + "\n"
