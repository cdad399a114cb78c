"""Data that can be had by name: real pictures with the names people gave them, or generated scenes."""

from __future__ import annotations

import json
import logging
import shutil
from importlib import import_module
from pathlib import Path

from fastclip.config.collections import COLLECTIONS
from fastclip.datasets.iconify import DataUnavailable
from fastclip.datasets.resumable_build import RECORDS, Record, finish, read_plan
from fastclip.files import atomic_write, build_lock, cores
from fastclip.text import did_you_mean

__all__ = ["DataUnavailable", "get"]

log = logging.getLogger(__name__)


def get(name: str, out: str | Path, *, jobs: int | None = None, progress: bool = True) -> Path:
    """Build the collection `name` in the folder `out`, with `jobs` processes (all cores by default).

    Training pairs go to `train/*.tar`, evaluation tasks to `tasks/`. An interrupted call is continued by
    the next, with the same result to the byte; a complete folder is left as it is.
    """
    if name not in COLLECTIONS:
        hint = did_you_mean(name, COLLECTIONS)
        raise ValueError(f"There is no collection {name!r}; there are {', '.join(COLLECTIONS)}.{hint}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}: give 1 or more, or None for all cores.")
    out = Path(out)
    with build_lock(out):
        if (summary := _complete(out, name)) is not None:
            shutil.rmtree(out / RECORDS, ignore_errors=True)
            log.info("%s: complete already, %s. Delete the folder to build it again.", out, _counts(summary))
            return out
        if (out / "complete.json").exists():  # but it is not complete
            (out / RECORDS).mkdir(exist_ok=True)
            (out / "complete.json").unlink()
        build = import_module(COLLECTIONS[name].module).build
        summary = build(name, out, workers=jobs or cores(), progress=progress)
        atomic_write(out / "README.md", card(summary))
        finish(out, summary)
        log.info("%s: %s", out, _counts(summary))
        return out


def _complete(out: Path, name: str) -> Record | None:
    """The summary of a folder that is whole."""
    marker = out / "complete.json"
    if not marker.exists():
        if out.exists() and not (out / RECORDS).exists() and (not out.is_dir() or any(out.iterdir())):
            raise FileExistsError(f"{out} is or holds something else: give an empty or a new folder.")
        begun = (read_plan(out) or {}).get("name", name)
        if begun != name:
            raise FileExistsError(f"{out} holds a part of {begun!r}, not of {name!r}: give another folder.")
        return None
    summary: Record = json.loads(marker.read_text(encoding="utf-8"))
    if summary["name"] != name:
        raise FileExistsError(f"{out} holds {summary['name']!r}, not {name!r}: give another folder.")
    parts = [*(out / "train" / s for s in summary["shards"]), *(out / "tasks" / t for t in summary["tasks"])]
    if missing := [path for path in parts if not path.exists()]:
        log.warning("%s was complete, but %s is gone: building it again.", out, missing[0])
        return None
    return summary


def _counts(summary: Record) -> str:
    return f"{summary['pairs']:,} pairs in {len(summary['shards'])} shards, {len(summary['tasks'])} tasks"


def card(summary: Record) -> str:
    """README.md of the folder."""
    name = summary["name"]
    about = [f"- {k}: {summary[k]}" for k in ("package", "renderer", "seed", "picture") if k in summary]
    lines = [f"# {name}", "", f"Made by `fastclip data get {name}`: {_counts(summary)}.", "", *about]
    lines += ["- captions: the names that the makers gave, cleaned"] if "package" in summary else []
    lines += ["- licences: LICENSES.md", "", "## Tasks", ""]
    if any(task.startswith("hard_") for task in summary["tasks"]):
        lines += ["Names that begin with `hard_` ask for headings and not for things: report them apart.", ""]
    lines += ["| task | kind | pictures | classes |", "|---|---|---|---|"]
    for task, counts in summary["tasks"].items():
        lines.append(f"| {task} | {counts['kind']} | {counts['pictures']:,} | {counts['classes'] or ''} |")
    lines += ["", "## Left out", ""]
    for reason, what in summary["left_out"].items():
        lines.append(f"- {reason}: {', '.join(what) if isinstance(what, list) else f'{what:,}'}")
    if sets := summary.get("sets"):
        lines += ["", "## Sets", "", "| set | use | icons |", "|---|---|---|"]
        lines += [f"| {prefix} | {of['role']} | {of['icons']:,} |" for prefix, of in sets.items()]
    return "\n".join(lines) + "\n"
