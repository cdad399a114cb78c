"""Plain lines in a pipe, bars on a terminal, and what passes above them."""

import io
import logging
import sys
import threading

import pytest

from fastclip import terminal
from fastclip.terminal import View, console, progress
from tests.terminals import Terminal, on_terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_is_160_columns_wide_and_a_terminal_as_wide_as_it_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert console().width == 160
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert console().width == 70


def test_short_work_is_silent_and_long_work_speaks_now_and_then(capsys, clock):
    with progress("counting", "sheep") as update:
        for second in range(31):
            clock[0] = 1000.0 + second
            update(second, 30)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["counting: 2 of 30 sheep", "counting: 12 of 30 sheep", "counting: 22 of 30 sheep"]


def test_long_work_has_a_bar_on_a_terminal_after_two_seconds(monkeypatch, clock):
    shown = on_terminal(monkeypatch)
    with progress("counting [all]", "sheep") as update:
        update(1, 3000)
        clock[0] += 1.9
        update(1000, 3000)
        assert not shown.getvalue()
        clock[0] += 1
        update(1500, 3000)
        clock[0] += 10
        update(2000, 3000)
    for part in (
        "counting [all]",
        "50%",
        "1,500/3,000 sheep",
        "eta –",
        "67%",
        "2,000/3,000 sheep",
        "eta 20 s",
    ):
        assert part in shown.getvalue()
    assert sys.stderr is shown


def test_time_left_comes_from_the_speed_of_this_process_alone(clock):
    view = View(line_every=1.0)
    bar = view.add_bar()
    view.update(bar, completed=4000, total=4110)  # resumed at 4000
    assert view.tasks[bar].time_remaining is None
    clock[0] += 5
    view.update(bar, completed=4010)
    assert view.tasks[bar].time_remaining == pytest.approx(50)


def test_speed_counts_pauses_and_forgets_what_is_long_ago(clock):
    view, step = View(line_every=1.0), 0
    bar = view.add_bar()

    def steps(number, each):
        nonlocal step
        for _ in range(number):
            step, clock[0] = step + each, clock[0] + 1
            view.update(bar, completed=step, total=1e6)

    steps(501, each=1)
    clock[0] += 500  # an evaluation
    steps(1, each=1)
    assert view.tasks[bar].speed == pytest.approx(0.5, rel=0.01)
    steps(2000, each=10)
    assert view.tasks[bar].speed == pytest.approx(10)


def test_logs_pass_above_the_bars_and_go_back_to_their_stream(monkeypatch):
    stream = on_terminal(monkeypatch)
    handler = logging.StreamHandler(sys.stderr)  # bound before the view, as the command line does it
    logger = logging.getLogger("fastclip.test_terminal")
    logger.addHandler(handler)
    try:
        view = View(line_every=10.0, keep=True)
        view.add_bar("the bar")
        view.start()
        logger.warning("a [b]sample[/b] is left out")
        view.message("saved [it]")
        view.stop()
        shown = stream.getvalue()
        places = [shown.index(text) for text in ("a [b]sample[/b] is left out\n", "saved [it]\n")]
        assert places == sorted(places)
        assert places[-1] < shown.rindex("the bar")
        assert sys.stderr is stream
        logger.warning("after")
        assert stream.getvalue().endswith("after\n")
        assert handler.stream is stream
    finally:
        logger.removeHandler(handler)


def test_what_is_printed_into_a_file_stays_there(monkeypatch):
    shown = on_terminal(monkeypatch)
    monkeypatch.setattr(sys, "stdout", output := io.StringIO())
    view = View(line_every=10.0)
    view.start()
    print("a result")
    view.stop()
    assert output.getvalue() == "a result\n"
    assert "a result" not in shown.getvalue()


def test_nothing_is_drawn_from_a_thread(monkeypatch):
    on_terminal(monkeypatch)
    before, view = threading.active_count(), View(line_every=10.0)
    view.start()
    assert view.live.is_started
    assert threading.active_count() == before
    view.stop()


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_terminal_that_is_gone_raises_nothing(monkeypatch, kind):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := kind())
    view = View(line_every=10.0)
    view.add_bar("the bar")
    view.start()

    def gone(text):
        raise OSError(5, "Input/output error")

    stream.write = gone
    view.message("to nobody")
    view.show("to nobody")
    view.stop()
    assert sys.stderr is stream


@pytest.mark.parametrize(
    ("stream", "term", "plain"),
    [(Terminal, "xterm", False), (Terminal, "dumb", True), (io.StringIO, "xterm", True)],
)
def test_only_a_terminal_that_can_move_its_cursor_is_live(monkeypatch, stream, term, plain):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")  # asks for colours, not for moving pictures in a pipe
    assert View(line_every=10.0).plain == plain
