"""What is told of a study while it runs."""

import io
import json

import pytest
from rich.console import Console

from fastclip.tools.study.live_status import LiveStatus
from tests.terminals import on_terminal


@pytest.fixture
def status(monkeypatch):
    """With a clock of its own, `now`."""
    monkeypatch.setattr(LiveStatus, "now", 100.0, raising=False)
    status = LiveStatus.__new__(LiveStatus)
    monkeypatch.setattr("fastclip.terminal.time.monotonic", lambda: status.now)
    status.__init__(["a", "b", "c", "d"], at_once=2)
    return status


def write(folder, *records):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "epoch": epoch}) for step, epoch in records]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99']))
    return folder


def drawn(status):
    console = Console(width=100, record=True, file=io.StringIO())
    status._move_bars()
    console.print(status.view.get_renderable())
    return console.export_text()


def test_a_pipe_gets_a_line_for_each_event(tmp_path, status, capsys):
    with status:
        status.done("a", seconds=None)
        status.started("b", tmp_path, 4)
        status.started("c", write(tmp_path / "c", (7, 1.0)), 4)
        status.done("b", seconds=130)
        status.failed("c", ["no memory", "(exit code 1)"])
    out, told = capsys.readouterr()
    assert not out
    assert told.splitlines() == [
        "started b", "started c, goes on after step 7", "done b, after 2 min 10 s",
        "failed c:", "  no memory", "  (exit code 1)",
    ]  # fmt: skip


def test_a_line_now_and_then_says_how_far_it_is(tmp_path, status, capsys):
    with status:
        status.started("a", write(tmp_path / "a", (10, 1.0)), 4)
        status.now += 30
        status.refresh()
        write(tmp_path / "a", (10, 1.0), (20, 2.0))
        status.now += 70
        status.refresh()
        status.refresh()
    told = capsys.readouterr().err.splitlines()[1:]
    # a quarter took 100 s: another 200 s for this run; and 3 runs of 400 s two at once
    assert told == ["0 of 4 runs done; running: a 50%; about 11 min 40 s left"]


def test_a_terminal_gets_a_table_of_what_runs(tmp_path, status):
    status.done("d", seconds=None)
    status.started("a", write(tmp_path / "a", (1500, 2.0)), 4)
    text = drawn(status)
    assert "1 of 4 runs done" in text
    assert "step 1,500" in text
    assert "50%" in text
    status.failed("b", [])
    status.scoring("a")
    text = drawn(status)
    assert "1 failed" in text
    assert "scoring" in text
    assert "step 1,500" not in text


def test_a_terminal_shows_the_bars_in_place_and_failures_above(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("fastclip.terminal.time.monotonic", lambda: now[0])
    shown = on_terminal(monkeypatch, width=100)
    names = [f"[{i}]" for i in range(20)]
    with LiveStatus(names, at_once=15) as status:
        status.failed("[0]", ["no memory"])
        for name in names[1:15]:
            status.started(name, tmp_path / name, 4)
        for name in names[1:15]:
            write(tmp_path / name, (10, 1.0))
        status.scoring("[2]")
        now[0] += 100
        status.refresh()
        text = drawn(status)
        assert "and 2 more" in text
        lines = {line.split()[0]: line for line in text.splitlines()}
        assert lines["0"].startswith("0 of 20 runs done, 1 failed")
        assert "eta" in lines["0"]
        assert "eta –" not in lines["0"]
        assert "25% step 10 eta 5 min" in " ".join(lines["[1]"].split())  # a quarter took 100 s
        assert lines["[2]"].rstrip().endswith("scoring")
        status.done("[1]", seconds=100)
        assert "[1]" not in drawn(status)
    sent = shown.getvalue()
    assert "failed [0]:\n  no memory" in sent
    assert "started" not in sent
    assert "step 10" in sent


def test_metrics_that_are_broken_or_missing_count_as_nothing(tmp_path, status):
    (tmp_path / "metrics.jsonl").write_text('[]\n{"step": "x"}\nnull')
    status.started("a", tmp_path, 4)
    status.started("b", tmp_path / "nowhere", 4)
    assert "step 0" in drawn(status)


def test_a_terminal_that_is_gone_stops_nothing(status, monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stderr", Gone())
    with status:
        status.message("to nobody")
        status.failed("a", ["to nobody"])
    assert status.rows["a"].state == "failed"
