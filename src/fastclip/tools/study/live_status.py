"""Progress of a running study: live bars on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.progress import TaskID
from rich.text import Text

from fastclip.run.folder import METRICS
from fastclip.run.metrics_file import last_record
from fastclip.terminal import View
from fastclip.text import duration

State = Literal["waiting", "running", "done", "failed", "stopped"]
_MOST = 12  # bars of runs


@dataclass
class _Row:
    bar: TaskID
    state: State = "waiting"
    folder: Path = Path()
    epochs: float = 1.0
    scoring: bool = False
    """It is trained and being scored."""
    step: int = 0
    share: float = 0.0
    seconds: float | None = None
    """The time it took; None if it is not done, or was done before."""

    def update(self) -> None:
        """Read the step from the last record of the run's metrics."""
        if record := last_record(self.folder / METRICS):
            self.step, self.share = record["step"], min(1.0, record["epoch"] / self.epochs)


class LiveStatus:
    """Shows all runs of a study, including tuning runs, on stderr.

    with LiveStatus(names, at_once=2) as status:
        status.started(name, folder, epochs)
        status.done(name, seconds)

    Args:
        names: of the runs.
        at_once: how many run in parallel.
        target: the console to draw on; default: stderr.
        clock: the current time in seconds.
    """

    def __init__(
        self,
        names: list[str],
        at_once: int,
        *,
        target: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.rows: dict[str, _Row] = {}
        self.at_once = at_once
        self.view = View(self._frame, every=1.0, line_every=60.0, target=target, clock=clock)
        self._all = self.view.add_bar()
        self.rows = {name: _Row(self.view.add_bar(name, visible=False)) for name in names}

    def __enter__(self) -> LiveStatus:
        self._move_bars()
        self.view.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.view.stop()

    def started(self, name: str, folder: Path, epochs: float) -> None:
        self.rows[name] = row = _Row(self.rows[name].bar, "running", folder, epochs)
        row.update()
        self.view.update(row.bar, completed=max(row.share, 1e-9))  # rich estimates from the first progress
        self._log(f"started {name}" + (f", resumes after step {row.step:,}" if row.step else ""))

    def scoring(self, name: str) -> None:
        self.rows[name].scoring = True

    def done(self, name: str, seconds: float | None) -> None:
        """Without seconds, it was done before."""
        self.rows[name].state, self.rows[name].seconds = "done", seconds
        if seconds is not None:
            self._log(f"done {name}, after {duration(seconds)}")

    def failed(self, name: str, lines: list[str]) -> None:
        """With the last lines of its log."""
        self.rows[name].state = "failed"
        self.message("\n  ".join([f"failed {name}:", *lines]))

    def stopped(self, name: str) -> None:
        self.rows[name].state = "stopped"
        self.message(f"stopped {name}: saved, and can resume")

    def message(self, text: str) -> None:
        """Print a line above the bars; a closed terminal raises no error."""
        self.view.message(text)

    def refresh(self) -> None:
        """Redraw, or print a line, if it is due."""
        if self.view.due():
            for row in self._in("running").values():
                row.update()
            self._move_bars()
            self.view.show(self.line())

    def line(self) -> str:
        """The state of the study in one line."""
        running = [
            f"{name} {'scoring' if row.scoring else format(row.share, '.0%')}"
            for name, row in self._in("running").items()
        ]
        more = f" and {len(running) - 4} more" if len(running) > 4 else ""
        parts = [self._counts(), f"running: {', '.join(running[:4])}{more}" if running else ""]
        left = self._left()
        return "; ".join([*filter(None, parts), *([f"about {duration(left)} left"] if left else [])])

    def _move_bars(self) -> None:
        running = list(self._in("running").values())
        for row in self.rows.values():
            steps, eta = ("scoring", "") if row.scoring else (f"step {row.step:,}", None)
            visible = row in running[:_MOST]
            self.view.update(row.bar, completed=row.share, steps=steps, eta=eta, visible=visible)
        done, eta = len(self._in("done")) + sum(row.share for row in running), f"eta {duration(self._left())}"
        total = max(1, len(self.rows))
        self.view.update(self._all, completed=done, total=total, description=self._counts(), eta=eta)

    def _frame(self, bars: RenderableType, width: int) -> RenderableType:
        more = len(self._in("running")) - _MOST
        return Group(bars, Text(f"and {more} more", "dim")) if more > 0 else bars

    def _counts(self) -> str:
        failed = len(self._in("failed"))
        done = f"{len(self._in('done'))} of {len(self.rows)} runs done"
        return done + (f", {failed} failed" if failed else "")

    def _left(self) -> float | None:
        """Estimated seconds left, from the time of finished runs and the speed of running ones."""
        running = self._in("running").values()
        speeds = [self.view.tasks[row.bar].speed for row in running]  # runs per second
        took = [row.seconds for row in self.rows.values() if row.seconds] + [
            1 / speed for speed in speeds if speed
        ]
        runs = len(self._in("waiting")) + sum(1 - row.share for row in running)
        return sum(took) / len(took) * runs / min(self.at_once, len(self.rows)) if took else None

    def _in(self, state: State) -> dict[str, _Row]:
        return {name: row for name, row in self.rows.items() if row.state == state}

    def _log(self, text: str) -> None:
        """Print an event that a terminal shows in the bars."""
        if self.view.plain:
            self.message(text)
