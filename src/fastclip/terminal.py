"""What people see while they wait: a live view at the foot of a terminal, plain lines in a pipe.

Nothing is drawn from a background thread: no lock of rich may be held when loader workers fork.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from fastclip.text import duration


def console(stderr: bool = False) -> Console:
    """As wide as the terminal, or 160 columns in a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 160)


@contextmanager
def progress(title: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Gives `update(done, total)`; what takes less than two seconds shows nothing."""
    view = View(line_every=10.0, first=2.0)
    bar = view.add_bar(title)

    def update(done: int, total: int) -> None:
        if view.due():
            view.update(bar, completed=done, total=total, steps=f"{done:,}/{total:,} {unit}")
            view.show(f"{title}: {done:,} of {total:,} {unit}".rstrip())

    try:
        yield update
    finally:
        view.stop()


class View(Progress):
    """Bars, framed by anything else, that stay at the foot of stderr; messages, prints and logs pass above.

    In a pipe or on a dumb terminal it is `plain`: messages are printed and nothing is drawn. A terminal
    that has gone away raises nothing.

    Args:
        frame: from the bars and the terminal's width to the whole picture.
        every: seconds between pictures.
        line_every: seconds between plain lines.
        first: seconds until the first picture or line is due; by default as long as between any two.
        keep: leave the last picture on the terminal.
    """

    def __init__(
        self,
        frame: Callable[[RenderableType, int], RenderableType] = lambda bars, width: bars,
        *,
        every: float = 0.5,
        line_every: float,
        first: float | None = None,
        keep: bool = False,
    ):
        self._frame, self._target = frame, console(stderr=True)
        self.plain = not (sys.stderr.isatty() and self._target.is_interactive)
        self._interval = line_every if self.plain else every
        self._next = time.monotonic() + (self._interval if first is None else first)
        self._streams: dict[TextIO, TextIO] = {}
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, complete_style="cyan"),
            TextColumn("{task.percentage:.0f}%", justify="right"),
            TextColumn("{task.fields[steps]}", "dim", justify="right"),
            _Eta(Column(no_wrap=True)),
            console=self._target,
            auto_refresh=False,
            speed_estimate_period=math.inf,  # rich keeps the last 1,000 updates
            get_time=time.monotonic,
            transient=not keep,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays there
            disable=self.plain,
            expand=True,
        )

    def add_bar(self, title: str = "", visible: bool = True) -> TaskID:
        """To be moved with `update`: `steps` says in words how far it is, `eta` replaces rich's estimate."""
        return self.add_task(title, total=1.0, visible=visible, steps="", eta=None)

    def due(self) -> bool:
        """Whether it is time for a new picture or line."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._interval
        return True

    def show(self, line: str) -> None:
        """Draw again; in a pipe, print the line."""
        if self.plain:
            self.message(line)
        else:
            self.start()
            self.refresh()

    def message(self, text: str) -> None:
        """A line above the bars."""
        with suppress(OSError):
            if self.plain:
                print(text, file=sys.stderr, flush=True)
            else:
                self.console.print(Text(text))

    def start(self) -> None:
        if self.plain or self.live.is_started:
            return
        before = sys.stdout, sys.stderr
        with suppress(OSError):
            super().start()
        self._streams = dict(zip(before, (sys.stdout, sys.stderr), strict=True))
        _move_logs(self._streams)

    def stop(self) -> None:
        if not self.plain:  # there is nothing to end, and older versions of rich print an empty line
            with suppress(OSError):
                super().stop()  # draws once more
        _move_logs({new: old for old, new in self._streams.items()})

    def refresh(self) -> None:
        with suppress(OSError):
            super().refresh()

    def get_renderable(self) -> RenderableType:
        return self._frame(self.make_tasks_table(self.tasks), self._target.width)


class _Eta(ProgressColumn):
    def render(self, task: Task) -> Text:
        eta = task.fields["eta"]
        return Text(f"eta {duration(task.time_remaining)}" if eta is None else eta, justify="right")


def _move_logs(streams: dict[TextIO, TextIO]) -> None:
    """Make log handlers that hold one stream write to another."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", ())}:
        if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
            handler.setStream(streams[handler.stream])
