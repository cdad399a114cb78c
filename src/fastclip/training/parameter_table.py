"""Which parameters train, at which rate and with which decay: `fastclip train … --dry_run`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from fastclip.config.resolved import Resolved
from fastclip.distributed.world import World
from fastclip.layers import SIDES, Layers, Place
from fastclip.model import TwoTowers
from fastclip.terminal import console, say
from fastclip.training.build import build_loss, build_run_optimizer, build_towers


@dataclass(frozen=True)
class Row:
    """A layer, or several blocks that are trained alike."""

    tower: str
    layer: str
    parameters: int
    """Numbers, adapters included."""
    trained: int
    lr: float | None
    """Peak learning rate of what is trained; None: nothing is."""
    weight_decay: float | None
    """Of its matrices; None: nothing is decayed."""


def print_parameters(config: Resolved, world: World) -> None:
    """Build the model as a run would, and print what would train; nothing is written."""
    towers = build_towers(config, world)
    optimizer = build_run_optimizer(config, towers, build_loss(config, towers, config.batch.size, world))
    if world.is_main:
        _print(parameter_rows(towers, optimizer))


def parameter_rows(towers: TwoTowers, optimizer: Optimizer) -> list[Row]:
    """The layers of both towers from their inputs on, then temperatures, as the optimizer has them."""
    layers, groups = Layers(towers.clip), dict[Any, dict[str, Any]]()
    for group in optimizer.param_groups:
        groups |= dict.fromkeys(group["params"], group)
    found: dict[Place, Row] = {}
    for name, parameter in towers.clip.named_parameters():
        place = layers.place(name)
        row = found.setdefault(place, Row(*_names(place, layers), 0, 0, None, None))
        row = replace(row, parameters=row.parameters + parameter.numel())
        if parameter in groups:
            lr, decay = groups[parameter]["lr"], groups[parameter]["weight_decay"]
            row = replace(row, trained=row.trained + parameter.numel(), lr=lr)
            row = replace(row, weight_decay=decay or row.weight_decay)
        found[place] = row
    order = {side: number for number, side in enumerate((*SIDES, None))}
    rows = [found[place] for place in sorted(found, key=lambda place: (order[place.side], place.depth))]
    for group in optimizer.param_groups:
        if group["role"] == "tau":
            numbers = sum(parameter.numel() for parameter in group["params"])
            rows.append(Row("loss", "τ", numbers, numbers, group["lr"], None))
    return _merged(rows)


def _names(place: Place, layers: Layers) -> tuple[str, str]:
    if place.side is None:
        return "both", "scale"
    blocks = layers.number[place.side]
    after = {0: "embeddings", blocks + 1: "norm", blocks + 2: "projection"}
    return place.side, after.get(place.depth, f"block {place.depth}")


def _merged(rows: list[Row]) -> list[Row]:
    """Consecutive blocks that are trained alike as one row."""
    merged: list[Row] = []
    for row in rows:
        last = merged[-1] if merged else None
        if last is not None and "block" in row.layer and "block" in last.layer and _alike(row, last):
            first = last.layer.removeprefix("blocks ").removeprefix("block ").partition("–")[0]
            merged[-1] = replace(
                last,
                layer=f"blocks {first}–{row.layer.removeprefix('block ')}",
                parameters=last.parameters + row.parameters,
                trained=last.trained + row.trained,
            )
        else:
            merged.append(row)
    return merged


def _alike(a: Row, b: Row) -> bool:
    whole = [row.trained == row.parameters for row in (a, b)]
    return a.tower == b.tower and whole[0] == whole[1] and (a.lr, a.weight_decay) == (b.lr, b.weight_decay)


def _print(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table("tower", "layer", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("parameters", "trained", "peak rate", "weight decay"):
        table.add_column(heading, justify="right")
    for row in rows:
        lr = "–" if row.lr is None else f"{row.lr:.3g}"
        decay = "–" if row.weight_decay is None else f"{row.weight_decay:g}"
        table.add_row(
            row.tower, row.layer, f"{row.parameters:,}", f"{row.trained:,}" if row.trained else "–", lr, decay
        )
    console().print(table)
    trained, every = (sum(getattr(row, kind) for row in rows) for kind in ("trained", "parameters"))
    say(f"{trained:,} of {every:,} parameters are trained ({100 * trained / every:.2g} %).")
