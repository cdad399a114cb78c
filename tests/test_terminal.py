"""Plain lines in a pipe, bars on a terminal, and messages above them."""

import ast
import io
import logging
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

import fastclip
from fastclip.terminal import LogFormatter, SafeConsole, View, console, progress, say
from tests.terminals import Terminal, on_terminal


def test_a_pipe_has_160_columns_and_a_terminal_its_own_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    with redirect_stdout(io.StringIO()):
        assert console().width == 160
    with redirect_stdout(Terminal()):
        assert console().width == 70


def test_progress_prints_nothing_for_two_seconds_then_a_line_every_ten(capsys, clock):
    with progress("counting", "sheep", clock=clock) as update:
        for second in range(31):
            clock.now = 1000.0 + second
            update(second, 30)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["2", "12", "22"]
    assert all(line.startswith("counting") and "30 sheep" in line for line in lines)


def test_progress_without_a_total_shows_its_title_alone(capsys, clock):
    with progress("counting", "sheep", clock=clock) as update:
        clock.now += 3
        update(0, 0)
    assert capsys.readouterr().err == "counting …\n"


def test_progress_draws_a_bar_on_a_terminal_after_two_seconds(monkeypatch, clock):
    shown = on_terminal(monkeypatch)
    with progress("counting [all]", "sheep", clock=clock) as update:
        update(1, 3000)
        clock.now += 1.9
        update(1000, 3000)
        assert not shown.getvalue()
        clock.now += 1
        update(1500, 3000)
        clock.now += 10
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


def test_time_left_is_estimated_from_the_speed_since_resuming(clock):
    view = View(line_every=1.0, clock=clock)
    bar = view.add_bar()
    view.update(bar, completed=4000, total=4110)  # resumed at 4000
    assert view.tasks[bar].time_remaining is None
    clock.now += 5
    view.update(bar, completed=4010)
    assert view.tasks[bar].time_remaining == pytest.approx(50)


def test_speed_includes_pauses_and_forgets_old_steps(clock):
    view, step = View(line_every=1.0, clock=clock), 0
    bar = view.add_bar()

    def steps(number, each):
        nonlocal step
        for _ in range(number):
            step, clock.now = step + each, clock.now + 1
            view.update(bar, completed=step, total=1e6)

    steps(501, each=1)
    clock.now += 500  # an evaluation
    steps(1, each=1)
    assert view.tasks[bar].speed == pytest.approx(0.5, rel=0.01)
    steps(2000, each=10)
    assert view.tasks[bar].speed == pytest.approx(10)


def test_logs_scroll_above_the_bars_and_return_to_their_stream(monkeypatch):
    stream = on_terminal(monkeypatch)
    handler = logging.StreamHandler(sys.stderr)  # bound before the view, as in the command line
    logger = logging.getLogger("fastclip.test_terminal")
    logger.addHandler(handler)
    try:
        view = View(line_every=10.0, keep=True)
        view.add_bar("the bar")
        view.start()
        logger.warning("a [b]sample[/b] is skipped")
        view.message("saved [it]")
        view.stop()
        shown = stream.getvalue()
        places = [shown.index(text) for text in ("a [b]sample[/b] is skipped\n", "saved [it]\n")]
        assert places == sorted(places)
        assert places[-1] < shown.rindex("the bar")
        assert sys.stderr is stream
        logger.warning("after")
        assert stream.getvalue().endswith("after\n")
        assert handler.stream is stream
    finally:
        logger.removeHandler(handler)


def test_output_redirected_to_a_file_stays_there(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    view = View(line_every=10.0, target=Console(file=terminal))
    with redirect_stdout(io.StringIO()) as output:
        view.start()
        print("a result")
        view.stop()
    assert output.getvalue() == "a result\n"
    assert "a result" not in terminal.getvalue()


def test_drawing_starts_no_thread(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    before, view = threading.active_count(), View(line_every=10.0, target=Console(file=Terminal()))
    view.start()
    assert view.live.is_started
    assert threading.active_count() == before
    view.stop()


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_closed_terminal_raises_nothing(monkeypatch, kind):
    monkeypatch.setenv("TERM", "xterm")
    stream, stderr = kind(), sys.stderr
    view = View(line_every=10.0, target=Console(file=stream))
    view.add_bar("the bar")
    view.start()
    writes = []

    def fail(text):
        writes.append(text)
        raise OSError(5, "Input/output error")

    stream.write = fail
    view.message("unseen")
    view.show("unseen")
    view.stop()
    assert writes
    assert sys.stderr is stderr


@pytest.mark.parametrize(
    ("stream", "term", "plain"),
    [(Terminal, "xterm", False), (Terminal, "dumb", True), (io.StringIO, "xterm", True)],
)
def test_only_a_terminal_that_can_move_its_cursor_is_live(monkeypatch, stream, term, plain):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours, but no live view in a pipe
    assert View(line_every=10.0, target=Console(file=stream())).plain == plain


EVIL = "a\x1b]0;owned\x9c\x1b[2J\u202e\udc80b [bold]c[/] :smile: [/d]"
SHOWN = r"a\x1b]0;owned\x9c\x1b[2J\u202e\udc80b [bold]c[/] :smile: [/d]"


def test_names_are_printed_without_control_characters(capsys):
    say(EVIL)
    say(EVIL, file=sys.stderr)
    printed = capsys.readouterr()
    assert printed.out == printed.err == SHOWN + "\n"


def test_tables_and_texts_show_names_literally(capsys):
    table = Table("name", show_header=False, box=None, pad_edge=False)
    table.add_row(EVIL)
    table.add_row(Text(EVIL))
    for shown in (table, EVIL, Text(EVIL)):
        console().print(shown)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [SHOWN] * 4


def test_messages_and_bars_show_names_literally():
    for terminal in (io.StringIO(), Terminal()):
        view = View(line_every=1, target=SafeConsole(file=terminal, width=120))
        view.message(EVIL)
        assert SHOWN in terminal.getvalue()
        assert "\x1b]0" not in terminal.getvalue()


def test_logs_show_names_and_errors_literally():
    record = logging.LogRecord("x", logging.WARNING, "", 0, "file %s", (EVIL,), None)
    assert LogFormatter("%(message)s").format(record) == f"file {SHOWN}"
    try:
        raise ValueError(EVIL)
    except ValueError:
        record.exc_info = sys.exc_info()
    text = LogFormatter("%(message)s").format(record)
    assert f"\nValueError: {SHOWN}" in text
    assert "\x1b" not in text


def test_no_command_prints_past_say():
    """Except JSON and YAML, which escape by themselves and must stay exact; and watcher.py, on its own."""
    exact = ("dumps", "study_text", "safe_dump")
    for file in Path(fastclip.__file__).parent.rglob("*.py"):
        if file.name in ("terminal.py", "watcher.py", "cli.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                what = ast.unparse(node)
                assert any(name in what for name in exact) or what == "print(text, end='')", (file, what)
