"""Several runs side by side: curves overlaid by measure, final values in a table."""

from pathlib import Path

import pytest

from fastclip.run.folder import read_run
from fastclip.tools.report import output as output_module
from fastclip.tools.report.runs_page import distinct_names, overlaid, render_runs
from tests.tools.report.folders import make_run, result, write_results
from tests.tools.report.test_run_page import Tags


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [make_run(root / "v3"), make_run(root / "peer", "openclip"), make_run(root / "half", steps=20)]


@pytest.fixture
def runs(folders):
    return [read_run(folder) for folder in folders]


@pytest.fixture
def _quick_plots(monkeypatch):
    monkeypatch.setattr(output_module, "draw", lambda curve: "<svg></svg>")


def text_of(runs):
    tags = Tags(render_runs(runs).html)
    assert (tags.unbalanced, tags.open) == ([], [])
    return " ".join(tags.text.split())


def test_every_measure_has_a_plot_with_a_line_for_each_run(runs):
    found = {curve.key: curve for curve in overlaid(runs, ["a", "b", "c"])}
    assert list(found)[:3] == ["evaluation-0-epochs", "evaluation-0-samples", "evaluation-0-time"]
    assert [line.label for line in found["evaluation-0-epochs"].lines] == ["a", "b", "c"]
    assert found["evaluation-0-epochs"].lines[2].x == [0.0, 1.0, 2.0]
    assert [line.label for line in found["loss"].lines] == ["a", "b", "c"]
    assert [line.label for line in found["gamma"].lines] == ["a", "c"]  # openclip has none
    assert found["radius"].levels == ()


def test_the_page_is_self_contained_and_no_ids_clash(runs):
    page = render_runs(runs[:2])
    tags = Tags(page.html)
    assert "http" not in page.html.replace("http-equiv", "")
    assert len(tags.all("svg")) == len(page.curves)
    ids = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(ids) == len({*ids})


@pytest.mark.usefixtures("_quick_plots")
def test_final_values_are_those_of_the_last_record(runs):
    text = text_of(runs)
    assert "3 runs side by side" in text
    assert "peer openclip 64 4 finished 43.00" in text
    assert "half fastclip-v3 64 4 in progress 23.00" in text
    assert "1 min 20 s" in text


@pytest.mark.usefixtures("_quick_plots")
def test_scores_of_tasks_stand_beside_each_other(tmp_path):
    folders = [make_run(tmp_path / name) for name in "ab"]
    write_results(folders[0], result("twemoji_words", 0.5), result("mine", 0.25))
    write_results(folders[1], result("twemoji_words", 0.75))
    html = render_runs([read_run(folder) for folder in folders]).html
    text = " ".join(Tags(html).text.split())
    assert "Emoji: Classification (1 of 9 tasks) mean 50.00 75.00" in text
    assert "mine acc1 25.00 not scored" in text
    assert "<b>75.00</b>" in html


@pytest.mark.usefixtures("_quick_plots")
def test_what_is_missing_is_told_by_run(folders, tmp_path):
    broken = make_run(tmp_path / "<b>roken")
    with (broken / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    text = text_of([read_run(folders[0]), read_run(broken)])
    assert "<b>roken: metrics.jsonl: line 14 is no record and was left out." in text


@pytest.mark.usefixtures("_quick_plots")
def test_more_runs_than_can_be_told_apart_are_in_the_table_only(runs):
    many = [runs[0]] * 11
    page = render_runs(many)
    assert "Plots show the first 10 of 11 runs" in page.html
    assert all(len(curve.lines) == 10 for curve in page.curves)


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["x/run", "y/run"], ["x/run", "y/run"]),
        (["x/run", "y/run", "x/other"], ["x/run", "y/run", "x/other"]),
        (["runs/a"], ["a"]),
    ],
)
def test_runs_are_named_by_as_much_of_their_path_as_it_takes(folders, names):
    assert distinct_names([Path(folder) for folder in folders]) == names
