"""Rendered tables: the best in bold, partial ones marked, missing ones reported."""

import io
import json

import pytest
from rich.console import Console

from fastclip.tools.study.rendering import Best, as_markdown, for_terminal, grids
from fastclip.tools.study.result_tables import study_tables
from tests.tools.study.studies import make_study, read_study

pytestmark = pytest.mark.usefixtures("_counted_captions")


@pytest.fixture
def tables(tmp_path):
    return study_tables(read_study(make_study(tmp_path / "study")))


@pytest.fixture
def partial(tmp_path):
    def done(arm, seed):
        return arm.name != "openclip-b32" and (arm.name != "fastclip-v3-b64" or seed < 2)

    return study_tables(read_study(make_study(tmp_path / "study", done)))


def grid_of(tables, title):
    return next(grid for grid in grids(tables) if grid.title == title)


def test_the_summary_is_the_table_of_the_paper(tables):
    grid = grid_of(tables, "Summary")
    assert grid.headings == ["algorithm", "batch.size", "Mean", "Retrieval", "Classification & Variants",
                             "improvement"]  # fmt: skip
    assert grid.rows[2] == [
        "fastclip-v3", "32", "46.32 (1.00)", "41.32 (1.00)", "48.82 (1.00)", "+10.00, +10.00, +10.00",
    ]  # fmt: skip
    assert grid.rows[0][-1] == ""
    assert [isinstance(cell, Best) for cell in grid.rows[2]] == [False, False, True, True, True, False]
    assert "Mean: 3 of 19 tasks" in grid.note


def test_a_metric_has_seeds_differences_and_intervals(tables):
    grid = grid_of(tables, "Retrieval")
    assert grid.rows[3][2:] == [
        "41.64 (1.00)", "3", "+10.00", "+10.00 [+10.00, +10.00]",
    ]  # fmt: skip
    assert grid.rows[0][4:] == ["–", "–"]


def test_partial_and_missing_scores_are_marked(partial):
    rows = {row[0] + row[1]: row for row in grid_of(partial, "Mean").rows}
    assert rows["openclip32"][2:4] == ["missing", "0 of 3"]
    assert rows["fastclip-v364"][2].endswith("*")
    assert rows["fastclip-v364"][3] == "2 of 3"
    assert rows["fastclip-v332"][4:] == ["–", "no seed in common"]


def test_every_task_has_a_row_with_all_arms(tables):
    grid = grid_of(tables, "Tasks")
    assert [row[0] for row in grid.rows] == ["twemoji_retrieval", "twemoji_words",
                                                  "hard_twemoji_categories"]  # fmt: skip
    assert len(grid.rows[0]) == 2 + 4


def test_markdown_has_the_best_in_bold_and_one_line_per_row(tables):
    text = as_markdown(tables)
    assert "| fastclip-v3 | 32 | **46.32 (1.00)** | **41.32 (1.00)** |" in text
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) <= 1


def test_markdown_escapes_characters_that_end_a_cell(tmp_path):
    arms = [{"algorithm": "openclip", "data.train": "a|b\nc"}]
    found = study_tables(read_study(make_study(tmp_path / "study", vary={}, arms=arms, baseline={})))
    assert "a\\|b c" in as_markdown(found)


def test_missing_runs_are_reported_in_every_format(partial):
    assert any("openclip-b32-seed0" in part for part in for_terminal(partial) if isinstance(part, str))
    assert "- openclip-b32-seed0 " in as_markdown(partial)
    assert any("openclip-b32-seed0" in sentence for sentence in partial["missing"])


def test_json_has_fractions_and_the_values_of_seeds(tables):
    found = json.loads(json.dumps(tables))
    mean = found["measures"][0]
    assert (mean["name"], mean["kind"], mean["partial"]) == ("Mean", "mean", "3 of 19 tasks")
    row = mean["rows"][2]
    assert row["arm"] == "fastclip-v3-b32"
    assert row["summary"]["n"] == 3
    assert row["values"].keys() == {"0", "1", "2"}
    assert found["effort"]["measure"] == "mean_recall@1"
    assert found["equal_captions"][0]["found"]["actual"] == 0.1


def test_names_are_not_interpreted_as_markup(tmp_path):
    arms = [{"algorithm": "openclip", "data.train": "[red]x[/red]"}]
    found = study_tables(read_study(make_study(tmp_path / "study", vary={}, arms=arms, baseline={})))
    console = Console(width=200, record=True, file=io.StringIO())
    for part in for_terminal(found):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    assert "[red]x[/red]" in console.export_text()


def test_tuning_shows_every_trial_and_the_choice(tmp_path):
    study = make_study(tmp_path / "study", vary={"algorithm": ["openclip"]})
    tried = [{"values": {"optim.lr": lr}, "score": s, "error": e}
             for lr, s, e in ((1e-3, 0.4, ""), (2e-3, 0.5, ""), (4e-3, None, "it\ndiverged"))]  # fmt: skip
    chosen = {"arm": "openclip", "chosen": {"optim.lr": 2e-3}, "tried": tried}
    (study / "tuning.json").write_text(json.dumps({"measure": "mean_recall@1", "arms": [chosen]}))
    found = study_tables(read_study(study))
    grid = grid_of(found, "Tuning")
    assert grid.headings == ["arm", "optim.lr 0.001", "optim.lr 0.002", "optim.lr 0.004"]
    assert grid.rows == [["openclip", "40.00", "50.00 ✓", "failed"]]
    (sentence,) = [one for one in found["missing"] if "0.004" in one]
    assert "openclip" in sentence
    assert sentence.endswith("diverged")


def test_wide_tables_are_split_on_a_terminal_only(tmp_path):
    study = make_study(tmp_path / "study", vary={"batch.size": list(range(8, 21))}, baseline={}, seeds=[0])
    found = study_tables(read_study(study))
    pieces = [
        part for part in for_terminal(found) if not isinstance(part, str) and str(part.title) == "Tasks"
    ]
    assert [len(piece.columns) for piece in pieces] == [2 + 6, 2 + 6, 2 + 1]
    assert len(grid_of(found, "Tasks").headings) == 2 + 13


def test_arms_with_the_same_batches_share_a_row_of_equal_captions(tables):
    (row,) = grid_of(tables, "Equal captions").rows
    assert row[0] == "openclip-b32 and 3 more"


def test_columns_are_the_varied_options_and_names_that_do_not_follow_from_them(tmp_path):
    plain = next(grids(study_tables(read_study(make_study(tmp_path / "a")))))
    assert plain.headings[: plain.names] == ["algorithm", "batch.size"]
    assert plain.rows[0][: plain.names] == ["openclip", "32"]
    named = [{"algorithm": "openclip"}, {"name": "warm", "algorithm": "mbcl", "loss.tau": 0.1}]
    other = next(grids(study_tables(read_study(make_study(tmp_path / "b", vary={}, arms=named)))))
    assert other.headings[: other.names] == ["arm", "algorithm", "loss.tau"]
    assert [row[: other.names] for row in other.rows] == [
        ["openclip", "openclip", "–"],
        ["warm", "mbcl", "0.1"],
    ]
