"""What a person sees of a run: bars and a table that stay in place on a terminal, plain lines in a pipe."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_REFRESH = 0.5  # seconds between two pictures on a terminal; one takes some 5 ms of the training thread
_EVERY = 2.0  # seconds between two plain lines
_MEMORY = 300.0  # seconds after which a speed counts 1/e in the estimate of the time left
_WAITING = 0.2  # share of the time spent waiting for data from which it is worth a colour
_WIDEST = 120  # columns; wider pictures are harder to read
_METRICS = 6  # of an evaluation, on the terminal


@dataclass(frozen=True)
class Plan:
    """What does not change during a run."""

    run: Path
    """The run's folder."""
    title: str
    """Such as "fastclip-v3 · vit-emoji · emoji"."""
    total_steps: int
    steps_per_epoch: float
    global_batch: int
    rho: float | None
    """What the radius settles at, if the algorithm has it."""
    workers: int
    """Processes that train."""
    start_step: int = 0
    """Steps that were done before this process started."""

    @property
    def epochs(self) -> float:
        return self.total_steps / self.steps_per_epoch


class Speed:
    """Steps a second of this process; a pause for an evaluation counts, steps before a resume do not."""

    def __init__(self) -> None:
        self._seconds = self._steps = 0.0  # both fade at the same pace: their ratio is a weighted mean
        self._last: tuple[int, float] | None = None

    def update(self, step: int, now: float) -> None:
        if self._last is not None:
            steps, seconds = step - self._last[0], now - self._last[1]
            fade = math.exp(-seconds / _MEMORY)
            self._steps, self._seconds = fade * self._steps + steps, fade * self._seconds + seconds
        self._last = step, now

    def seconds_for(self, steps: float) -> float | None:
        """None as long as nothing is known."""
        return steps * self._seconds / self._steps if self._steps > 0 else None


class Display:
    """What both displays do: follow the steps and their speed."""

    def __init__(self, plan: Plan):
        self.plan, self.step, self.speed = plan, plan.start_step, Speed()
        self._refreshed = -math.inf

    def tick(self, step: int) -> None:
        """After every step: next to nothing, but for a new picture twice a second."""
        self.step = step
        now = time.monotonic()
        if now - self._refreshed >= _REFRESH:
            self._refreshed = now
            self.speed.update(step, now)
            self.refresh()

    def refresh(self) -> None:
        """Draw again, where there is a picture."""

    def log(self, record: dict) -> None:
        raise NotImplementedError

    def evaluated(self, record: dict) -> None:
        raise NotImplementedError

    def message(self, text: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def open_display(plan: Plan, evaluations: list[dict]) -> Display:
    """The display that suits stderr; `evaluations` were made before this process started."""
    console = Console(stderr=True)
    if sys.stderr.isatty() and console.is_interactive:  # a dumb terminal is not
        return LiveDisplay(plan, console, evaluations)
    return PlainDisplay(plan)


class PlainDisplay(Display):
    """One line for a record, but not more often than every two seconds; the first and the last always."""

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self._printed = -math.inf
        self._held: dict | None = None

    def log(self, record: dict) -> None:
        now = time.monotonic()
        self.speed.update(record["step"], now)
        self._held = record
        if now - self._printed >= _EVERY or record["step"] >= self.plan.total_steps:
            self._printed = now
            self._print_held()

    def evaluated(self, record: dict) -> None:
        self._print_held()
        values = [f"{name} {_number(value)}" for name, value in record["evaluation"].items()]
        best = ["best so far"] if record.get("best") else []
        self.message("  ".join(["evaluation", *_position(self.plan, record), *values, *best]))

    def message(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._print_held()

    def _print_held(self) -> None:
        if self._held is not None:
            record, self._held = self._held, None
            self.message(plain_line(self.plan, record, self.speed))


def plain_line(plan: Plan, record: dict, speed: Speed) -> str:
    """A training record on one line; fields keep their places, and those an algorithm lacks are left out."""
    goal = "" if plan.rho is None else f"→{plan.rho:.2f}"
    shown: dict[str, tuple[int, Callable]] = {  # width, text
        "loss": (14, lambda x: f"loss {_number(x)}"),
        "tau": (10, lambda x: f"tau {x:#.3g}"),
        "gamma": (11, lambda x: f"gamma {x:#.3g}"),
        "lr": (10, lambda x: f"lr {x:.1e}"),
        "radius": (17, lambda x: f"radius {x:.2f}{goal}"),
        "unvisited": (14, lambda x: f"unvisited {x:.0%}"),
        "samples_per_second": (16, lambda x: f"{x:,.0f} samples/s"),
        "data_wait": (9, lambda x: f"data {x:.0%}"),
        "eta": (9, lambda x: f"eta {_duration(x)}"),
        "skipped": (0, lambda x: f"skipped {x}" if x else ""),
        "bad": (0, lambda x: f"bad {x}" if x else ""),
    }
    left = speed.seconds_for(plan.total_steps - record["step"])
    values = _given(record) | {"eta": left}
    texts = [show(values[key]).ljust(width) for key, (width, show) in shown.items() if key in values]
    return "  ".join([*_position(plan, record), *filter(None, texts)]).rstrip()


class LiveDisplay(Display):
    """Bars and values that stay at the foot of the terminal; messages, prints and logs pass above them.

    It draws inside `tick` and `log`, not from a thread: no lock of rich is held when data workers fork.
    """

    def __init__(self, plan: Plan, console: Console, evaluations: list[dict]):
        super().__init__(plan)
        self.console, self._started = console, time.monotonic()
        self.record: dict = {}
        self.last: dict | None = None
        self.best: dict | None = None
        for record in evaluations:
            self._remember(record)
        self._live = Live(
            console=console,
            auto_refresh=False,
            get_renderable=lambda: self.render(console.width),
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays there
        )
        streams = sys.stdout, sys.stderr
        self._live.start(refresh=True)
        self._moved = _move_logs(dict(zip(streams, (sys.stdout, sys.stderr), strict=True)))

    def refresh(self) -> None:
        self._live.refresh()

    def log(self, record: dict) -> None:
        self.record = record
        self.tick(record["step"])

    def evaluated(self, record: dict) -> None:
        self._remember(record)
        self.tick(record["step"])

    def message(self, text: str) -> None:
        self.console.print(Text(text))

    def close(self) -> None:
        try:
            self._live.stop()  # draws once more
        finally:
            for handler, stream in self._moved:
                handler.setStream(stream)
            self._moved = []

    def render(self, width: int) -> RenderableType:
        """The picture for a terminal of this many columns."""
        width = min(width, _WIDEST)
        plan = self.plan
        workers = f"{plan.workers} worker{'s' * (plan.workers > 1)}"
        about = Text(f"{workers} · batch {plan.global_batch:,} · {plan.run}", "dim")
        about.no_wrap, about.overflow = True, "ellipsis"
        parts: list[RenderableType] = [about, Text(), self._bars()]
        if self.record:
            parts += [Text(), self._values(width)]
        if self.last is not None:
            parts += [Text(), self._evaluation(self.last)]
        title = Text(plan.title, "bold not dim")
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim", width=width)

    def _bars(self) -> RenderableType:
        plan = self.plan
        epochs = math.ceil(round(plan.epochs, 6))  # 3.0000000000000004 are three
        epoch = min(int(self.step / plan.steps_per_epoch), epochs - 1)
        first = epoch * plan.steps_per_epoch
        bars = Table.grid(padding=(0, 2), expand=True)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        for _ in ("share", "steps", "eta"):
            bars.add_column(justify="right", no_wrap=True)
        length = min(plan.steps_per_epoch, plan.total_steps - first)
        for name, done, total in (
            (f"epoch {epoch + 1}/{epochs}", self.step - first, length),
            ("run", self.step, plan.total_steps),
        ):
            left = self.speed.seconds_for(total - done)
            bars.add_row(
                name,
                ProgressBar(total=total, completed=done, complete_style="cyan"),
                f"{done / total:.0%}",
                Text(f"{int(done):,}/{round(total):,} steps", "dim"),
                f"eta {_duration(left):>6}",
            )
        return bars

    def _values(self, width: int) -> RenderableType:
        columns = 4 if width >= 100 else 3 if width >= 72 else 2
        goal = "" if self.plan.rho is None else f" → {self.plan.rho:.2f}"
        shown: dict[str, tuple[str, Callable]] = {  # name, text
            "loss": ("loss", _number),
            "tau": ("temperature τ", lambda x: f"{x:#.3g}"),
            "gamma": ("inner rate γ", lambda x: f"{x:#.3g}"),
            "radius": ("radius → ρ", lambda x: f"{x:.2f}{goal}"),
            "lr": ("learning rate", lambda x: f"{x:.2e}"),
            "grad_norm": ("gradient norm", _number),
            "unvisited": ("unvisited", lambda x: f"{x:.1%}"),
            "samples_per_second": ("samples/s", lambda x: f"{x:,.0f}"),
            "data_wait": ("data wait", lambda x: f"{x:.0%}"),
            "skipped": ("skipped", lambda x: f"{x:,}"),
            "bad": ("bad samples", lambda x: f"{x:,}"),
            "elapsed": ("elapsed", _duration),
        }
        elapsed = time.monotonic() - self._started  # of this process
        values = _given(self.record) | {"elapsed": elapsed}
        cells = [
            (name, Text(show(values[key]), "bold yellow" if _alarming(key, values[key]) else "bold"))
            for key, (name, show) in shown.items()
            if key in values
        ]
        table = Table.grid(padding=(0, 2))
        for _ in range(columns):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(min_width=width // columns - 17, no_wrap=True)
        for start in range(0, len(cells), columns):
            table.add_row(*(part for cell in cells[start : start + columns] for part in cell))
        return table

    def _evaluation(self, last: dict) -> RenderableType:
        best = self.best or {}
        table = Table.grid(padding=(0, 3))
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        heads = "evaluation", f"step {last['step']:,}", f"best: step {best['step']:,}" if best else ""
        table.add_row(*heads, style="dim")
        metrics = last["evaluation"]
        for name in list(metrics)[:_METRICS]:
            value = Text(_number(metrics[name]), "bold green" if last is best else "")
            table.add_row(name, value, _number(best["evaluation"].get(name)) if best else "")
        if len(metrics) > _METRICS:
            table.add_row(Text(f"{len(metrics) - _METRICS} more in metrics.jsonl", "dim"))
        return table

    def _remember(self, record: dict) -> None:
        self.last = record
        if record.get("best"):
            self.best = record


def _move_logs(streams: dict[TextIO, TextIO]) -> list[tuple[logging.StreamHandler, TextIO]]:
    """Make log handlers that hold an old stream write to the new one; gives what there was, to undo it."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    moved = []
    for handler in {h for logger in loggers for h in getattr(logger, "handlers", ())}:
        if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
            moved.append((handler, handler.stream))
            handler.setStream(streams[handler.stream])
    return moved


def _position(plan: Plan, record: dict) -> tuple[str, str]:
    """Where a record was made, padded to the width of the last one."""
    total, epochs = f"{plan.total_steps}", f"{plan.epochs:.4g}"
    step, epoch = f"step {record['step']}/{total}", f"epoch {record['epoch']:.2f}/{epochs}"
    return step.ljust(len(f"step {total}/{total}")), epoch.ljust(len(f"epoch {plan.epochs:.2f}/{epochs}"))


def _given(record: dict) -> dict:
    """The values that the algorithm has, those of time among them."""
    values = {**record.get("time", {}), **record}
    return {key: value for key, value in values.items() if value is not None}


def _alarming(key: str, value: float) -> bool:
    """What deserves a colour: time lost, steps lost, samples lost, and what is not a number."""
    limit = {"data_wait": _WAITING, "skipped": 0, "bad": 0}.get(key, math.inf)
    return value > limit or not math.isfinite(value)


def _number(x: float | None) -> str:
    """Four digits; – for what metrics.jsonl holds as null."""
    if x is None:
        return "–"
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    return f"{x:#.4g}".rstrip(".") if 1e-3 <= abs(x) < 1e4 else f"{x:.2e}"


def _duration(seconds: float | None) -> str:
    """The two largest units: 45s, 2m10s, 3h05m, 2d04h."""
    if seconds is None:
        return "–"
    s = round(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if s >= size:
            return f"{s // size}{unit}{s % size // part:02d}{below}"
    return f"{s}s"
