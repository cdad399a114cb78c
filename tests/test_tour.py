"""`make demo`: the commands in order, what is printed, and resuming after an interruption."""

from pathlib import Path

import pytest
from PIL import Image

from fastclip import tour
from fastclip.tools.search.index import Match
from tests.data.collections import picture


class _Index:
    """The part of a search index that the tour uses: images that all have one caption."""

    def __init__(self):
        self.pictures = self
        self.captions = ["eight"]

    @classmethod
    def open(cls, model, images):
        return cls()

    def __getitem__(self, number):
        return self

    def image(self, number):
        return picture(number, (40, 40))

    def by_text(self, text, top):
        return [Match(number, f"{number}.png", 0.9 - number / 10) for number in range(top)]


@pytest.fixture
def commands(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "no-package"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("fastclip.tools.search.index.Index", _Index)
    return _Commands(monkeypatch)


class _Commands:
    """Replaces the command line: records each call, and returns the exit code that a test sets."""

    def __init__(self, monkeypatch):
        self.called, self.codes = [], {}
        monkeypatch.setattr(tour, "fastclip", self)

    def __call__(self, arguments):
        self.called.append(arguments)
        code = self.codes.get(" ".join(arguments[:3]), self.codes.get(arguments[0], 0))
        if isinstance(code, BaseException):
            raise code
        return code

    @property
    def names(self):
        return [arguments[0] for arguments in self.called]


@pytest.fixture
def npm(tmp_path):
    """A program of this name on the PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "npm").touch(mode=0o755)


@pytest.mark.usefixtures("npm")
def test_it_gets_trains_scores_exports_and_reports_then_draws_the_searches(commands, capsys):
    assert tour.main() == 0
    assert commands.names == ["data", "train", "eval", "export", "report"]
    assert ["train", "--config", "emoji", "--out", "runs/demo"] in commands.called
    assert "--suite" in commands.called[2]
    printed = capsys.readouterr().out
    assert "$ fastclip train --config emoji --out runs/demo" in printed
    assert printed.count("0.90  eight") == tour.EXAMPLES
    for next_step in ("fastclip demo runs/demo", "docs/data.md", "--algorithm", "torchrun"):
        assert next_step in printed
    with Image.open("runs/demo/searches.png") as sheet:
        assert sheet.width // (tour.SHOWN + 1) == sheet.width / (tour.SHOWN + 1)


def test_without_npm_it_says_so_and_generates_scenes(commands, capsys):
    assert tour.main() == 0
    assert commands.called[0] == ["data", "get", "scenes"]
    assert "runs/demo-scenes" in commands.called[1]
    assert "npm" in capsys.readouterr().out


def test_existing_emoji_need_no_npm(commands):
    Path("data/emoji").mkdir(parents=True)
    Path("data/emoji/complete.json").write_text("{}")
    assert tour.main() == 0
    assert commands.called[0] == ["data", "get", "emoji"]


def test_a_package_in_the_cache_needs_no_npm(commands, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "iconify-json-1.2.3.tgz").write_bytes(b"")
    assert tour.main() == 0
    assert commands.called[0] == ["data", "get", "emoji"]


@pytest.mark.usefixtures("npm")
def test_emoji_that_cannot_be_downloaded_are_replaced_by_scenes(commands, capsys):
    commands.codes["data get emoji"] = 1
    assert tour.main() == 0
    assert commands.called[1] == ["data", "get", "scenes"]
    assert "generated scenes" in capsys.readouterr().out


@pytest.mark.usefixtures("npm")
@pytest.mark.parametrize(
    ("where", "how", "code"),
    [
        ("data get emoji", 130, 130),
        ("train", SystemExit(75), 75),
        ("train", 130, 130),
        ("eval", KeyboardInterrupt(), 130),
        ("report", 130, 130),
    ],
)
def test_an_interruption_ends_the_tour_and_says_how_to_resume(commands, capsys, where, how, code):
    commands.codes[where] = how
    assert tour.main() == code
    assert commands.names[-1] == where.split()[0]  # nothing after it
    assert "make demo" in capsys.readouterr().err


@pytest.mark.usefixtures("npm")
def test_a_command_that_fails_ends_the_tour_with_its_code(commands, capsys):
    commands.codes["eval"] = 1
    assert tour.main() == 1
    assert commands.names[-1] == "eval"
    assert "make demo" not in capsys.readouterr().err


@pytest.mark.usefixtures("npm")
def test_how_to_remove_a_run_of_an_earlier_version_is_printed(commands, capsys):
    Path("runs/demo").mkdir(parents=True)
    commands.codes["train"] = 1  # it holds another run, and says so
    assert tour.main() == 1
    assert "rm -r runs/demo" in capsys.readouterr().err


@pytest.mark.usefixtures("npm")
def test_a_sheet_that_cannot_be_written_is_a_one_line_error(commands, capsys):
    Path("runs").mkdir()
    Path("runs/demo").write_text("a file where the run should be")
    assert tour.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("make demo: ")
    assert "runs/demo" in line
