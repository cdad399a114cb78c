"""`fastclip plan` as a person calls it."""

import sys

import pytest

from fastclip.cli import call
from fastclip.tools.profiling import plan_command
from fastclip.tools.profiling.network import CLUSTERS, ERRORS, NETWORKS
from tests.data.collections import write_shards
from tests.tools.profiling.plans import as_json, write_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    return write_recipe(tmp_path, monkeypatch)


def test_help_teaches_with_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        call("plan", ["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "usage: fastclip plan" in out
    assert "fastclip plan --config cc3m-medium --network ib --batch-per-gpu 128" in out
    assert all(name in out for name in NETWORKS)


def test_it_prints_a_table_for_each_question_and_what_they_mean(recipe, capsys):
    call(
        "plan", [*recipe, "--network", "10gbe", "--nodes", "1,2,16", "--compute-ms", "50", "--pairs", "1000"]
    )
    out = capsys.readouterr().out
    for title in ("Memory of a worker, MiB", "Sent by a worker in a step, MB", "Time of a step on 10gbe, ms"):
        assert title in out
    assert out.count("\nopenclip ") == out.count("\nfastclip-v3 ") == 9  # three sizes in three tables
    assert "Computation is 50.0 ms and others 0.0 ms a step: --compute-ms 50, at 64 pairs a GPU." in out
    assert "10gbe is not in the paper's tables." in out
    assert "Nobody measured more than 8 nodes" in out
    assert f"{100 * ERRORS.step_unseen.mean:.1f} %" in out


def test_json_has_the_same_as_data(recipe, capsys):
    words = [*recipe, "--network=ib", "--nodes=2,4", "--batch-per-gpu=8", "--compute-ms=50", "--pairs=1000"]
    found = as_json([*words, "--algorithm", "openclip,fastclip-v2"], capsys)
    places = [(row["algorithm"], row["nodes"], row["workers"], row["local_batch"]) for row in found["rows"]]
    assert places == [
        ("openclip", 2, 8, 8),
        ("openclip", 4, 16, 8),
        ("fastclip-v2", 2, 8, 8),
        ("fastclip-v2", 4, 16, 8),
    ]
    row = found["rows"][-1]
    assert row["memory"]["state"] == 36 * (63 + 1) + 8
    assert row["sent"]["total"] == row["sent"]["exchange"] + row["sent"]["weights"]
    time = row["time"]
    assert time["low"] <= time["step"] <= time["high"]
    assert time["step"] == pytest.approx(time["computation"] + time["others"] + time["pure"])
    assert time["pairs_per_second"] == pytest.approx(16 * 8 / time["step"] * 1000)
    assert found["model"]["networks"]["ib"]["pace"] == CLUSTERS["ib"].pace
    assert found["model"]["errors"]["step_unseen"]["mean"] == ERRORS.step_unseen.mean
    assert found["sentences"]


def test_the_papers_own_setting_is_predicted_from_its_one_node_row(capsys, monkeypatch):
    class Small(Exception):
        pass

    def stop(job):
        raise Small(job)

    monkeypatch.setattr("fastclip.tools.profiling.plan.make_plan", stop)  # a ResNet50 takes a while
    with pytest.raises(Small) as stopped:
        call("plan", ["--config", "cc3m-medium", "--network", "slingshot-1", "--batch-per-gpu", "128"])
    (job,) = stopped.value.args
    assert job.pairs == 2_700_000
    assert job.nodes == [1, 2, 4, 8]
    assert {name: c[:3] for name, c in job.computation.items()} == {
        "openclip": (157.03, 47.12, 128),
        "fastclip-v3": (158.99, 50.35, 128),
    }


def test_without_a_time_it_still_counts_memory_and_bytes(recipe, capsys):
    call("plan", [*recipe, "--network=ib"])
    out = capsys.readouterr().out
    assert "Sent by a worker" in out
    assert "Time of a step" not in out
    assert "How long a step takes cannot be said: give --compute-ms" in out
    assert "Give --pairs to count it." in out


def test_pairs_are_counted_where_the_data_are(recipe, tmp_path, capsys):
    data = str(write_shards(tmp_path / "data", 300, 3))
    found = as_json([*recipe, "--network=ib", "--nodes=1", "--data.train", data], capsys)
    assert found["job"]["pairs"] == 300


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--network is missing. Choose one of: 10gbe"),
        (["--network", "50gbe"], "--network 50gbe is unknown. Did you mean 25gbe"),
        (["--network", "ib", "--nodes", "0,2"], "--nodes 0,2 must be whole numbers above 0"),
        (["--network", "ib", "--nodes", "1 2"], "--nodes 1 2 must be whole numbers above 0"),
        (["--network", "ib", "--nodes", "-1"], "--nodes -1 must be whole numbers above 0"),
        (["--network", "ib", "--gpus-per-node", "0"], "--gpus-per-node 0 must be at least 1"),
        (["--network", "ib", "--batch-per-gpu", "0"], "--batch-per-gpu 0 must be at least 1"),
        (["--network", "ib", "--pairs", "0"], "--pairs 0 must be at least 1"),
        (["--network", "ib", "--nodes", "3"], "batch.size=256 cannot be divided by 12 workers "
         "(3 nodes of 4). Try --batch.size 252, other --nodes, or --batch-per-gpu 21"),
        (["--network", "ib", "--compute-ms", "0"], "--compute-ms 0.0 must be a positive number"),
        (["--network", "ib", "--compute-ms", "9", "--profile", "x"], "say the same thing in two ways"),
        (["--network", "ib", "--profile", "nowhere.json"], "there is no nowhere.json"),
        (["--network", "ib", "--algorithm", "openclip,fastclip-v9"], "algorithm='fastclip-v9' is unknown"),
        (["--network", "ib", "--tau", "3"], "There is no option tau. Did you mean loss.tau"),
        (["--network", "ib", "--gpus-per-node", "four"], "`fastclip plan --help` shows"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_what_to_do(words, told, recipe):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call("plan", [*recipe, *words])
    assert told in str(error.value)


def import_anew(monkeypatch, without):
    """Let the verb import its parts again, with an error for one module."""
    for name in [name for name in sys.modules if name.startswith("fastclip.tools.profiling.")]:
        if name != plan_command.__name__:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, without, None)


def test_mistakes_are_told_before_torch_is_imported(recipe, monkeypatch):
    import_anew(monkeypatch, without="fastclip.tools.profiling.memory")
    with pytest.raises(ValueError, match=r"cannot be divided by 12 workers"):
        call("plan", [*recipe, "--network=ib", "--nodes=3"])


def test_nothing_is_fitted_at_a_call(recipe, monkeypatch, capsys):
    import_anew(monkeypatch, without="scipy.optimize")
    assert as_json([*recipe, "--network=25gbe", "--nodes=2", "--compute-ms=50"], capsys)["rows"][0]["time"]
