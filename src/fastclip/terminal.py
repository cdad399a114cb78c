"""Progress of long work: a live view at the bottom of a terminal, plain lines in a pipe.

Nothing is drawn from a background thread: no lock of rich may be held when loader workers fork.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from fastclip.text import duration, printable


def say(text: object = "", *, end: str = "\n", file: IO[str] | None = None) -> None:
    """Print text that may hold names or captions: without control characters."""
    print(printable(text), end=end, file=file, flush=True)


class LogFormatter(logging.Formatter):
    """Formats log records, which may quote names and captions, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class SafeConsole(Console):
    """A console that takes every text literally: no markup, no emoji codes, no control characters."""

    def __init__(self, **options: Any):
        super().__init__(**{"markup": False, "emoji": False} | options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or 160 columns in a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return SafeConsole(stderr=stderr, width=None if stream.isatty() else 160)


@contextmanager
def progress(
    title: str, unit: str = "", *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Yield `update(done, total)`; nothing is shown for the first two seconds. A total of 0 is unknown."""
    view = View(line_every=10.0, first=2.0, clock=clock)
    bar = view.add_bar(title)

    def update(done: int, total: int) -> None:
        if view.due():
            steps, line = f"{done:,}/{total:,} {unit}", f"{title}: {done:,} of {total:,} {unit}"
            view.update(bar, completed=done, total=total or None, steps=steps if total else "")
            view.show(line.rstrip() if total else f"{title} …")

    try:
        yield update
    finally:
        view.stop()


class View(Progress):
    """Progress bars at the bottom of stderr; messages, prints and logs scroll above them.

    In a pipe or on a dumb terminal it is `plain`: messages are printed and nothing is drawn. A terminal
    that has been closed raises no errors.

    Args:
        frame: maps the bars and the terminal's width to what is drawn.
        every: seconds between redraws.
        line_every: seconds between plain lines.
        first: seconds until the first redraw or line; default: as long as between any two.
        keep: leave the last drawing on the terminal.
        target: the console to draw on; default: stderr.
        clock: the current time in seconds.
    """

    def __init__(
        self,
        frame: Callable[[RenderableType, int], RenderableType] = lambda bars, width: bars,
        *,
        every: float = 0.5,
        line_every: float,
        first: float | None = None,
        keep: bool = False,
        target: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._frame, self._target, self._clock = frame, target or console(stderr=True), clock
        self.plain = not (self._target.file.isatty() and self._target.is_interactive)
        self._interval = line_every if self.plain else every
        self._next = clock() + (self._interval if first is None else first)
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
            get_time=clock,
            transient=not keep,
            redirect_stdout=sys.stdout.isatty(),  # output to a file stays there
            disable=self.plain,
            expand=True,
        )

    def add_bar(self, title: str = "", visible: bool = True) -> TaskID:
        """A bar to move with `update`: `steps` is the text beside it, `eta` replaces rich's estimate."""
        return self.add_task(title, total=1.0, visible=visible, steps="", eta=None)

    def due(self) -> bool:
        """Whether it is time to redraw or print a line."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._interval
        return True

    def show(self, line: str) -> None:
        """Redraw; in a pipe, print the line."""
        if self.plain:
            self.message(line)
        else:
            self.start()
            self.refresh()

    def message(self, text: str) -> None:
        """Print a line above the bars."""
        with suppress(OSError):
            if self.plain:
                say(text, file=self._target.file)
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
        if not self.plain:  # nothing was started, and older versions of rich print an empty line
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
    """Redirect log handlers from one stream to another."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", ())}:
        if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
            handler.setStream(streams[handler.stream])
