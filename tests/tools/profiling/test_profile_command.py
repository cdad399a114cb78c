"""`fastclip profile` from the command line."""

import json

import pytest
from PIL import Image

from fastclip.cli import call as call_command
from fastclip.errors import OptionError, UnknownOption
from fastclip.tools.profiling import rank_counts
from fastclip.tools.profiling.breakdown import PARTS
from tests.tools.study import forked
from tests.training.runs import Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def call(lab, tmp_path, monkeypatch):
    """Run it in an empty folder with a tiny model and few steps; arguments override these."""
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    options = lab.options("profiles/mine", "fastclip-v3")

    def run(*arguments):
        call_command("profile", [*options, "--steps=2", "--warmup=1", *arguments])

    return run


def read(folder):
    return json.loads((folder / "profile.json").read_text())


@pytest.mark.slow
def test_a_table_is_printed_and_all_files_are_in_the_folder(call, tmp_path, capsys):
    call("--algorithm=openclip,fastclip-v3", "--out=mine")
    out = capsys.readouterr().out
    for category in ("1 rank", *PARTS.values(), "samples/s", "peak memory"):
        assert category in out
    assert "2 steps" in out
    assert "16 pairs" in out
    here = tmp_path / "here"
    assert [path.name for path in here.iterdir()] == ["mine"]
    traces = [f"trace-{name}-rank0.json.gz" for name in ("fastclip-v3", "openclip")]
    assert sorted(path.name for path in (here / "mine").iterdir()) == ["profile.json", "profile.png", *traces]
    saved = read(here / "mine")
    assert saved["command"].startswith("fastclip profile --config scenes")
    assert {"date", "versions", "machine", "units", "left_out"} <= saved.keys()
    assert (saved["steps"], saved["warmup"]) == (2, 1)
    assert [one["algorithm"] for one in saved["profiles"]] == ["openclip", "fastclip-v3"]
    (rank,) = saved["profiles"][0]["workers"]
    assert len(rank["steps"]) == 2
    assert rank["peak_memory"] > 1 << 20
    with Image.open(here / "mine" / "profile.png") as image:
        assert image.format == "PNG"


@pytest.mark.slow
def test_json_is_the_content_of_the_file(call, tmp_path, capsys):
    call("--json")
    assert json.loads(capsys.readouterr().out) == read(tmp_path / "here" / "profiles" / "mine")


@pytest.mark.slow
def test_one_and_two_ranks_are_started_and_compared(call, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rank_counts, "PROGRAM", forked.PROGRAM)
    with forked.serve(tmp_path / "socket"):
        call("--ranks=1,2")
    out = capsys.readouterr().out
    for name in ("2 ranks, median", "slowest", "speed-up over 1 rank", "KiB sent, all_gather", "16 pairs"):
        assert name in out
    folder = tmp_path / "here" / "profiles" / "mine"
    saved = read(folder)
    assert [(one["batch"], len(one["workers"])) for one in saved["profiles"]] == [(16, 1), (32, 2)]
    assert "--ranks=1,2" in saved["command"]
    assert (folder / "profile.png").is_file()
    assert (folder / "workers-2" / "trace-fastclip-v3-rank1.json.gz").is_file()


@pytest.mark.parametrize(
    ("argument", "option", "value"),
    [
        ("--steps=0", "steps", 0),
        ("--warmup=-1", "warmup", -1),
        ("--ranks=1,two", "ranks", "1,two"),
        ("--ranks=0", "ranks", "0"),
        ("--algorithm=openclip,fastclip-v9", "algorithm", "fastclip-v9"),
        ("--config=emojis", "config", "emojis"),
    ],
)
def test_an_invalid_option_is_an_error_before_anything_runs(call, tmp_path, argument, option, value):
    with pytest.raises(OptionError) as caught:
        call(argument)
    assert (caught.value.option, caught.value.value) == (option, value)
    assert not list((tmp_path / "here").iterdir())


def test_a_mistyped_option_is_an_error_before_anything_runs(call, tmp_path):
    with pytest.raises(UnknownOption) as caught:
        call("--stpes=3")
    assert caught.value.option == "stpes"
    assert not list((tmp_path / "here").iterdir())


def test_a_value_of_the_wrong_type_is_an_error_before_anything_runs(call, tmp_path):
    with pytest.raises(ValueError, match=r"--steps.*'many'"):
        call("--steps=many")
    assert not list((tmp_path / "here").iterdir())


def test_ranks_are_refused_under_a_launcher(call, monkeypatch):
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(OptionError) as caught:
        call("--ranks=1,2")
    assert (caught.value.option, caught.value.value) == ("ranks", "1,2")
    assert "torchrun" in caught.value.advice


@pytest.mark.slow
def test_the_folder_is_named_after_the_recipe(lab, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = lab.options("x", "fastclip-v1")
    del options[options.index("--out") : options.index("--out") + 2]
    call_command("profile", [*options, "--steps=1", "--warmup=1"])
    assert (tmp_path / "profiles" / "scenes" / "profile.json").is_file()
