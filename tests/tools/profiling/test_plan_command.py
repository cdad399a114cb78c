"""`fastclip plan` from the command line."""

import sys
from pathlib import Path

import pytest

from fastclip.cli import call
from fastclip.errors import OptionError, UnknownOption
from fastclip.tools.profiling import plan_command
from fastclip.tools.profiling.network import CLUSTERS, ERRORS, NETWORKS
from tests.data.collections import write_shards
from tests.tools.profiling.plans import advice_on, as_json, job_of, write_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    return write_recipe(tmp_path, monkeypatch)


def test_help_has_examples_and_all_networks(capsys):
    with pytest.raises(SystemExit) as stop:
        call("plan", ["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "usage: fastclip plan" in out
    assert "fastclip plan --config cc3m-medium --network ib --batch_per_gpu 128" in out
    assert all(name in out for name in NETWORKS)


@pytest.mark.slow
def test_it_prints_three_tables_and_notes(recipe, capsys):
    call(
        "plan",
        [*recipe, "--network", "10gbe", "--nodes", "1,2,16", "--compute_ms", "50", "--num_pairs", "1000"],
    )
    out = capsys.readouterr().out
    assert out.count("\nopenclip ") == out.count("\nfastclip-v3 ") == 9  # three sizes in three tables
    assert "activations (estimate)" in out
    assert "exchange / weights" in out
    assert "10gbe, ms" in out
    notes = advice_on(network="10gbe", nodes="1,2,16", compute_ms=50, num_pairs=1000)
    assert notes["computation"].value == 64
    assert "--compute_ms 50" in notes["computation"].text
    assert notes["nodes not measured"].value == 8
    assert "network not measured" in notes
    assert f"{100 * ERRORS.step_unseen.mean:.1f} %" in notes["model error"].text
    assert all(note.text in out for note in notes.values())


@pytest.mark.slow
def test_json_has_the_same_as_data(recipe, capsys):
    options = [
        *recipe,
        "--network=ib",
        "--nodes=2,4",
        "--batch_per_gpu=8",
        "--compute_ms=50",
        "--num_pairs=1000",
    ]
    data = as_json([*options, "--algorithm", "openclip,fastclip-v2"], capsys)
    places = [(row["algorithm"], row["nodes"], row["workers"], row["local_batch"]) for row in data["rows"]]
    assert places == [
        ("openclip", 2, 8, 8),
        ("openclip", 4, 16, 8),
        ("fastclip-v2", 2, 8, 8),
        ("fastclip-v2", 4, 16, 8),
    ]
    assert data["job"].keys() == {"model", "nodes", "gpus_per_node", "network", "pairs", "computation"}
    row = data["rows"][-1]
    assert row["memory"]["state"] == 36 * (63 + 1) + 8
    assert row["sent"]["total"] == row["sent"]["exchange"] + row["sent"]["weights"]
    time = row["time"]
    assert time["low"] <= time["step"] <= time["high"]
    assert time["step"] == pytest.approx(time["computation"] + time["others"] + time["pure"])
    assert time["pairs_per_second"] == pytest.approx(16 * 8 / time["step"] * 1000)
    assert data["model"]["networks"]["ib"]["pace"] == CLUSTERS["ib"].pace
    assert data["model"]["errors"]["step_unseen"]["mean"] == ERRORS.step_unseen.mean
    options = {"nodes": "2,4", "batch_per_gpu": 8, "compute_ms": 50, "num_pairs": 1000}
    notes = advice_on(algorithm="openclip,fastclip-v2", **options)
    assert data["sentences"] == [note.text for note in notes.values()]


def test_the_papers_own_setting_is_predicted_from_its_times_on_one_node():
    job = job_of(config="cc3m-medium", network="slingshot-1", batch_per_gpu=128)
    assert job.num_pairs == 2_700_000
    assert job.nodes == [1, 2, 4, 8]
    assert {name: c[:3] for name, c in job.computation.items()} == {
        "openclip": (157.03, 47.12, 128),
        "fastclip-v3": (158.99, 50.35, 128),
    }
    assert job_of("--batch.micro=auto", config="cc3m-medium", network="slingshot-1").computation
    assert not job_of("--batch.micro=64", config="cc3m-medium", network="slingshot-1").computation


@pytest.mark.slow
def test_without_a_computation_time_memory_and_traffic_are_still_counted(recipe, capsys):
    data = as_json([*recipe, "--network=ib"], capsys)
    assert all(
        row["time"] is None and row["sent"]["total"] and row["memory"]["weights"] for row in data["rows"]
    )
    call("plan", [*recipe, "--network=ib"])
    assert capsys.readouterr().out.count("\nopenclip ") == 8  # four sizes in two tables
    notes = advice_on()
    assert "--compute_ms" in notes["time unknown"].text
    assert "--num_pairs" in notes["state unknown"].text


@pytest.mark.slow
def test_pairs_are_counted_where_the_data_is_available(recipe, tmp_path, capsys):
    data = str(write_shards(tmp_path / "data", 300, 3))
    planned = as_json([*recipe, "--network=ib", "--nodes=1", "--data.train", data], capsys)
    assert planned["job"]["pairs"] == 300


@pytest.mark.parametrize(
    ("options", "option", "value"),
    [
        ([], "network", None),
        (["--network", "50gbe"], "network", "50gbe"),
        (["--network", "ib", "--nodes", "0,2"], "nodes", "0,2"),
        (["--network", "ib", "--nodes", "1 2"], "nodes", "1 2"),
        (["--network", "ib", "--nodes", "-1"], "nodes", "-1"),
        (["--network", "ib", "--gpus_per_node", "0"], "gpus_per_node", 0),
        (["--network", "ib", "--batch_per_gpu", "0"], "batch_per_gpu", 0),
        (["--network", "ib", "--num_pairs", "0"], "num_pairs", 0),
        (["--network", "ib", "--nodes", "3"], "batch.size", 256),
        (["--network", "ib", "--compute_ms", "0"], "compute_ms", 0),
        (["--network", "ib", "--compute_ms", "9", "--profile", "x"], "compute_ms", 9),
        (["--network", "ib", "--profile", "nowhere.json"], "profile", Path("nowhere.json")),
        (["--network", "ib", "--algorithm", "openclip,fastclip-v9"], "algorithm", "fastclip-v9"),
    ],
)
def test_an_invalid_option_is_an_error_that_names_it(options, option, value, recipe):
    with pytest.raises(OptionError) as caught:
        call("plan", [*recipe, *options])
    assert (caught.value.option, caught.value.value) == (option, value)


def test_an_option_of_train_without_its_section_is_suggested_in_full(recipe):
    with pytest.raises(UnknownOption) as caught:
        call("plan", [*recipe, "--network", "ib", "--tau", "3"])
    assert (caught.value.option, caught.value.suggestions) == ("tau", ["loss.tau"])


def test_a_value_of_the_wrong_type_is_an_error_that_quotes_it(recipe):
    with pytest.raises(ValueError, match=r"--gpus_per_node.*'four'"):
        call("plan", [*recipe, "--network", "ib", "--gpus_per_node", "four"])


def test_a_batch_that_is_not_divisible_comes_with_values_that_work():
    with pytest.raises(OptionError) as caught:
        job_of("--batch.size=256", config="emoji", nodes="3")
    error = caught.value
    assert (error.option, error.value, error.example) == ("batch.size", 256, 252)
    assert "12" in error.rule
    assert "--batch_per_gpu 21" in error.advice


def import_anew(monkeypatch, without):
    """Make the command import its parts again, with an error for one module."""
    for name in [name for name in sys.modules if name.startswith("fastclip.tools.profiling.")]:
        if name != plan_command.__name__:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, without, None)


def test_errors_surface_before_torch_is_imported(recipe, monkeypatch):
    import_anew(monkeypatch, without="fastclip.tools.profiling.memory")
    with pytest.raises(OptionError) as caught:
        call("plan", [*recipe, "--network=ib", "--nodes=3"])
    assert caught.value.option == "batch.size"


@pytest.mark.slow
def test_nothing_is_fitted_at_run_time(recipe, monkeypatch, capsys):
    import_anew(monkeypatch, without="scipy.optimize")
    assert as_json([*recipe, "--network=25gbe", "--nodes=2", "--compute_ms=50"], capsys)["rows"][0]["time"]
