"""What a person sees of a study while it runs: a table that stays in place, plain lines in a pipe."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

State = Literal["waiting", "running", "done", "failed", "stopped"]
_REFRESH = 1.0  # seconds between two pictures on a terminal
_EVERY = 60.0  # seconds between two plain lines about what runs
_MOST = 12  # runs that are shown at a time


@dataclass
class _Row:
    state: State = "waiting"
    folder: Path = Path()
    epochs: float = 1.0
    since: float = 0.0
    before: float | None = None
    """The share that was done when it was started; None until it is known."""
    scoring: bool = False
    """It is trained, and its tests are scored."""
    step: int = 0
    share: float = 0.0
    seconds: float | None = None
    """What it took, once it is done; None if it was done before."""

    def look(self) -> None:
        """How far it is, by the last record of its metrics."""
        record = _last_record(self.folder / "metrics.jsonl")
        if record is not None:
            self.step, self.share = int(record["step"]), min(1.0, record["epoch"] / self.epochs)
        self.before = self.share if self.before is None else min(self.before, self.share)

    def left(self, now: float) -> float | None:
        """Seconds until its end, if it goes on like this."""
        gone = self.share - (self.before or 0.0)
        return (now - self.since) * (1 - self.share) / gone if gone > 0 else None


class Board:
    """All runs of a study by their names, tuning's too; words go to stderr.

    with Board(names, at_once=2) as board:
        board.started(name, folder, epochs)
        board.done(name, seconds)
    """

    def __init__(self, names: list[str], at_once: int):
        self.rows = {name: _Row() for name in names}
        self.at_once, self.console = at_once, Console(stderr=True)
        self._refreshed = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Board:
        if sys.stderr.isatty() and self.console.is_interactive:
            self._live = Live(self.render(), console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, name: str, folder: Path, epochs: float) -> None:
        self.rows[name] = row = _Row("running", folder, epochs, time.monotonic())
        row.look()
        self._tell(f"started {name}" + (f", goes on after step {row.step:,}" if row.step else ""))

    def scoring(self, name: str) -> None:
        self.rows[name].scoring = True

    def done(self, name: str, seconds: float | None) -> None:
        """It is finished; without seconds, since an earlier time."""
        self.rows[name].state, self.rows[name].seconds = "done", seconds
        if seconds is not None:
            self._tell(f"done {name}, after {duration(seconds)}")

    def failed(self, name: str, lines: list[str]) -> None:
        """With the last lines of what it printed."""
        self.rows[name].state = "failed"
        self.message("\n  ".join([f"failed {name}:", *lines]))

    def stopped(self, name: str) -> None:
        self.rows[name].state = "stopped"
        self.message(f"stopped {name}: it saved, and can go on")

    def message(self, text: str) -> None:
        """A line, above the table; a terminal that is gone stops no study."""
        with suppress(OSError):
            if self._live is None:
                print(text, file=sys.stderr, flush=True)
            else:
                self.console.print(Text(text))

    def refresh(self) -> None:
        """Draw again, or print a line, if it is time."""
        now = time.monotonic()
        if now - self._refreshed < (_EVERY if self._live is None else _REFRESH):
            return
        self._refreshed = now
        for row in self.rows.values():
            if row.state == "running":
                row.look()
        if self._live is None:
            self.message(self.line(now))
        else:
            with suppress(OSError):
                self._live.update(self.render(), refresh=True)

    def line(self, now: float) -> str:
        """How the study stands, on one line."""
        running = [
            f"{name} {'is scored' if row.scoring else format(row.share, '.0%')}"
            for name, row in self._all("running")
        ]
        more = f" and {len(running) - 4} more" if len(running) > 4 else ""
        parts = [self._counts(), f"running: {', '.join(running[:4])}{more}" if running else ""]
        left = self._left(now)
        return "; ".join([*filter(None, parts), *([f"about {duration(left)} left"] if left else [])])

    def render(self) -> RenderableType:
        """The picture for a terminal: all, and each that runs."""
        now = time.monotonic()
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_column(ratio=1)
        for _ in ("step", "share", "left"):
            table.add_column(justify="right", no_wrap=True)
        done = sum(row.share if row.state == "running" else row.state == "done" for row in self.rows.values())
        share, left = done / max(1, len(self.rows)), self._left(now)
        bar = ProgressBar(total=1.0, completed=share, complete_style="green")
        table.add_row(Text(self._counts(), "bold"), bar, "", f"{share:.0%}", f"eta {duration(left):>6}")
        running = list(self._all("running"))
        for name, row in running[:_MOST]:
            bar = ProgressBar(total=1.0, completed=row.share, complete_style="cyan")
            step = "scoring" if row.scoring else f"step {row.step:,}"
            eta = "" if row.scoring else f"eta {duration(row.left(now)):>6}"
            table.add_row(name, bar, Text(step, "dim"), f"{row.share:.0%}", eta)
        more = [Text(f"and {len(running) - _MOST} more", "dim")] if len(running) > _MOST else []
        return Group(table, *more)

    def _counts(self) -> str:
        failed = len(list(self._all("failed")))
        done = f"{len(list(self._all('done')))} of {len(self.rows)} runs done"
        return done + (f", {failed} failed" if failed else "")

    def _left(self, now: float) -> float | None:
        """Seconds for all that is left: by what finished runs took, or by how fast the present ones are."""
        took = [row.seconds for row in self.rows.values() if row.seconds is not None]
        for _, row in self._all("running"):
            left = row.left(now)
            took += [now - row.since + left] if left is not None else []
        if not took:
            return None
        runs = len(list(self._all("waiting"))) + sum(1 - row.share for _, row in self._all("running"))
        return sum(took) / len(took) * runs / min(self.at_once, max(1, len(self.rows)))

    def _all(self, state: State) -> list[tuple[str, _Row]]:
        return [(name, row) for name, row in self.rows.items() if row.state == state]

    def _tell(self, text: str) -> None:
        """What a person at a terminal sees in the table."""
        if self._live is None:
            self.message(text)


def duration(seconds: float | None) -> str:
    """45 s, 2 min, 3.5 h; – for what is not known."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _last_record(path: Path) -> dict | None:
    """The last whole line with a step and an epoch."""
    with suppress(OSError):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 10_000))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                return {"step": int(record["step"]), "epoch": float(record["epoch"])}
    return None
