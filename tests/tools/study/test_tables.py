"""Tables say what plain arithmetic over the runs says, and nothing of what is not there."""

import json
from statistics import fmean, stdev

import pytest

from fastclip.tools.study import tables as tables_module
from fastclip.tools.study.arms import Arm
from fastclip.tools.study.captions import EqualCaptions
from fastclip.tools.study.tables import find_baselines, print_study, shown, study_tables
from tests.tools.study.studies import make_study, read_study, value_of


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Captions have tests of their own; the batches that were asked for."""
    asked = []

    def count(config, progress):
        asked.append(config.batch.size)
        return EqualCaptions(0.1, 0.11, 0.5, 320, 640)

    monkeypatch.setattr(tables_module, "equal_captions", count)
    return asked


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study")


def rows_of(study, name="Mean"):
    found = study_tables(read_study(study))
    table = next(table for table in found.tables if table.measure.name == name)
    return {row.arm: row for row in table.rows}


def test_a_row_is_mean_and_sd_over_seeds(study):
    arm = read_study(study).arms[0]
    values = [fmean(value_of(arm, seed, task) for task in range(3)) for seed in range(3)]
    summary = rows_of(study)[arm.name].summary
    assert summary == (pytest.approx(fmean(values)), pytest.approx(stdev(values)), 3)


def test_an_arm_is_compared_with_the_baseline_of_its_own_batch(study):
    rows = rows_of(study)
    assert rows["fastclip-v3-b32"].baseline == "openclip-b32"
    assert rows["fastclip-v3-b64"].baseline == "openclip-b64"
    assert rows["fastclip-v3-b64"].improvement == pytest.approx(0.1)
    assert rows["fastclip-v3-b64"].difference.mean == pytest.approx(0.1)
    assert rows["fastclip-v3-b64"].difference.high == pytest.approx(0.1)  # the seed does the same to both
    assert rows["openclip-b32"].baseline is None
    assert rows["openclip-b32"].improvement is None


def test_the_best_is_marked_among_those_that_are_compared(study):
    assert [row.arm for row in rows_of(study).values() if row.best] == ["fastclip-v3-b32", "fastclip-v3-b64"]


def test_without_a_baseline_the_best_of_all_is_marked(tmp_path):
    study = make_study(tmp_path / "study", baseline={})
    rows = rows_of(study)
    assert [row.arm for row in rows.values() if row.best] == ["fastclip-v3-b64"]
    assert all(row.difference is None for row in rows.values())


def test_an_arm_that_lacks_seeds_is_told_and_is_not_the_best(tmp_path):
    def done(arm, seed):
        return arm.name != "fastclip-v3-b64" or seed == 0

    rows = rows_of(make_study(tmp_path / "study", done))
    partial = rows["fastclip-v3-b64"]
    assert (partial.missing, partial.summary.n, partial.summary.sd) == (2, 1, None)
    assert not partial.best
    assert partial.difference.n == 1
    assert partial.difference.low is None
    assert rows["openclip-b64"].best


def test_an_arm_without_scores_has_no_summary_and_others_do_not_change(tmp_path):
    rows = rows_of(make_study(tmp_path / "study", lambda arm, seed: arm.name != "openclip-b32"))
    assert rows["openclip-b32"].summary is None
    assert rows["fastclip-v3-b32"].improvement is None
    assert rows["fastclip-v3-b64"].improvement == pytest.approx(0.1)


def test_the_effort_to_match_the_baseline_is_counted_in_evaluations(study):
    found = study_tables(read_study(study))
    assert found.effort_measure == "mean_recall@1"
    (row, _) = found.effort
    # 0.4032 · step/40 reaches 0.3032 at the evaluation of step 40: that of step 30 is below it
    assert (row.arm, row.baseline, row.reached, row.seeds) == ("fastclip-v3-b32", "openclip-b32", 3, 3)
    assert (row.samples, row.seconds) == (1.0, 1.0)


def test_an_effort_is_told_only_where_every_seed_reached_the_score(study):
    slow = study / "runs" / "fastclip-v3-b32-seed1" / "metrics.jsonl"
    lines = [json.loads(line) for line in slow.read_text().splitlines()]
    for line in lines:
        if "evaluation" in line:
            line["evaluation"]["mean_recall@1"] /= 10
    slow.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = study_tables(read_study(study)).effort[0]
    assert (row.samples, row.seconds, row.reached, row.seeds) == (None, None, 2, 3)


def test_equal_captions_are_counted_once_for_each_batch(study, counted):
    found = study_tables(read_study(study))
    assert len(found.captions) == 4
    assert len(counted) == 1  # the configs of these runs have one batch size
    assert found.captions[0].found.actual == 0.1


def test_captions_that_cannot_be_counted_are_told_once(study, monkeypatch):
    def gone(config, progress):
        raise ValueError("data/train matches no file.")

    monkeypatch.setattr(tables_module, "equal_captions", gone)
    found = study_tables(read_study(study))
    told = [sentence for sentence in found.missing if "data/train matches no file." in sentence]
    assert len(told) == 1
    assert found.captions == []


def test_an_empty_study_says_that_there_are_no_scores(tmp_path):
    found = study_tables(read_study(make_study(tmp_path / "study", lambda arm, seed: False)))
    assert found.tables == []
    assert any("There are no scores yet" in sentence for sentence in found.missing)


def test_a_baseline_without_a_match_is_told(tmp_path):
    study = make_study(
        tmp_path / "study",
        vary={},
        arms=[{"algorithm": "openclip", "batch.size": 32}, {"algorithm": "mbcl", "batch.size": 64}],
    )
    missing = study_tables(read_study(study)).missing
    assert any("No arm can be compared with the baseline (algorithm openclip)" in told for told in missing)


def test_baselines_match_on_all_of_their_other_values():
    arms = [
        Arm("a", {"algorithm": "openclip", "batch.size": 1}),
        Arm("b", {"algorithm": "mbcl", "batch.size": 1, "loss.tau": 0.1}),
        Arm("c", {"algorithm": "mbcl", "batch.size": True}),
        Arm("d", {"algorithm": "mbcl", "batch.size": 1}),
        Arm("e", {"algorithm": "mbcl"}),
    ]
    found = find_baselines(arms, {"algorithm": "openclip"})
    assert found == {"a": None, "b": "a", "c": None, "d": "a", "e": None}


def test_of_several_baselines_that_fit_the_closest_is_taken():
    arms = [
        Arm("a", {"algorithm": "openclip"}),
        Arm("b", {"algorithm": "openclip", "batch.size": 1}),
        Arm("c", {"algorithm": "mbcl", "batch.size": 1, "loss.tau": 0.1}),
        Arm("d", {"algorithm": "mbcl", "batch.size": 2}),
    ]
    found = find_baselines(arms, {"algorithm": "openclip"})
    assert found == {"a": None, "b": None, "c": "b", "d": "a"}


def test_columns_are_the_varied_options_and_names_stand_where_values_do_not_say_them(tmp_path):
    plain = study_tables(read_study(make_study(tmp_path / "a")))
    assert plain.headings == ["algorithm", "batch.size"]
    assert plain.label(plain.arms[0]) == ["openclip", "32"]
    named = [{"algorithm": "openclip"}, {"name": "warm", "algorithm": "mbcl", "loss.tau": 0.1}]
    other = study_tables(read_study(make_study(tmp_path / "b", vary={}, arms=named)))
    assert other.headings == ["arm", "algorithm", "loss.tau"]
    assert [other.label(arm) for arm in other.arms] == [
        ["openclip", "openclip", "–"],
        ["warm", "mbcl", "0.1"],
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(5e-4, "0.0005"), (1e-5, "1e-5"), (True, "true"), (None, "null"), ([1, 2], "[1, 2]")]
)
def test_values_are_shown_as_people_write_them(value, text):
    assert shown(value) == text


def test_a_study_is_printed_for_people_and_for_machines(study, capsys):
    print_study(study)
    printed = capsys.readouterr().out
    assert "Classification & Variants" in printed
    assert "+10.00 [+10.00, +10.00]" in printed
    print_study(study, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["measures"][0]["rows"][2]["difference"]["mean"] == pytest.approx(0.1)
