"""Several runs side by side: curves overlaid by metric, final values in a table."""

from pathlib import Path

import pytest

from fastclip.run.folder import read_run
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


def text_of(runs):
    tags = Tags(render_runs(runs).html)
    assert (tags.unbalanced, tags.open) == ([], [])
    return " ".join(tags.text.split())


@pytest.mark.slow
def test_every_measure_has_a_plot_with_one_line_per_run(runs):
    found = {curve.key: curve for curve in overlaid(runs, ["a", "b", "c"])}
    assert list(found)[:3] == ["evaluation-0-epochs", "evaluation-0-samples", "evaluation-0-time"]
    assert [line.label for line in found["evaluation-0-epochs"].lines] == ["a", "b", "c"]
    assert found["evaluation-0-epochs"].lines[2].x == [0.0, 1.0, 2.0]
    assert [line.label for line in found["loss"].lines] == ["a", "b", "c"]
    assert [line.label for line in found["gamma"].lines] == ["a", "c"]  # openclip has none
    assert found["radius"].levels == ()


@pytest.mark.slow
def test_the_page_is_self_contained_with_unique_ids(runs):
    page = render_runs(runs[:2])
    tags = Tags(page.html)
    assert "http" not in page.html.replace("http-equiv", "")
    assert len(tags.all("svg")) == len(page.curves)
    ids = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(ids) == len({*ids})


@pytest.mark.usefixtures("_quick_plots")
def test_final_values_are_those_of_the_last_record(runs):
    text = text_of(runs)
    assert "3 runs" in text
    assert "peer openclip 64 4 finished 43.00" in text
    assert "half fastclip-v3 64 4 in progress 23.00" in text
    assert "1 min 20 s" in text


@pytest.mark.usefixtures("_quick_plots")
def test_scores_of_tasks_have_one_column_per_run(tmp_path):
    folders = [make_run(tmp_path / name) for name in "ab"]
    write_results(folders[0], result("twemoji_words", 0.5), result("mine", 0.25))
    write_results(folders[1], result("twemoji_words", 0.75))
    html = render_runs([read_run(folder) for folder in folders]).html
    text = " ".join(Tags(html).text.split())
    assert "Emoji: Classification (1 of 9 tasks) mean 50.00 75.00" in text
    assert "mine acc1 25.00 not scored" in text
    assert "<b>75.00</b>" in html


@pytest.mark.usefixtures("_quick_plots")
def test_missing_data_is_listed_by_run(folders, tmp_path):
    damaged = make_run(tmp_path / "<b>damaged")
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    text = text_of([read_run(folders[0]), read_run(damaged)])
    assert "<b>damaged: metrics.jsonl: line 14 " in text


@pytest.mark.usefixtures("_quick_plots")
def test_plots_show_the_first_ten_runs(runs):
    many = [runs[0]] * 11
    page = render_runs(many)
    assert "10 of 11 runs" in page.html
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
def test_names_have_as_many_parents_as_it_takes_to_be_distinct(folders, names):
    assert distinct_names([Path(folder) for folder in folders]) == names
