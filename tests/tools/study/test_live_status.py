"""What is shown of a study while it runs."""

import io
import json

import pytest
from rich.console import Console

from fastclip.tools.study.live_status import LiveStatus
from tests.terminals import Terminal


@pytest.fixture
def status(clock):
    return LiveStatus(["a", "b", "c", "d"], at_once=2, clock=clock)


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
    out, err = capsys.readouterr()
    assert not out
    started, resumed, done, *failed = err.splitlines()
    assert started == "started b"
    assert resumed.split()[:2] == ["started", "c,"]
    assert resumed.endswith("step 7")
    assert done.startswith("done b")
    assert done.endswith("2 min 10 s")
    assert failed == ["failed c:", "  no memory", "  (exit code 1)"]


def test_a_pipe_gets_a_line_about_progress_at_intervals(tmp_path, status, clock, capsys):
    with status:
        status.started("a", write(tmp_path / "a", (10, 1.0)), 4)
        clock.now += 30
        status.refresh()
        write(tmp_path / "a", (10, 1.0), (20, 2.0))
        clock.now += 70
        status.refresh()
        status.refresh()
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert "0 of 4 runs" in line
    assert "a 50%" in line
    assert (
        "11 min 40 s" in line
    )  # a quarter took 100 s: 200 s more for this run, and 3 of 400 s two at a time


def test_a_terminal_gets_a_table_of_running_runs(tmp_path, status):
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


def test_a_terminal_shows_the_bars_in_place_and_failures_above(tmp_path, clock):
    terminal, names = Terminal(), [f"[{i}]" for i in range(20)]
    target = Console(file=terminal, width=100, height=50, force_terminal=True, force_interactive=True)
    with LiveStatus(names, at_once=15, target=target, clock=clock) as status:
        status.failed("[0]", ["no memory"])
        for name in names[1:15]:
            status.started(name, tmp_path / name, 4)
        for name in names[1:15]:
            write(tmp_path / name, (10, 1.0))
        status.scoring("[2]")
        clock.now += 100
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
    sent = terminal.getvalue()
    assert "failed [0]:\n  no memory" in sent
    assert "started" not in sent
    assert "step 10" in sent


def test_damaged_or_missing_metrics_count_as_step_0(tmp_path, status):
    (tmp_path / "metrics.jsonl").write_text('[]\n{"step": "x"}\nnull')
    status.started("a", tmp_path, 4)
    status.started("b", tmp_path / "nowhere", 4)
    assert "step 0" in drawn(status)


def test_a_closed_terminal_raises_no_error():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with LiveStatus(["a"], at_once=1, target=Console(file=Closed())) as status:
        status.message("lost")
        status.failed("a", ["lost"])
    assert status.rows["a"].state == "failed"
