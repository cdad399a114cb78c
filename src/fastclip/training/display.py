"""The display of a run: a live panel on a terminal, plain lines in a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from fastclip.terminal import View
from fastclip.text import duration

_WIDEST = 120  # columns; wider panels are harder to read
_METRICS = 6  # of an evaluation, shown on the terminal
_ALARMING = {"data_wait": 0.2, "skipped": 0, "bad": 0}  # highlighted above this value
_SHOWN = {  # name and format in the panel; format and width on a plain line
    "loss": ("loss", "{}", "loss {}", 14),
    "tau": ("temperature τ", "{:#.3g}", "tau {:#.3g}", 10),
    "gamma": ("inner rate γ", "{:#.3g}", "gamma {:#.3g}", 11),
    "lr": ("learning rate", "{:.2e}", "lr {:.1e}", 10),
    "radius": ("radius → ρ", "{:.2f}{rho}", "radius {:.2f}{rho}", 17),
    "grad_norm": ("gradient norm", "{}", "", 0),
    "unvisited": ("unvisited", "{:.1%}", "unvisited {:.0%}", 14),
    "samples_per_second": ("samples/s", "{:,.0f}", "{:,.0f} samples/s", 16),
    "data_wait": ("data wait", "{:.0%}", "data {:.0%}", 9),
    "eta": ("", "", "eta {}", 15),
    "skipped": ("skipped", "{:,}", "skipped {}", 0),
    "bad": ("bad samples", "{:,}", "bad {}", 0),
    "elapsed": ("elapsed", "{}", "", 0),
}


@dataclass(frozen=True)
class Plan:
    """Properties of a run that stay constant."""

    run: Path  # its folder
    title: str  # such as "fastclip-v3 · vit-emoji · emoji"
    total_steps: int
    epochs: float
    steps_per_epoch: float
    global_batch: int
    rho: float | None  # the radius that the algorithm settles at, if it has one
    ranks: int
    start_step: int = 0  # steps done before this process started


class Display:
    """Shows the progress of a run.

    In a pipe a record is one line, at most every two seconds; the first and the last are always printed.

    Args:
        evaluations: records of evaluations before this process started.
        console: where to draw; default: stderr.
        clock: the current time in seconds.
    """

    def __init__(
        self,
        plan: Plan,
        evaluations: list[dict],
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.plan, self.step, self._clock = plan, plan.start_step, clock
        self.record: dict = {}
        self.last: dict = evaluations[-1] if evaluations else {}
        self.best: dict = next((record for record in reversed(evaluations) if record.get("best")), {})
        self._started, self._held = clock(), False
        # drawing takes about 5 ms
        self.view = View(self._panel, line_every=2.0, first=0.0, keep=True, target=console, clock=clock)
        self._epoch, self._run = self.view.add_bar(), self.view.add_bar()
        self._move_bars()
        self.view.start()

    def tick(self, step: int) -> None:
        """Call after every step; redraws at most twice per second."""
        self.step = step
        if self.view.plain or self.view.due():
            self._move_bars()
            self.view.refresh()

    def log(self, record: dict) -> None:
        self.record, self._held = record, True
        self.tick(record["step"])
        if self.view.plain and (self.view.due() or self.step >= self.plan.total_steps):
            self._print_held()

    def evaluated(self, record: dict) -> None:
        self.last, self.best = record, record if record.get("best") else self.best
        self.tick(record["step"])
        if self.view.plain:
            self._print_held()
            values = [f"{name} {_number(value)}" for name, value in record["evaluation"].items()]
            best = ["best so far"] if record.get("best") else []
            self.message("  ".join(["evaluation", *_position(self.plan, record), *values, *best]))

    def message(self, text: str) -> None:
        self.view.message(text)

    def close(self) -> None:
        """Show the last record and stop; safe to call twice."""
        self._print_held()
        self._move_bars()
        self.view.stop()

    def _print_held(self) -> None:
        if self.view.plain and self._held:
            self.message(_line(self.plan, self.record, self.view.tasks[self._run].time_remaining))
        self._held = False

    def _move_bars(self) -> None:
        plan = self.plan
        epochs = math.ceil(plan.epochs)
        epoch = min(int(self.step / plan.steps_per_epoch), epochs - 1)
        first = epoch * plan.steps_per_epoch
        length = plan.total_steps - first if epoch == epochs - 1 else plan.steps_per_epoch
        for bar, name, done, total in (
            (self._epoch, f"epoch {epoch + 1}/{epochs}", self.step - first, length),
            (self._run, "run", self.step, plan.total_steps),
        ):
            steps = f"{int(done):,}/{round(total):,} steps"
            self.view.update(bar, description=name, completed=done, total=total, steps=steps)

    def _panel(self, bars: RenderableType, width: int) -> RenderableType:
        width, plan = min(width, _WIDEST), self.plan
        ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
        about = f"{ranks} · batch {plan.global_batch:,} · {plan.run}"
        parts = [Text(about, "dim", no_wrap=True, overflow="ellipsis"), Text(), bars]
        if self.record:
            parts += [Text(), self._values(width)]
        if self.last:
            parts += [Text(), self._evaluation()]
        title = Text(plan.title, "bold not dim")
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim", width=width)

    def _values(self, width: int) -> RenderableType:
        columns = 4 if width >= 110 else 3 if width >= 80 else 2
        table = Table.grid(padding=(0, 1))
        for _ in range(columns):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(min_width=width // columns - 17, no_wrap=True)
        values = _values_of(self.record) | {"elapsed": self._clock() - self._started}  # of this process
        cells: list[RenderableType] = []
        for key, (name, form, *_) in _SHOWN.items():
            if key not in values:
                continue
            alarming = values[key] > _ALARMING.get(key, math.inf) or not math.isfinite(values[key])
            text = _text(key, form, values[key], self.plan.rho, " → ")
            cells += [name, Text(text, "bold yellow" if alarming else "bold")]
        for start in range(0, len(cells), 2 * columns):
            table.add_row(*cells[start : start + 2 * columns])
        return table

    def _evaluation(self) -> RenderableType:
        last, best = self.last, self.best
        right = Column(justify="right", no_wrap=True)
        table = Table.grid(Column(no_wrap=True), right, right.copy(), padding=(0, 3))
        best_step = f"best: step {best['step']:,}" if best else ""
        table.add_row("evaluation", f"step {last['step']:,}", best_step, style="dim")
        metrics = last["evaluation"]
        for name in list(metrics)[:_METRICS]:
            value = Text(_number(metrics[name]), "bold green" if last is best else "")
            table.add_row(name, value, _number(best["evaluation"].get(name)) if best else "")
        if len(metrics) > _METRICS:
            table.add_row(Text(f"{len(metrics) - _METRICS} more in metrics.jsonl", "dim"))
        return table


def _line(plan: Plan, record: dict, left: float | None) -> str:
    """A training record on one line, in columns; fields that the algorithm lacks are omitted."""
    values = _values_of(record) | {"eta": left}
    texts = [
        _text(key, form, values[key], plan.rho, "→").ljust(width)
        for key, (_, _, form, width) in _SHOWN.items()
        if form and key in values and (values[key] or key not in ("skipped", "bad"))
    ]
    return "  ".join([*_position(plan, record), *texts]).rstrip()


def _text(key: str, form: str, value: float, rho: float | None, arrow: str) -> str:
    to_text = {"loss": _number, "grad_norm": _number, "eta": duration, "elapsed": duration}.get(key)
    return form.format(to_text(value) if to_text else value, rho="" if rho is None else f"{arrow}{rho:.2f}")


def _position(plan: Plan, record: dict) -> tuple[str, str]:
    """The step and epoch of a record, padded to the width of the last one."""
    total, epochs = f"{plan.total_steps}", f"{plan.epochs:.4g}"
    step, epoch = f"step {record['step']}/{total}", f"epoch {record['epoch']:.2f}/{epochs}"
    return step.ljust(len(f"step {total}/{total}")), epoch.ljust(len(f"epoch {plan.epochs:.2f}/{epochs}"))


def _values_of(record: dict) -> dict:
    """The values of a record that are not null, including those under "time"."""
    values = {**record.get("time", {}), **record}
    return {key: value for key, value in values.items() if value is not None}


def _number(x: float | None) -> str:
    """Four significant digits; – for null in metrics.jsonl."""
    if x is None:
        return "–"
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    return f"{x:#.4g}".rstrip(".") if 1e-3 <= abs(x) < 1e4 else f"{x:.2e}"
