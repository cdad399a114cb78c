"""Progress in a pipe."""

from fastclip import progress as module
from fastclip.progress import progress


def test_short_work_is_silent_and_long_work_speaks_now_and_then(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with progress("counting", "sheep") as update:
        for second in range(31):
            clock[0] = float(second)
            update(second, 30)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["counting: 3 of 30 sheep", "counting: 14 of 30 sheep", "counting: 25 of 30 sheep"]
