"""`fastclip compare` as a person calls it."""

import json

import pytest
import yaml

from fastclip.cli import call
from fastclip.data.sources import expand_braces
from fastclip.tools.study import run_study as runs
from fastclip.tools.study.definition import load_study, study_from
from fastclip.tools.study.study_state import read_study
from tests.tools.study.grids import write_data
from tests.tools.study.pretender import PROGRAM


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the data are; runs are the pretender's."""
    write_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs.run_study, "__defaults__", (None, PROGRAM))
    monkeypatch.setattr(
        "fastclip.tools.study.result_tables.print_study", lambda out, json: print(f"tables of {out} {json}")
    )
    return tmp_path


BASE = ["--config", "scenes", "--data.train", "data/train/{00000,00001}.tar", "--evaluate.pairs=null"]
ALL = [*BASE, "--epochs", "2", "--vary", "algorithm=openclip,fastclip-v3", "--seeds", "0,1", "--jobs=2"]


def printed(words, capsys):
    call("compare", [*words, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_help_teaches_with_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        call("compare", ["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "usage: fastclip compare" in out
    assert "--tune optim.lr=5e-4,1e-3,2e-3" in out
    assert "validation: {pairs:" in out


def test_the_file_in_the_help_is_a_study(capsys):
    with pytest.raises(SystemExit):
        call("compare", ["--help"])
    text = capsys.readouterr().out.partition("A study's file:\n")[2].partition("Exit codes")[0]
    study = study_from(yaml.safe_load(text), "help")
    assert len(study.all_arms()) == 4
    assert study.validation["pairs"] not in expand_braces(study.set["data.train"])


def test_words_become_a_study(capsys):
    words = [
        *BASE, "--vary", "algorithm=openclip,fastclip-v3", "--vary=optim.betas=[0.9,0.98],[0.9,0.99]",
        "--tune", "optim.lr=5e-4,1e-3", "--validation.pairs", "[a.tar, b.tar]", "--loss.tau=1e-1",
        "--seeds", "3", "--tasks", "t", "--suite", "emoji", "--baseline", "algorithm=openclip",
    ]  # fmt: skip
    assert printed(words, capsys) == {
        "config": "scenes",
        "set": {"data.train": "data/train/{00000,00001}.tar", "evaluate.pairs": None, "loss.tau": 0.1},
        "vary": {"algorithm": ["openclip", "fastclip-v3"], "optim.betas": [[0.9, 0.98], [0.9, 0.99]]},
        "seeds": [3],
        "tune": {"optim.lr": [0.0005, 0.001]},
        "tune_seed": 1000,
        "validation": {"pairs": ["a.tar", "b.tar"]},
        "tasks": "t",
        "suite": "emoji",
        "baseline": {"algorithm": "openclip"},
    }


def test_options_win_over_the_file(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"config": "emoji", "set": {"epochs": 8, "seed_": 1}, "seeds": [0]}))
    found = printed(["--study", str(file), "--config", "scenes", "--epochs=3", "--seeds=5,6"], capsys)
    assert found == {"config": "scenes", "set": {"epochs": 3, "seed_": 1}, "seeds": [5, 6]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "algorithm"], "names no values"),
        (["--vary", "batch.size=32", "64"], "'64' belongs to no option"),
        (["--config", "emoji"], "scenes and emoji: a study starts from one"),
        (["--epochs"], "--epochs needs a value"),
        (["--epochs", "--list"], "--epochs needs a value"),
        (["--jobs", "0"], "--jobs 0 must be at least 1"),
        (["--jobs", "two"], "invalid int value"),
        (["--seed", "1"], "seed belongs to the study itself"),
        (["--study", "nowhere.yaml"], "There is no study in nowhere.yaml"),
        (["--tune", "optim.lr=1,2"], "tune needs validation.pairs"),
        (["--optim.rate", "1"], "There is no option optim.rate"),
    ],
)
def test_mistakes_are_told(folder, words, message):
    with pytest.raises(ValueError, match=message):
        call("compare", [*BASE, *words])
    assert not (folder / "studies").exists()


def test_a_config_is_asked_for():
    with pytest.raises(ValueError, match="config is missing"):
        call("compare", ["--vary", "algorithm=openclip"])


def test_all_is_trained_and_the_tables_come_last(folder, capsys):
    call("compare", ALL)
    out = capsys.readouterr().out.splitlines()
    assert out == ["tables of studies/scenes False", "", "A page with curves: fastclip report studies/scenes"]
    state = read_study(folder / "studies" / "scenes")
    assert [run.state for run in state.runs] == ["done"] * 4
    assert [run.folder.name for run in state.runs][:2] == ["openclip-seed0", "openclip-seed1"]


def test_json_is_all_that_is_printed(folder, capsys):
    call("compare", [*ALL, "--json"])
    assert capsys.readouterr().out == "tables of studies/scenes True\n"


def test_a_study_has_the_folder_of_its_file_or_the_one_it_lies_in(folder):
    call("compare", [*ALL, "--out", "studies/one"])
    (folder / "two.yaml").write_text((folder / "studies/one/study.yaml").read_text())
    call("compare", ["--study", "two.yaml"])
    assert len(read_study(folder / "two").runs) == 4
    call("compare", ["--study", "studies/one", "--seeds", "2"])
    assert load_study(folder / "studies/one/study.yaml").seeds == [0, 1, 2]
    assert len(read_study(folder / "studies/one").runs) == 6


def test_another_study_in_the_same_folder_is_refused(folder):
    call("compare", ALL)
    with pytest.raises(ValueError, match=r"studies/scenes: it holds another study:\n  set: "):
        call("compare", [*ALL, "--loss.tau", "0.2"])


def test_failures_are_told_after_the_tables(folder, capsys):
    with pytest.raises(RuntimeError, match="2 runs failed: mbcl-seed0, mbcl-seed1"):
        call("compare", [*ALL, "--vary", "algorithm=mbcl,openclip"])
    assert "tables of" in capsys.readouterr().out


def test_a_list_trains_nothing(folder, capsys):
    call("compare", [*ALL, "--list"])
    out = capsys.readouterr().out
    assert "4 runs: 4 unfinished" in out
    assert "Not ready" not in out
    assert not (folder / "studies").exists()
    with pytest.raises(RuntimeError):
        call("compare", [*ALL, "--vary", "algorithm=mbcl,openclip"])
    capsys.readouterr()
    call("compare", ["--study", "studies/scenes", "--list", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["failed", "failed", "done", "done"]
    assert "this one always fails" in rows[0]["error"]
    (folder / "data").rename(folder / "moved")
    call("compare", ["--study", "studies/scenes", "--list"])
    assert (
        "Not ready to be trained: data.train: data/train/00000.tar does not exist" in capsys.readouterr().out
    )
