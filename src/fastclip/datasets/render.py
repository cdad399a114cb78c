"""Render SVG icons into tar shards and tasks; runs in the processes of the build."""

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

SIZE = 64  # pixels: the tiny models take 32 to 64


@dataclass(frozen=True)
class Pair:
    """An icon and its caption; the key `set_name` is unique, as names contain no underscore."""

    key: str
    caption: str
    icon: Icon


def check_renderer() -> str:
    """Return the renderer's version; DataUnavailable if it is not installed."""
    try:
        import resvg_py
    except ImportError as error:
        raise DataUnavailable(
            "Icons are rendered with resvg-py, which is not installed: pip install 'fastclip[icons]'. "
            "`fastclip data get scenes` does not require it."
        ) from error
    return str(resvg_py.__version__)


def render(svg: str) -> bytes | str:
    """Render an RGB PNG on white; if that fails, return the reason as a string."""
    import resvg_py

    try:
        png = resvg_py.svg_to_bytes(
            svg_string=svg, background="#ffffff", width=SIZE, height=SIZE, skip_system_fonts=True
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the renderer's panics are not Exceptions
        return f"cannot be rendered: {' '.join(str(error).split())[:100]}"
    image = Image.open(io.BytesIO(bytes(png))).convert("RGB")
    if image.getcolors(1):
        return "blank"  # white on white, or an animation that starts empty
    return encode(image)


def encode(image: Image.Image) -> bytes:
    """Encode as PNG at the fastest level; level 9 saves a tenth of the bytes in ten times the time."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def digest(png: bytes) -> str:
    return hashlib.sha256(png).hexdigest()[:16]


def render_shard(path: Path, pairs: Sequence[Pair], held_out: Collection[str]) -> Record:
    """Write one training shard, without images whose digest is in `held_out`."""
    images, skipped = _render_all(pairs, held_out)
    write_pairs(path, ((p.key, images[p.key], p.caption) for p in pairs if p.key in images))
    return {"pairs": len(images), "skipped": skipped}


def render_tasks(folder: Path, pairs: Sequence[Pair], tasks: Sequence[Task]) -> Record:
    """Write the tasks of one held-out set; each image is rendered once."""
    images, skipped = _render_all(pairs)
    counts = {task.name: write_task(folder / task.name, task, images) for task in tasks}
    return {"tasks": counts, "skipped": skipped, "digests": sorted({*map(digest, images.values())})}


def _render_all(
    pairs: Sequence[Pair], held_out: Collection[str] = ()
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Images by key, and the reasons why others were skipped."""
    images, skipped = {}, {}
    for pair in pairs:
        png = render(pair.icon.svg(SIZE))
        tick()
        if isinstance(png, str):
            skipped[pair.key] = png
        elif digest(png) in held_out:
            skipped[pair.key] = "held out"
        else:
            images[pair.key] = png
    return images, skipped
