"""`emoji` and `icons`: the sets to train on, the sets held out completely, and the jobs that render them."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from fastclip.config.collections import COLLECTIONS
from fastclip.datasets import iconify
from fastclip.datasets.captions import captioner, words_of
from fastclip.datasets.iconify import IconSet
from fastclip.datasets.render import SIZE, Pair, check_renderer, render_shard, render_tasks
from fastclip.datasets.resumable_build import Job, Record, begin, read_plan, run, shard_counts
from fastclip.datasets.tasks import Named, Task, tasks_of
from fastclip.files import atomic_write

log = logging.getLogger(__name__)

EMOJI_TRAIN = ("noto", "noto-v1", "openmoji", "fluent-emoji", "fluent-emoji-flat")
# Copies of held-out sets (a fork, an older edition, one without colours): not used at all.
COPIES = ("famicons", "emojione-v1", "emojione-monotone")
JOINED_NAMES = ("fxemoji",)  # sets that write names without hyphens
PAIRS_PER_SHARD = 10_000
MIN_SHARDS = 8  # a few for each of a few loader workers
MAX_KEY = 90  # a tar header holds 100 bytes


def build(name: str, out: Path, *, processes: int, progress: bool) -> Record:
    """Write the shards, tasks and list of licences; return the summary."""
    renderer = check_renderer()
    tarball = iconify.fetch(wanted=(read_plan(out) or {}).get("package"))
    held_names = COLLECTIONS[name].held_out
    sets = iconify.read(tarball, {*EMOJI_TRAIN, *held_names} if name == "emoji" else None)
    vocabulary = words_of(sets[prefix] for prefix in EMOJI_TRAIN if prefix in sets)
    pairs = {p: pairs_of(s, vocabulary) for p, s in sets.items() if p not in COPIES}
    train = in_hash_order(pair for prefix in pairs if prefix not in held_names for pair in pairs[prefix])
    held_out = {p: (pairs[p], held_out_tasks(sets[p], pairs[p])) for p in held_names if p in pairs}

    plan = {"name": name, "package": iconify.version_of(tarball), "renderer": renderer, "size": SIZE}
    begin(out, plan | {"content": _fingerprint(tarball, train, [tasks for _, tasks in held_out.values()])})
    run_jobs = partial(run, out=out, processes=processes, progress=progress)
    tests = run_jobs(_task_jobs(out, held_out), label=f"{name}, held-out sets")
    digests = {digest for record in tests for digest in record["digests"]}
    shards = run_jobs(_shard_jobs(out, train, digests), label=f"{name}, training pairs")

    used = {prefix: sets[prefix] for prefix in sets if pairs.get(prefix)}
    roles = {prefix: "held out" if prefix in held_names else "training" for prefix in used}
    atomic_write(out / "LICENSES.md", licences(used, roles))
    return {
        "name": name,
        "package": f"{iconify.PACKAGE} {plan['package']}",
        "renderer": f"resvg-py {renderer}",
        "picture": f"{SIZE}x{SIZE} RGB PNG on white",
        "sets": {p: {"role": roles[p], "icons": len(pairs[p]), "hidden": sets[p].hidden} for p in used},
        **shard_counts(shards),
        "tasks": dict(sorted(item for record in tests for item in record["tasks"].items())),
        "skipped": dict(sorted(item for record in shards + tests for item in record["skipped"].items())),
        "left_out": _left_out(sets, pairs, shards + tests),
    }


def _left_out(sets: dict[str, IconSet], pairs: dict[str, list[Pair]], records: list[Record]) -> Record:
    reasons = Counter(reason.split(":")[0] for record in records for reason in record["skipped"].values())
    copies = [prefix for prefix in COPIES if prefix in sets]
    return {
        "hidden by their makers": sum(sets[prefix].hidden for prefix in pairs),
        "same drawing and same caption in one set": sum(len(sets[p].icons) - len(pairs[p]) for p in pairs),
        **({"sets that copy a held-out one": copies} if copies else {}),
        **{_REASONS.get(reason, reason): n for reason, n in sorted(reasons.items())},
    }


_REASONS = {"held out": "same picture as one of a held-out set", "blank": "blank when rendered"}


def pairs_of(icons: IconSet, vocabulary: Counter[str]) -> list[Pair]:
    """Pairs of a set in byte order of names, without repeats of the same drawing and caption."""
    caption = captioner(icons, vocabulary if icons.prefix in JOINED_NAMES else None)
    unique: dict[tuple[str, str], Pair] = {}
    for icon in icons.icons:
        pair = Pair(_key(f"{icons.prefix}_{icon.name}"), caption(icon.name), icon)
        unique.setdefault((icon.body, pair.caption), pair)
    return list(unique.values())


def _key(name: str) -> str:
    if len(name) <= MAX_KEY:
        return name
    return f"{name[: MAX_KEY - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def in_hash_order(pairs: Iterable[Pair]) -> list[Pair]:
    """Mix the sets: each shard is a sample of all, and changes little when the package grows."""
    return sorted(pairs, key=lambda pair: hashlib.sha256(pair.key.encode()).digest())


def held_out_tasks(icons: IconSet, pairs: Sequence[Pair]) -> list[Task]:
    headings: dict[str, list[str]] = {}
    for heading, names in icons.categories.items():
        for name in names:
            headings.setdefault(name, []).append(heading)
    named = [Named(pair.key, pair.caption, tuple(headings.get(pair.icon.name, ()))) for pair in pairs]
    return tasks_of(icons.prefix, named, emoji=icons.prefix in COLLECTIONS["emoji"].held_out)


def _task_jobs(out: Path, held_out: dict[str, tuple[list[Pair], list[Task]]]) -> list[Job]:
    jobs = []
    for prefix, (pairs, tasks) in held_out.items():
        used = {key for task in tasks for key, _ in task.items}
        chosen = [pair for pair in pairs if pair.key in used]
        jobs.append(Job(f"tasks-{prefix}", render_tasks, (out / "tasks", chosen, tasks), len(chosen)))
    return jobs


def _shard_jobs(out: Path, train: list[Pair], digests: set[str]) -> list[Job]:
    shards = min(max(MIN_SHARDS, -(-len(train) // PAIRS_PER_SHARD)), len(train))
    jobs = []
    for i in range(shards):
        part = train[len(train) * i // shards : len(train) * (i + 1) // shards]
        path = out / "train" / f"{i:05d}.tar"
        jobs.append(Job(f"shard-{i:05d}", render_shard, (path, part, digests), len(part)))
    return jobs


def _fingerprint(tarball: Path, train: Sequence[Pair], held_out: Iterable[list[Task]]) -> str:
    """Hash everything that determines the result: drawings (by the tarball), keys, captions and tasks."""
    with tarball.open("rb") as file:
        content = hashlib.file_digest(file, "sha256")
    for pair in train:
        content.update(f"{pair.key}\t{pair.caption}\n".encode())
    for tasks in held_out:
        content.update(repr(tasks).encode())
    return content.hexdigest()


def licences(sets: dict[str, IconSet], roles: dict[str, str]) -> str:
    """A table of all sets with title, author and licence, as stated by the package."""
    lines = [
        "# Licences of the images",
        "",
        f"The images and their names come from the npm package `{iconify.PACKAGE}` and are by many authors.",
        "Each set has its own licence. Check it before you redistribute images or anything made from them.",
        "",
        "| set | title | author | licence | use here |",
        "|---|---|---|---|---|",
    ]
    for prefix, icons in sorted(sets.items()):
        info = icons.info
        author, licence = info.get("author") or {}, info.get("license") or {}
        title = licence.get("title", "not stated")
        spdx = f" ({licence['spdx']})" if licence.get("spdx", title) != title else ""
        cells = [prefix, info.get("name", prefix), _link(author.get("name", "not stated"), author.get("url"))]
        cells += [_link(title + spdx, licence.get("url")), roles[prefix]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _link(text: str, url: str | None) -> str:
    return f"[{text}]({url})" if url else text
