"""`scenes`: captioned coloured shapes, drawn from a seed, without network or npm.

Some pairs of colour and shape never occur in training. The tasks use these, so they test known colours and
shapes in new combinations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import cos, pi, sin
from pathlib import Path

from PIL import Image, ImageDraw

from fastclip.datasets.render import SIZE, encode
from fastclip.datasets.resumable_build import Job, Record, begin, run, shard_counts, tick, write_pairs
from fastclip.datasets.tasks import Kind, Task, write_task
from fastclip.files import atomic_write

SEED = 0
VERSION = 1  # increased when the same seed draws other scenes
TRAIN, SHARDS, TEST = 10_000, 8, 1_000
CANVAS = 3 * SIZE  # drawn larger and reduced, for smooth edges

COLOURS = {
    **{"red": "#d62728", "orange": "#ff8c1a", "yellow": "#f2d21f", "green": "#2ca02c"},
    **{"blue": "#1f5fd6", "purple": "#8e44ad", "pink": "#f58ac0", "black": "#111111"},
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "ring", "heart")
SIZES = {"small": 0.13, "large": 0.2}  # radius, as a fraction of the image
# One shape of each colour and one colour of each shape are held out for the tasks.
HELD_OUT = frozenset((colour, SHAPES[(3 * i + 1) % 8]) for i, colour in enumerate(COLOURS))
PLACES = {
    **{"in the top left": (0.28, 0.28), "in the top right": (0.72, 0.28), "in the middle": (0.5, 0.5)},
    **{"in the bottom left": (0.28, 0.72), "in the bottom right": (0.72, 0.72)},
}
RELATIONS = {
    **{"above": ((0.5, 0.25), (0.5, 0.75)), "below": ((0.5, 0.75), (0.5, 0.25))},
    **{"to the left of": ((0.25, 0.5), (0.75, 0.5)), "to the right of": ((0.75, 0.5), (0.25, 0.5))},
}

Examples = Iterator[tuple[str, bytes]]
"""A caption or a class, and its image."""


@dataclass(frozen=True)
class Thing:
    size: str
    colour: str
    shape: str

    def phrase(self, size: bool = True, colour: bool = True) -> str:
        words = [self.size] * size + [self.colour] * colour + [self.shape]
        return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def build(name: str, out: Path, *, processes: int, progress: bool) -> Record:
    """Write the shards and tasks; return the summary."""
    begin(out, {"name": name, "seed": SEED, "version": VERSION, "pairs": TRAIN, "size": SIZE})
    count = TRAIN // SHARDS
    jobs = [Job("tasks", draw_tasks, (out / "tasks",), 4 * TEST)]
    for i in range(SHARDS):
        jobs.append(Job(f"shard-{i:05d}", draw_shard, (out / "train" / f"{i:05d}.tar", i, count), count))
    tasks, *shards = run(jobs, out, processes=processes, progress=progress, label=name)
    atomic_write(
        out / "LICENSES.md", "# Licences\n\nAll images are drawn by fastclip; none is anyone else's work.\n"
    )
    return {
        "name": name,
        "seed": SEED,
        "picture": f"{SIZE}x{SIZE} RGB PNG on white",
        **shard_counts(shards),
        "tasks": tasks["tasks"],
        "left_out": {"compositions kept for the tasks": sorted(" ".join(pair) for pair in HELD_OUT)},
    }


def draw_shard(path: Path, shard: int, count: int) -> Record:
    """Draw scenes of one or two things; half of the captions omit sizes, some omit colours."""
    rng = random.Random(f"scenes {SEED} train {shard}")
    pairs: list[tuple[str, bytes, str]] = []
    for i in range(count):
        first, second = (_thing(rng, held_out=False) for _ in range(2))
        named = {"size": rng.random() < 0.5, "colour": rng.random() < 0.85}
        if rng.random() < 0.3:
            place = rng.choice(list(PLACES))
            png = draw(rng, [(first, PLACES[place])])
            caption = first.phrase(**named) + (f" {place}" if rng.random() < 0.5 else "")
        else:
            relation = rng.choice(list(RELATIONS))
            png = draw(rng, zip((first, second), RELATIONS[relation], strict=True))
            caption = f"{first.phrase(**named)} {relation} {second.phrase(**named)}"
        pairs.append((f"{shard:02d}{i:06d}", png, caption))
        tick()
    write_pairs(path, pairs)
    return {"pairs": count}


def draw_tasks(folder: Path) -> Record:
    """Write the tasks: retrieval of sentences; classification of colours, shapes, relations of two shapes."""
    shapes = tuple(f"a {{c}} {shape}" for shape in SHAPES)
    colours = ("a {c}", *(Thing("", colour, "{c}").phrase(size=False) for colour in COLOURS))
    tasks: tuple[tuple[str, Callable[[random.Random], Examples], tuple[str, ...], tuple[str, ...]], ...] = (
        ("retrieval", _sentences, (), ()),
        ("colour", partial(_single, "colour"), tuple(COLOURS), shapes),
        ("shape", partial(_single, "shape"), SHAPES, colours),
        ("relation", _relations, tuple(RELATIONS), ("a circle {c} a square",)),
    )
    counts = {}
    for name, make, classes, templates in tasks:
        answers, images = {}, {}
        for i, (answer, png) in enumerate(make(random.Random(f"scenes {SEED} _{name}"))):
            answers[f"{i:06d}"], images[f"{i:06d}"] = answer, png
            tick()
        kind: Kind = "classification" if classes else "retrieval"
        task = Task(f"scenes_{name}", kind, tuple(answers.items()), classes, templates)
        counts[task.name] = write_task(folder / task.name, task, images)
    return {"tasks": dict(sorted(counts.items()))}


def _sentences(rng: random.Random) -> Examples:
    seen: set[str] = set()
    while len(seen) < TEST:
        pair = [_thing(rng, held_out=True), _thing(rng, held_out=rng.random() < 0.5)]
        relation = rng.choice(list(RELATIONS))
        caption = f"{pair[0].phrase()} {relation} {pair[1].phrase()}"
        if caption not in seen:
            seen.add(caption)
            yield caption, draw(rng, zip(pair, RELATIONS[relation], strict=True))


def _single(field: str, rng: random.Random) -> Examples:
    """Single things with their colour or their shape."""
    for _ in range(TEST):
        thing = _thing(rng, held_out=True)
        yield getattr(thing, field), draw(rng, [(thing, rng.choice(list(PLACES.values())))])


def _relations(rng: random.Random) -> Examples:
    """A circle and a square of any colours: only their positions distinguish the classes."""
    for _ in range(TEST):
        pair = [_thing(rng, held_out=None, shape=shape) for shape in ("circle", "square")]
        relation = rng.choice(list(RELATIONS))
        yield relation, draw(rng, zip(pair, RELATIONS[relation], strict=True))


def _thing(rng: random.Random, held_out: bool | None, shape: str | None = None) -> Thing:
    """Draw one of the held-out compositions, of the others, or (None) of all."""
    while True:
        thing = Thing(rng.choice(list(SIZES)), rng.choice(list(COLOURS)), shape or rng.choice(SHAPES))
        if held_out is None or ((thing.colour, thing.shape) in HELD_OUT) == held_out:
            return thing


def draw(rng: random.Random, things: Iterable[tuple[Thing, tuple[float, float]]]) -> bytes:
    """Draw a PNG of the things, each near its place and about its size."""
    image = Image.new("RGB", (CANVAS, CANVAS), "white")
    pen = ImageDraw.Draw(image)
    for thing, (x, y) in things:
        radius = SIZES[thing.size] * rng.uniform(0.9, 1.1)
        x, y = (place + rng.uniform(-0.05, 0.05) for place in (x, y))
        _draw_shape(pen, thing.shape, COLOURS[thing.colour], x * CANVAS, y * CANVAS, radius * CANVAS)
    return encode(image.reduce(CANVAS // SIZE))


def _draw_shape(pen: ImageDraw.ImageDraw, shape: str, colour: str, x: float, y: float, r: float) -> None:
    def polygon(*points: tuple[float, float]) -> None:
        pen.polygon([(x + r * px, y + r * py) for px, py in points], fill=colour)

    def disc(cx: float, cy: float, radius: float, fill: str) -> None:
        cx, cy, radius = x + r * cx, y + r * cy, r * radius
        pen.ellipse((cx - radius, cy - radius, cx + radius, cy + radius), fill=fill)

    if shape in ("circle", "ring"):
        disc(0, 0, 1, colour)
        if shape == "ring":
            disc(0, 0, 0.55, "white")
    elif shape == "square":
        polygon((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9))
    elif shape == "triangle":
        polygon((0, -1), (1, 0.85), (-1, 0.85))
    elif shape == "diamond":
        polygon((0, -1.15), (0.75, 0), (0, 1.15), (-0.75, 0))
    elif shape == "star":
        tips = [(1.15 if i % 2 == 0 else 0.5, pi * i / 5 - pi / 2) for i in range(10)]
        polygon(*((length * cos(angle), length * sin(angle)) for length, angle in tips))
    elif shape == "cross":
        polygon((-0.32, -1), (0.32, -1), (0.32, 1), (-0.32, 1))
        polygon((-1, -0.32), (1, -0.32), (1, 0.32), (-1, 0.32))
    else:  # heart
        disc(-0.48, -0.35, 0.55, colour)
        disc(0.48, -0.35, 0.55, colour)
        polygon((-0.98, -0.12), (0.98, -0.12), (0, 1.05))
