"""`fastclip profile` as a person calls it."""

import json

import pytest
from PIL import Image

from fastclip.cli import call as call_command
from fastclip.tools.profiling import sizes
from tests.tools.study import forked
from tests.training.runs import Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def call(lab, tmp_path, monkeypatch):
    """Calls it in an empty folder, with a tiny model and few steps; what is given comes last, and wins."""
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    options = lab.options("profiles/mine", "fastclip-v3")

    def run(*words):
        call_command("profile", [*options, "--steps=2", "--warmup=1", *words])

    return run


def read(folder):
    return json.loads((folder / "profile.json").read_text())


def test_a_table_is_printed_and_everything_is_kept_in_the_folder(call, tmp_path, capsys):
    call("--algorithm=openclip,fastclip-v3", "--out=kept")
    out = capsys.readouterr().out
    for words in (
        "1 worker",
        "total",
        "pure communication",
        "of it waiting for data",
        "samples/s",
        "peak memory",
    ):
        assert words in out
    assert "Mean (sd) of 2 steps after 1 to warm up; 16 pairs a step on each worker." in out
    here = tmp_path / "here"
    assert [path.name for path in here.iterdir()] == ["kept"]
    traces = [f"trace-{name}-rank0.json.gz" for name in ("fastclip-v3", "openclip")]
    assert sorted(path.name for path in (here / "kept").iterdir()) == ["profile.json", "profile.png", *traces]
    found = read(here / "kept")
    assert found["command"].startswith("fastclip profile --config scenes")
    assert {"date", "versions", "machine", "steps", "warmup", "units"} <= found.keys()
    assert [one["algorithm"] for one in found["profiles"]] == ["openclip", "fastclip-v3"]
    (worker,) = found["profiles"][0]["workers"]
    assert len(worker["steps"]) == 2
    assert worker["peak_memory"] > 1 << 20
    with Image.open(here / "kept" / "profile.png") as picture:
        assert picture.format == "PNG"


def test_json_is_what_the_file_holds(call, tmp_path, capsys):
    call("--json")
    assert json.loads(capsys.readouterr().out) == read(tmp_path / "here" / "profiles" / "mine")


def test_two_sizes_are_started_and_compared(call, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sizes, "PROGRAM", forked.PROGRAM)
    with forked.serve(tmp_path / "socket"):
        call("--sizes=1,2")
    out = capsys.readouterr().out
    for words in ("2 workers, median", "slowest", "speed-up over 1 worker", "KiB sent, all_gather"):
        assert words in out
    assert "16 pairs a step on each worker, however many there are." in out
    folder = tmp_path / "here" / "profiles" / "mine"
    found = read(folder)
    assert [(one["batch"], len(one["workers"])) for one in found["profiles"]] == [(16, 1), (32, 2)]
    assert "--sizes=1,2" in found["command"]
    assert (folder / "profile.png").is_file()
    assert (folder / "workers-2" / "trace-fastclip-v3-rank1.json.gz").is_file()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--steps=0", "--steps 0 must be at least 1; try 20"),
        ("--warmup=-1", "--warmup -1 must be at least 1"),
        ("--steps=many", "invalid int value.*--help"),
        ("--sizes=1,two", "--sizes 1,two must be numbers of workers"),
        ("--sizes=0", "--sizes 0 must be numbers of workers"),
        ("--algorithm=openclip,fastclip-v9", "fastclip-v9"),
        ("--config=emojis", "Did you mean emoji"),
        ("--stpes=3", "There is no option stpes"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(call, tmp_path, word, message):
    with pytest.raises(ValueError, match=message):
        call(word)
    assert not list((tmp_path / "here").iterdir())


def test_sizes_need_no_launcher(call, monkeypatch):
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match="without torchrun"):
        call("--sizes=1,2")


def test_the_folder_is_named_after_the_recipe(lab, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = lab.options("x", "fastclip-v1")
    del options[options.index("--out") : options.index("--out") + 2]
    call_command("profile", [*options, "--steps=1", "--warmup=1"])
    assert (tmp_path / "profiles" / "scenes" / "profile.json").is_file()
