"""`make demo`: the verbs in their order, what is said on the way, and going on after an interruption."""

import io
from pathlib import Path

import pytest
from PIL import Image

from fastclip import tour
from fastclip.tools.search.index import Match
from tests.data.collections import picture


class _Pictures:
    """What the tour asks of an index: eight pictures, each with its number as a caption."""

    def __init__(self):
        self.pictures = self
        self.captions = ["eight"]

    @classmethod
    def open(cls, model, images):
        return cls()

    def __getitem__(self, number):
        return self

    def image(self, number):
        data = io.BytesIO()
        picture(number, (40, 40)).save(data, "png")
        return data.getvalue()

    def by_text(self, text, top):
        return [Match(number, f"{number}.png", 0.9 - number / 10) for number in range(top)]


@pytest.fixture
def verbs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "no-package"))
    monkeypatch.setattr("fastclip.tools.search.index.Index", _Pictures)
    return _Verbs(monkeypatch)


class _Verbs:
    """Stands for the command line: notes what was called, and gives the exit code that a test wants."""

    def __init__(self, monkeypatch):
        self.called, self.codes = [], {}
        monkeypatch.setattr(tour, "fastclip", self)

    def __call__(self, words):
        self.called.append(words)
        code = self.codes.get(" ".join(words[:3]), self.codes.get(words[0], 0))
        if isinstance(code, BaseException):
            raise code
        return code

    @property
    def names(self):
        return [words[0] for words in self.called]


def npm(monkeypatch, there):
    monkeypatch.setattr(tour.shutil, "which", lambda name: "npm" if there else None)


def test_it_gets_trains_scores_exports_and_reports_then_draws_the_searches(verbs, monkeypatch, capsys):
    npm(monkeypatch, True)
    assert tour.main() == 0
    assert verbs.names == ["data", "train", "eval", "export", "report"]
    assert ["train", "--config", "emoji", "--out", "runs/demo"] in verbs.called
    assert "--suite" in verbs.called[2]
    said = capsys.readouterr().out
    assert "$ fastclip train --config emoji --out runs/demo" in said
    assert said.count("0.90  eight") == tour.EXAMPLES
    for next_step in ("fastclip demo runs/demo", "docs/data.md", "--algorithm", "torchrun"):
        assert next_step in said
    with Image.open("runs/demo/searches.png") as sheet:
        assert sheet.width // (tour.SHOWN + 1) == sheet.width / (tour.SHOWN + 1)


def test_without_npm_it_says_so_and_takes_scenes(verbs, monkeypatch, capsys):
    npm(monkeypatch, False)
    assert tour.main() == 0
    assert verbs.called[0] == ["data", "get", "scenes"]
    assert "runs/demo-scenes" in verbs.called[1]
    assert "npm is not installed" in capsys.readouterr().out


def test_emoji_that_are_there_need_no_npm(verbs, monkeypatch):
    npm(monkeypatch, False)
    Path("data/emoji").mkdir(parents=True)
    Path("data/emoji/complete.json").write_text("{}")
    assert tour.main() == 0
    assert verbs.called[0] == ["data", "get", "emoji"]


def test_a_package_that_was_put_into_the_cache_needs_no_npm(verbs, monkeypatch, tmp_path):
    npm(monkeypatch, False)
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "iconify-json-1.2.3.tgz").write_bytes(b"")
    assert tour.main() == 0
    assert verbs.called[0] == ["data", "get", "emoji"]


def test_emoji_that_cannot_be_fetched_are_replaced_by_scenes(verbs, monkeypatch, capsys):
    npm(monkeypatch, True)
    verbs.codes["data get emoji"] = 1
    assert tour.main() == 0
    assert verbs.called[1] == ["data", "get", "scenes"]
    assert "generated scenes" in capsys.readouterr().out


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
def test_an_interruption_says_that_the_same_command_goes_on(verbs, monkeypatch, capsys, where, how, code):
    npm(monkeypatch, True)
    verbs.codes[where] = how
    assert tour.main() == code
    assert verbs.names[-1] == where.split()[0]  # nothing after it
    assert "`make demo` goes on from here" in capsys.readouterr().err


def test_a_verb_that_fails_ends_the_tour_with_its_code(verbs, monkeypatch, capsys):
    npm(monkeypatch, True)
    verbs.codes["eval"] = 1
    assert tour.main() == 1
    assert verbs.names[-1] == "eval"
    assert "goes on" not in capsys.readouterr().err


def test_a_run_of_an_earlier_version_can_be_got_rid_of(verbs, monkeypatch, capsys):
    npm(monkeypatch, True)
    Path("runs/demo").mkdir(parents=True)
    verbs.codes["train"] = 1  # it holds another run, and says so
    assert tour.main() == 1
    assert "rm -r runs/demo" in capsys.readouterr().err


def test_a_sheet_that_cannot_be_written_is_told_in_a_line(verbs, monkeypatch, capsys):
    npm(monkeypatch, True)
    Path("runs").mkdir()
    Path("runs/demo").write_text("a file where the run should be")
    assert tour.main() == 1
    assert capsys.readouterr().err.startswith("make demo: ")
