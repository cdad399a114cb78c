"""What a fine-tune learned against what it forgot: scores of blends of its first and last weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastclip.errors import CommandError, OptionError
from fastclip.files import atomic_write
from fastclip.run.blend import Blends
from fastclip.terminal import console, say

if TYPE_CHECKING:
    import torch

    from fastclip.evaluation.eval_command import Scorer
    from fastclip.model import TwoTowers
    from fastclip.run.folder import Which
    from fastclip.run.results import Result

RESULTS, CURVE, PICTURE = "blends.jsonl", "blend.json", "blend.png"


@dataclass(frozen=True)
class Point:
    """A blend and its scores."""

    share: float
    new: float
    """Mean over the new tasks."""
    before: float | None
    """Mean over the tasks of before; None if there are none."""
    scores: dict[str, float]
    """By task."""


def blend_curve(
    run: Path,
    shares: str,
    start: str | None,
    which: Which,
    tasks: dict[str, Path | str],
    before: dict[str, Path | str],
    scorer: Scorer,
    as_json: bool,
) -> None:
    """Score the blends, print a table, and write blend.json and blend.png into the folder of results."""
    wanted = _parse(shares)
    if both := tasks.keys() & before.keys():
        advice = "Rename the folder of one of them."
        raise OptionError("tasks_before", min(both), "is also the name of one of the tasks", advice=advice)

    def models(device: torch.device) -> Iterator[TwoTowers]:
        blends = Blends(run, which, start, device)
        for share in wanted:
            yield blends.blend(share)

    found = scorer.score(models, str(run), tasks | before, RESULTS)
    if found is None:
        return
    points = [_point(share, results, tasks, before) for share, results in zip(wanted, found, strict=True)]
    curve = {"points": [asdict(point) for point in points]}
    atomic_write(scorer.out / CURVE, json.dumps(curve, indent=2) + "\n")
    if before:
        _draw(points, scorer.out / PICTURE)
    if as_json:
        print(json.dumps(curve, indent=2))
    else:
        _print(points, scorer.out / PICTURE if before else None)


def _parse(shares: str) -> list[float]:
    try:
        wanted = [float(part) for part in shares.split(",")]
    except ValueError:
        wanted = []
    if not wanted or not all(0 <= share <= 1 for share in wanted):
        raise OptionError("blend", shares, "must be numbers in [0, 1]", example="0,0.25,0.5,0.75,1")
    return sorted(set(wanted))


def _point(share: float, results: list[Result], tasks: dict, before: dict) -> Point:
    if failed := [result for result in results if result.value is None]:
        raise CommandError(f"{failed[0].task} could not be scored: {failed[0].error}")
    scores = {result.task: float(result.value or 0) for result in results}
    new, old = (
        sum(scores[name] for name in names) / len(names) if names else None for names in (tasks, before)
    )
    assert new is not None
    return Point(share, new, old, scores)


def _print(points: list[Point], picture: Path | None) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("blend", "new tasks, %", *(["tasks of before, %"] if picture else [])):
        table.add_column(heading, justify="right")
    for point in points:
        scores = (point.new, point.before) if picture else (point.new,)
        table.add_row(f"{point.share:g}", *(f"{100 * float(score or 0):.2f}" for score in scores))
    console().print(table)
    say("0 is the start of the run, 1 its end. `fastclip export RUN OUT --blend SHARE` exports a blend.")
    if picture is not None:
        say(f"Drawn in {picture}.")


def _draw(points: list[Point], file: Path) -> None:
    """The curve of the new tasks against those of before, with the shares beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    new, old = [100 * point.new for point in points], [100 * float(point.before or 0) for point in points]
    axes.plot(old, new, marker="o", color="#2a6f97")
    for x, y, point in zip(old, new, points, strict=True):
        axes.annotate(f"{point.share:g}", (x, y), textcoords="offset points", xytext=(6, 5))
    axes.set(
        xlabel="tasks of before, mean score (%)",
        ylabel="new tasks, mean score (%)",
        title="Blends of the first (0) and last (1) weights",
    )
    axes.margins(0.1)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
