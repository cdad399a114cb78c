"""SVG to pictures to tar shards: what a worker does with the icons that it is given."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Sequence
from pathlib import Path

from PIL import Image

from fastclip.datasets.build import Record, tick, write_tar
from fastclip.datasets.iconify import DataUnavailable
from fastclip.datasets.tasks import Task, write_task

SIZE = 64  # pixels: the tiny models read 32 to 64

Drawing = tuple[str, str, str]
"""key, svg, caption"""


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


def render_shard(path: Path, drawings: Sequence[Drawing], held_out: Collection[str]) -> Record:
    """One training shard, without pictures that are also in a held-out set (by `held_out`, their digests)."""
    skipped: dict[str, str] = {}
    members: list[tuple[str, bytes]] = []
    for key, svg, caption in drawings:
        png = render(svg)
        tick()
        if isinstance(png, bytes) and digest(png) in held_out:
            png = "held out"
        if isinstance(png, str):
            skipped[key] = png
        else:
            members += [(f"{key}.png", png), (f"{key}.txt", caption.encode())]
    write_tar(path, members)
    return {"pairs": len(members) // 2, "skipped": skipped}


def render_tasks(folder: Path, drawings: Sequence[Drawing], tasks: Sequence[Task]) -> Record:
    """The tasks of one held-out set; each picture is rendered once."""
    pictures: dict[str, bytes] = {}
    skipped: dict[str, str] = {}
    for key, svg, _ in drawings:
        png = render(svg)
        tick()
        if isinstance(png, str):
            skipped[key] = png
        else:
            pictures[key] = png
    counts = {task.name: write_task(folder / task.name, task, pictures) for task in tasks}
    return {
        "tasks": counts,
        "skipped": skipped,
        "digests": sorted({digest(png) for png in pictures.values()}),
    }
