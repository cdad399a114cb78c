"""A terminal that records what it is sent."""

import io
import sys


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch, width=80):
    """Make stderr such a terminal. Not for fixtures: pytest replaces stderr after they have run."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": str(width), "LINES": "50"}.items():
        monkeypatch.setenv(name, value)
    return terminal
