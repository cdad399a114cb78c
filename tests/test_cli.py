"""The command line as a person uses it."""

import json
import subprocess
import sys

import pytest

from fastclip.cli import COMMANDS, main
from tests.data.collections import png, write_shards, write_tar


def test_help_imports_nothing_heavy():
    code = "import sys; from fastclip.cli import main; main(['--help']); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(command in out for command in COMMANDS)
    assert not any(f"'{name}'" in out for name in ("torch", "numpy", "jsonargparse", "PIL"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert f"usage: fastclip {command}" in capsys.readouterr().out


def test_a_mistyped_verb_gets_a_suggestion(capsys):
    assert main(["data", "chekc"]) == 2
    assert "Did you mean `fastclip data check`?" in capsys.readouterr().err
    assert main(["data"]) == 0
    assert main([]) == 0
    assert main(["--version"]) == 0


def test_index_says_what_is_there(tmp_path, capsys):
    members = [("a.png", png(0)), ("a.txt", b"x"), ("b.png", png(1))]
    path = str(write_tar(tmp_path / "s.tar", members))
    assert main(["data", "index", path]) == 0
    assert "1 pairs in 1 files" in capsys.readouterr().out
    assert main(["data", "index", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {"no caption": 1}


def test_several_sources_are_a_list(tmp_path, capsys):
    for name in ("one", "two"):
        write_shards(tmp_path / name, 4, 1)
    assert main(["data", "index", f"[{tmp_path}/one, {tmp_path}/two]"]) == 0
    assert "8 pairs in 2 files" in capsys.readouterr().out


def test_a_pattern_that_begins_with_a_bracket_is_a_pattern(tmp_path, monkeypatch, capsys):
    data = write_shards(tmp_path / "data", 6, 3)
    monkeypatch.chdir(data)
    first = sorted(path.name for path in data.iterdir())[0]
    assert main(["data", "index", f"[{first[0]}]{first[1:]}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 1
    assert main(["data", "index", f"['{first}', \"{first}\"]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 2
    assert main(["data", "index", "[a: b: c]"]) == 1


def test_a_pattern_that_the_shell_expanded_works(tmp_path, capsys):
    data = write_shards(tmp_path / "data", 6, 3)
    assert main(["data", "index", *sorted(map(str, data.iterdir())), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 6


def test_check_prints_a_table_or_json_and_draws_a_sheet(tmp_path, capsys):
    data = str(write_shards(tmp_path / "data", 8, 2))
    sheet = str(tmp_path / "sheet.png")
    assert main(["data", "check", data, "--sheet", sheet]) == 0
    out = capsys.readouterr().out
    assert "8, of which 8 were looked at" in out
    assert "images a second and core" in out
    assert main(["data", "check", data, "--sheet", sheet, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 8


def test_an_error_is_one_line_that_says_what_to_do(tmp_path, capsys):
    assert main(["data", "index", str(tmp_path / "none.tar")]) == 1
    assert capsys.readouterr().err.strip().endswith("none.tar does not exist.")


def test_help_has_defaults_and_none_of_pythons_types(capsys):
    with pytest.raises(SystemExit):
        main(["search", "--help"])
    told = capsys.readouterr().out
    assert "(default: 12)" in told
    assert "type:" not in told
    assert "class" not in told
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "augmentation. (default: 0)" in " ".join(capsys.readouterr().out.split())


def test_words_and_options_stand_in_any_order(capsys):
    words = ["a run", "--top", "3", "pictures", "--json", "a red heart", "--print_config"]
    assert main(["search", *words]) == 0
    told = capsys.readouterr().out
    assert all(
        line in told
        for line in ("model: a run", "images: pictures", "text: a red heart", "top: 3", "json: true")
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["search", "a", "b", "--tob", "3"], "--top"),
        (["eval", "--model", "a"], "MODEL"),
        (["search", "a", "b", "c", "d"], "'d'"),
        (["search", "a"], "images"),
        (["search", "a", "b", "--top", "many"], "many"),
        (["search", "a", "b", "--checkpoint", "first"], "best"),
        (["plan", "--network", "ib", "--batch-per-gpu", "x"], "'x'"),
        (["data", "get", "emojis"], "emoji"),
    ],
)
def test_a_mistake_is_named_in_one_line(words, named, capsys):
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_a_command_takes_dashes_for_underscores(capsys):
    assert main(["eval", "a", "--batch-size", "7", "--print_config"]) == 0
    assert "batch_size: 7" in capsys.readouterr().out
