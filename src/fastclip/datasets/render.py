"""SVG to pictures to tar shards: what a worker does with the icons that it is given."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from fastclip.datasets.iconify import DataUnavailable, Icon
from fastclip.datasets.resumable_build import Record, tick, write_pairs
from fastclip.datasets.tasks import Task, write_task

SIZE = 64  # pixels: the tiny models read 32 to 64


@dataclass(frozen=True)
class Pair:
    """An icon and its caption; the key `set_name` is unique, for names hold no underscore."""

    key: str
    caption: str
    icon: Icon


def check_renderer() -> str:
    """The renderer's version, or how to install it."""
    try:
        import resvg_py
    except ImportError as error:
        raise DataUnavailable(
            "Icons are rendered by resvg-py, which is not installed: pip install 'fastclip[icons]'. "
            "`fastclip data get scenes` works without."
        ) from error
    return str(resvg_py.__version__)


def render(svg: str) -> bytes | str:
    """An RGB PNG on white; or, as text, why there is none."""
    import resvg_py

    try:
        png = resvg_py.svg_to_bytes(
            svg_string=svg, background="#ffffff", width=SIZE, height=SIZE, skip_system_fonts=True
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the renderer's panics are no Exception
        return f"cannot be rendered: {' '.join(str(error).split())[:100]}"
    picture = Image.open(io.BytesIO(bytes(png))).convert("RGB")
    if picture.getcolors(1):
        return "blank"  # white on white, or an animation that begins with nothing
    return encode(picture)


def encode(picture: Image.Image) -> bytes:
    """PNG at the fastest compression; level 9 would save a tenth of the bytes for ten times the time."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def digest(png: bytes) -> str:
    return hashlib.sha256(png).hexdigest()[:16]


def render_shard(path: Path, pairs: Sequence[Pair], held_out: Collection[str]) -> Record:
    """One training shard, without pictures that are also in a held-out set (by `held_out`, their digests)."""
    pictures, skipped = _render_all(pairs, held_out)
    write_pairs(path, ((p.key, pictures[p.key], p.caption) for p in pairs if p.key in pictures))
    return {"pairs": len(pictures), "skipped": skipped}


def render_tasks(folder: Path, pairs: Sequence[Pair], tasks: Sequence[Task]) -> Record:
    """The tasks of one held-out set; each picture is rendered once."""
    pictures, skipped = _render_all(pairs)
    counts = {task.name: write_task(folder / task.name, task, pictures) for task in tasks}
    return {"tasks": counts, "skipped": skipped, "digests": sorted({*map(digest, pictures.values())})}


def _render_all(
    pairs: Sequence[Pair], held_out: Collection[str] = ()
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Pictures by key, and why the others are left out."""
    pictures, skipped = {}, {}
    for pair in pairs:
        png = render(pair.icon.svg(SIZE))
        tick()
        if isinstance(png, str):
            skipped[pair.key] = png
        elif digest(png) in held_out:
            skipped[pair.key] = "held out"
        else:
            pictures[pair.key] = png
    return pictures, skipped
