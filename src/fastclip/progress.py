"""A progress bar for anything over two seconds: live on a terminal, a plain line now and then in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET = 2.0  # seconds before anything is shown
_EVERY = 10.0  # seconds between plain lines


@contextmanager
def progress(title: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Gives `update(done, total)`; what takes less than two seconds shows nothing."""
    if sys.stderr.isatty():
        yield from _live(title, unit)
    else:
        yield _plain(title, unit)


def _live(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task, started = bar.add_task(title, total=None), time.monotonic()

    def update(done: int, total: int) -> None:
        if time.monotonic() - started > _QUIET and not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()


def _plain(title: str, unit: str) -> Callable[[int, int], None]:
    last = time.monotonic() + _QUIET - _EVERY

    def update(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _EVERY:
            last = time.monotonic()
            print(f"{title}: {done:,} of {total:,} {unit}".rstrip(), file=sys.stderr, flush=True)

    return update
