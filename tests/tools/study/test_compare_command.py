"""`fastclip compare` from the command line."""

import json
from functools import partial

import pytest
import yaml

from fastclip.cli import call
from fastclip.data.sources import expand_braces
from fastclip.errors import InputError, OptionError, PathError
from fastclip.tools.study import run_study as module
from fastclip.tools.study.check_study import ArmError
from fastclip.tools.study.compare_command import RunsFailed
from fastclip.tools.study.definition import DifferentStudy, load_study, study_from
from fastclip.tools.study.study_state import read_study
from tests.tools.study.fake_fastclip import PROGRAM
from tests.tools.study.grids import write_data


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with data; runs are those of the fake fastclip."""
    write_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "run_study", partial(module.run_study, program=PROGRAM))
    return tmp_path


BASE = ["--config", "scenes", "--data.train", "data/train/{00000,00001}.tar", "--evaluate.pairs=null"]
ALL = [*BASE, "--epochs", "2", "--vary", "algorithm=openclip,fastclip-v3", "--seeds", "0,1", "--jobs=2"]


def printed(arguments, capsys):
    """The study of these arguments."""
    call("compare", [*arguments, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_help_has_examples(capsys):
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
    study = study_from(yaml.safe_load(text))
    assert len(study.all_arms()) == 4
    assert study.validation["pairs"] not in expand_braces(study.set["data.train"])


def test_arguments_become_a_study(capsys):
    arguments = [
        *BASE, "--vary", "algorithm=openclip,fastclip-v3", "--vary=optim.betas=[0.9,0.98],[0.9,0.99]",
        "--tune", "optim.lr=5e-4,1e-3", "--validation.pairs", "[a.tar, b.tar]", "--loss.tau=1e-1",
        "--seeds", "3", "--tasks", "t", "--suite", "emoji", "--baseline", "algorithm=openclip",
    ]  # fmt: skip
    assert printed(arguments, capsys) == {
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


def test_options_override_the_file(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"config": "emoji", "set": {"epochs": 8, "seed_": 1}, "seeds": [0]}))
    found = printed(["--study", str(file), "--config", "scenes", "--epochs=3", "--seeds=5,6"], capsys)
    assert found == {"config": "scenes", "set": {"epochs": 3, "seed_": 1}, "seeds": [5, 6]}


def test_renamed_options_get_their_current_names(tmp_path, capsys):
    arguments = ["--config=scenes", "--vary", "log.every=1,2", "--tune", "checkpoint.steps=5,6",
                 "--validation.pairs=x.tar", "--baseline", "log.every=1", "--evaluate.every=3"]  # fmt: skip
    found = printed(arguments, capsys)
    assert found["vary"] == {"log.every_steps": [1, 2]}
    assert found["tune"] == {"checkpoint.every_steps": [5, 6]}
    assert found["baseline"] == {"log.every_steps": 1}
    assert found["set"] == {"evaluate.every_epochs": 3}


@pytest.mark.parametrize("in_file", ["evaluate.every", "evaluate.every_epochs"])
@pytest.mark.parametrize("argument", ["--evaluate.every", "--evaluate.every_epochs"])
def test_an_option_overrides_the_file_under_either_name(tmp_path, capsys, in_file, argument):
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"config": "emoji", "set": {in_file: 1}}))
    assert printed(["--study", str(file), argument, "2"], capsys)["set"] == {"evaluate.every_epochs": 2}


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["--vary", "algorithm"], "vary", "algorithm"),
        (["--config", "emoji"], "config", "scenes and emoji"),
        (["--epochs"], "epochs", ""),
        (["--epochs", "--list"], "epochs", ""),
        (["--jobs", "0"], "jobs", 0),
        (["--seed", "1"], "set.seed", 1),
        (["--tune", "optim.lr=1,2"], "validation.pairs", None),
    ],
)
def test_an_invalid_option_is_refused(folder, arguments, option, value):
    with pytest.raises(OptionError) as caught:
        call("compare", [*BASE, *arguments])
    assert (caught.value.option, caught.value.value) == (option, value)
    assert not (folder / "studies").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "fields", "named"),
    [
        (["--vary", "batch.size=32", "64"], InputError, {"argument": "64"}, "64"),
        (["--study", "nowhere.yaml"], PathError, {"path": "nowhere.yaml"}, "nowhere.yaml"),
        (["--optim.rate", "1"], ArmError, {"arm": "scenes"}, "optim.rate"),
        (["--jobs", "two"], ValueError, {}, "two"),
    ],
)
def test_other_errors_are_reported_before_anything_is_written(folder, arguments, kind, fields, named):
    with pytest.raises(kind) as caught:
        call("compare", [*BASE, *arguments])
    assert {name: getattr(caught.value, name) for name in fields} == fields
    assert named in str(caught.value)
    assert not (folder / "studies").exists()


def test_a_config_is_required():
    with pytest.raises(OptionError) as caught:
        call("compare", ["--vary", "algorithm=openclip"])
    assert caught.value.option == "config"


@pytest.mark.slow
def test_all_runs_are_trained_and_then_the_tables_are_printed(folder, capsys):
    call("compare", ALL)
    *tables, last = capsys.readouterr().out.splitlines()
    assert any("100.00" in line and "fastclip-v3" in line for line in tables)  # of the fake runs
    assert last.endswith("fastclip report studies/scenes")
    state = read_study(folder / "studies" / "scenes")
    assert [run.state for run in state.runs] == ["done"] * 4
    assert [run.folder.name for run in state.runs][:2] == ["openclip-seed0", "openclip-seed1"]


@pytest.mark.slow
def test_only_json_is_printed(folder, capsys):
    call("compare", [*ALL, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["study"], [arm["name"] for arm in found["arms"]]) == ("scenes", ["openclip", "fastclip-v3"])


@pytest.mark.slow
def test_a_study_has_the_name_of_its_file_or_the_folder_of_study_yaml(folder):
    call("compare", [*ALL, "--out", "studies/one"])
    (folder / "two.yaml").write_text((folder / "studies/one/study.yaml").read_text())
    call("compare", ["--study", "two.yaml"])
    assert len(read_study(folder / "two").runs) == 4
    call("compare", ["--study", "studies/one", "--seeds", "2"])
    assert load_study(folder / "studies/one/study.yaml").seeds == [0, 1, 2]
    assert len(read_study(folder / "studies/one").runs) == 6


@pytest.mark.slow
def test_another_study_in_the_same_folder_is_refused(folder):
    call("compare", ALL)
    with pytest.raises(DifferentStudy) as caught:
        call("compare", [*ALL, "--loss.tau", "0.2"])
    assert caught.value.path == "studies/scenes"
    ((name, (old, new)),) = caught.value.differs.items()
    assert (name, new) == ("set", old | {"loss.tau": 0.2})


@pytest.mark.slow
def test_a_folder_with_old_names_of_options_continues(folder):
    call("compare", [*ALL, "--evaluate.every_epochs", "2"])
    file = folder / "studies/scenes/study.yaml"
    file.write_text(file.read_text().replace("evaluate.every_epochs", "evaluate.every"))
    call("compare", [*ALL, "--evaluate.every_epochs", "2", "--seeds", "0,1,2"])
    assert yaml.safe_load(file.read_text())["set"]["evaluate.every_epochs"] == 2
    assert [run.state for run in read_study(file.parent).runs] == ["done"] * 6


@pytest.mark.slow
def test_failures_are_reported_after_the_tables(folder, capsys):
    with pytest.raises(RunsFailed) as caught:
        call("compare", [*ALL, "--vary", "algorithm=mbcl,openclip", "--json"])
    assert caught.value.runs == ["mbcl-seed0", "mbcl-seed1"]
    assert str(caught.value.logs) in str(caught.value)
    assert json.loads(capsys.readouterr().out)["study"] == "scenes"


@pytest.mark.slow
def test_a_list_trains_nothing(folder, capsys):
    call("compare", [*ALL, "--list"])
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "4 runs: 4 unfinished"  # and no error
    assert not (folder / "studies").exists()
    with pytest.raises(RunsFailed):
        call("compare", [*ALL, "--vary", "algorithm=mbcl,openclip"])
    capsys.readouterr()
    call("compare", ["--study", "studies/scenes", "--list", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["failed", "failed", "done", "done"]
    assert "mbcl always fails" in rows[0]["error"]
    (folder / "data").rename(folder / "moved")
    call("compare", ["--study", "studies/scenes", "--list"])
    summary, error = capsys.readouterr().out.splitlines()[-2:]
    assert summary == "4 runs: 2 done, 2 failed"
    assert "data/train/00000.tar" in error
