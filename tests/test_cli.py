"""The command line as users call it."""

import json
import logging
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import yaml
from safetensors import SafetensorError

from fastclip.cli import COMMANDS, main
from fastclip.config.renamed import RENAMED, report_new_name
from fastclip.data.pairs import ExtraCaptions
from fastclip.errors import CommandError
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


def test_a_mistyped_command_gets_a_suggestion(capsys):
    assert main(["data", "chekc"]) == 2
    assert "fastclip data check" in capsys.readouterr().err
    assert main(["data"]) == 0
    assert main([]) == 0
    assert main(["--version"]) == 0


def test_index_counts_pairs_and_files(tmp_path, capsys):
    members = [("a.png", png(0)), ("a.txt", b"x"), ("b.png", png(1))]
    path = str(write_tar(tmp_path / "s.tar", members))
    assert main(["data", "index", path]) == 0
    assert main(["data", "index", path, "--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{") :])
    assert (found["pairs"], found["files"], found["left_out"]) == (1, 1, {"no caption": 1})
    (first,) = found["first_left_out"]
    assert first.startswith(f"{path}, byte ")
    assert found["fingerprint"] in printed.splitlines()[0]


def test_several_sources_are_a_list(tmp_path, capsys):
    for name in ("one", "two"):
        write_shards(tmp_path / name, 4, 1)
    assert main(["data", "index", f"[{tmp_path}/one, {tmp_path}/two]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pairs"], found["files"]) == (8, 2)


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


@pytest.mark.slow
def test_check_prints_a_table_or_json_and_draws_a_sheet(tmp_path, capsys):
    data = str(write_shards(tmp_path / "data", 8, 2))
    sheet = str(tmp_path / "sheet.png")
    assert main(["data", "check", data, "--sheet", sheet]) == 0
    assert sheet in capsys.readouterr().out.replace("\n", "")
    assert main(["data", "check", data, "--sheet", sheet, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 8


def test_check_measures_truncation_with_the_model_of_the_recipe(tmp_path, capsys):
    long = [("0.png", png(0)), ("0.txt", b"word " * 40), ("1.png", png(1)), ("1.txt", b"word")]
    data = str(write_tar(tmp_path / "s.tar", long))
    for options, length, truncated in (
        (["--config", "emoji"], 10, 1),
        (["--config", "emoji", "--tokenizer", "ViT-B-32"], 77, 0),
    ):
        assert main(["data", "check", data, "--sheet", str(tmp_path / "a.png"), "--json", *options]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["context_length"], report["truncated_captions"]) == (length, truncated)


def test_several_captions_are_counted_by_index_and_check(tmp_path, capsys):
    (tmp_path / "0.png").write_bytes(png(0))
    (tmp_path / "0.txt").write_text("a cat\na pet\nan animal\n")
    for command in (["index"], ["check", "--sheet", str(tmp_path / "sheet.png")]):
        assert main(["data", *command, str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["extra_captions"] == {"pairs": 1, "captions": 2}
    assert main(["data", "index", str(tmp_path)]) == 0
    assert str(ExtraCaptions(1, 2)) in capsys.readouterr().out


def test_data_commands_read_another_encoding(tmp_path, capsys):
    (tmp_path / "0.png").write_bytes(png(0))
    (tmp_path / "t.csv").write_bytes("image,caption\n0.png,un café à Paris\n".encode("latin-1"))
    for command in (["index"], ["check", "--sheet", str(tmp_path / "sheet.png")]):
        words = ["data", *command, str(tmp_path / "t.csv"), "--json"]
        assert main(words) == 1
        assert "--encoding cp1252" in capsys.readouterr().err
        assert main([*words, "--encoding", "cp1252"]) == 0
        assert json.loads(capsys.readouterr().out)["pairs"] == 1
        assert main([*words, "--encoding", "latin-l"]) == 1
        assert "encoding=latin-l" in capsys.readouterr().err


def test_an_error_is_one_line_that_names_the_file(tmp_path, capsys):
    assert main(["data", "index", str(tmp_path / "none.tar")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "none.tar") in line


def test_help_shows_defaults_and_no_python_types(capsys):
    with pytest.raises(SystemExit):
        main(["search", "--help"])
    shown = capsys.readouterr().out
    assert "(default: 12)" in shown
    assert "type:" not in shown
    assert "class" not in shown
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "augmentation. (default: 0)" in " ".join(capsys.readouterr().out.split())


def test_arguments_and_options_may_be_in_any_order(capsys):
    words = ["a run", "--top", "3", "folder", "--json", "a red heart", "--print_config"]
    assert main(["search", *words]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    expected = {"model": "a run", "images": "folder", "text": "a red heart", "top": 3, "json": True}
    assert expected.items() <= printed.items()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["search", "a", "b", "--tob", "3"], "top"),
        (["eval", "--model", "a"], "MODEL"),
        (["search", "a", "b", "c", "d"], "'d'"),
        (["search", "a"], "images"),
        (["search", "a", "b", "--top", "many"], "many"),
        (["search", "a", "b", "--checkpoint", "first"], "best"),
        (["plan", "--network", "ib", "--batch_per_gpu", "x"], "'x'"),
        (["data", "get", "emojis"], "emoji"),
        (["profile", "--stpes", "3"], "steps"),
        (["plan", "--node", "3"], "nodes"),
    ],
)
def test_an_error_is_named_in_one_line(words, named, capsys):
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def printed_options(command, words, capsys):
    assert main([*command.split(), *words, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def _report_again():
    report_new_name.cache_clear()


def test_hyphens_are_read_as_underscores_and_reported(capsys, caplog):
    with caplog.at_level(logging.WARNING):
        assert printed_options("eval", ["a", "--batch-size", "7"], capsys)["batch_size"] == 7
    assert [record.args for record in caplog.records] == [("--batch-size", "--batch_size")]


def test_the_old_name_of_an_option_works_and_the_new_one_is_reported(capsys, caplog):
    with caplog.at_level(logging.WARNING):
        assert printed_options("data check", ["a.tar", "--most=7"], capsys)["limit"] == 7
    assert [record.args for record in caplog.records] == [("--most", "--limit")]


@pytest.mark.parametrize("command", [name for name, row in COMMANDS.items() if row.renamed])
def test_old_names_lead_to_parameters_that_exist(command):
    module, _, function = COMMANDS[command].function.rpartition(".")
    parameters = signature(getattr(import_module(module), function)).parameters
    for old, new in COMMANDS[command].renamed.items():
        assert old not in parameters
        assert new in parameters


def test_the_changelog_lists_every_renamed_option():
    changelog = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    renamed = {"train": RENAMED} | {name: row.renamed for name, row in COMMANDS.items()}
    for command, names in renamed.items():
        for old, new in names.items():
            assert f"| `{command}` | `{old}` | `{new}` |" in changelog


# Errors.


@pytest.fixture
def failing(monkeypatch):
    """`fastclip verify RUN` raises this error."""

    def fail(error):
        def verify(run: Path) -> None:
            """Fail.

            Args:
                run: any.
            """
            raise error

        monkeypatch.setattr("fastclip.run.verify.verify", verify)

    return fail


def test_an_error_of_ours_is_one_line_and_a_foreign_one_keeps_its_traceback(failing, capsys):
    for error in (CommandError("stopped"), OSError("disk full"), ValueError("too large")):
        failing(error)
        assert main(["verify", "runs/mine"]) == 1
        assert capsys.readouterr().err == f"fastclip verify: {error}\n"
    failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        main(["verify", "runs/mine"])


def test_a_name_in_an_error_has_no_control_characters(failing, capsys):
    failing(ValueError("a\x1b[2J\u202e\udc80.tar is damaged\nRestore it."))
    assert main(["verify", "runs/mine"]) == 1
    assert capsys.readouterr().err == "fastclip verify: a\\x1b[2J\\u202e\\udc80.tar is damaged\nRestore it.\n"


def test_torchrun_reports_the_traceback_of_a_foreign_error_only(failing, monkeypatch, tmp_path):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    failing(CommandError("stopped"))
    assert main(["verify", "runs/mine"]) == 1
    assert not report.exists()
    failing(SystemExit(75))
    with pytest.raises(SystemExit) as stopped:
        main(["verify", "runs/mine"])
    assert stopped.value.code == 75
    assert main(["--version"]) == 0
    failing(RuntimeError("CUDA error"))
    with pytest.raises(RuntimeError):
        main(["verify", "runs/mine"])
    recorded = json.loads(report.read_text())["message"]
    assert recorded["message"] == "RuntimeError: CUDA error"
    assert "in verify" in recorded["extraInfo"]["py_callstack"]


def test_missing_packages_and_wrong_content_are_one_line_and_debug_shows_the_traceback(failing, capsys):
    for error, named in (
        (ModuleNotFoundError("No module named 'gradio.themes'", name="gradio.themes"), "'fastclip[demo]'"),
        (ModuleNotFoundError("No module named 'PIL'", name="PIL"), "pip install pillow"),
        (KeyError("shards"), "KeyError: 'shards'"),
        (TypeError("'int' object is not iterable"), "TypeError: 'int'"),
        (AttributeError("'list' object has no attribute 'get'"), "AttributeError"),
        (SafetensorError("header too large"), "SafetensorError: header too large"),
        (MemoryError(), "MemoryError"),
    ):
        failing(error)
        assert main(["verify", "runs/mine"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert named in line
        for words in (["verify", "runs/mine", "--debug"], ["--debug", "verify", "runs/mine"]):
            with pytest.raises(type(error)):
                main(words)
    failing(AssertionError("a bug"))
    with pytest.raises(AssertionError):
        main(["verify", "runs/mine"])
    failing(ModuleNotFoundError("No module named 'fastclip.gone'", name="fastclip.gone"))
    assert main(["verify", "runs/mine"]) == 1
    assert "bug" in capsys.readouterr().err


def test_debug_is_documented_and_not_passed_on(capsys):
    for words in ([], ["verify", "--help"], ["train", "--help"]):
        with suppress(SystemExit):
            main(words)
        assert "--debug" in capsys.readouterr().out
    given = printed_options("verify", ["runs/mine", "--debug"], capsys)
    assert "debug" not in given
