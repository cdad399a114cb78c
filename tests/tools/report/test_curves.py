"""A page has the curves that the metrics hold, and no others."""

import math

import pytest

from fastclip.run.folder import read_run
from fastclip.tools.report.curves import SAMPLES, curves, elsewhere, time_axis
from tests.tools.report.folders import BATCH, make_run

ALL = ["evaluation", "loss", "tau", "radius", "log_u", "unvisited", "gamma", "lr", "grad_norm",
       "samples_per_second"]  # fmt: skip


def drawn(run):
    return {curve.key: curve for curve in curves(run)}


def test_fastclip_v3_has_every_curve(run):
    assert list(drawn(run)) == ALL


@pytest.mark.parametrize("algorithm", ["openclip", "siglip"])
def test_peers_have_no_curves_of_estimators(tmp_path, algorithm):
    found = drawn(read_run(make_run(tmp_path / "a", algorithm)))
    assert list(found) == ["evaluation", "loss", "tau", "lr", "grad_norm", "samples_per_second"]


def test_without_records_and_evaluations_there_are_none(tmp_path):
    assert drawn(read_run(make_run(tmp_path / "a", steps=0, evaluated=False))) == {}


def test_a_curve_whose_values_are_all_null_is_left_out(run):
    for record in run.records:
        record["grad_norm"] = None
    assert "grad_norm" not in {curve.key for curve in curves(run)}


def test_a_null_among_values_is_a_gap(run):
    run.records[1]["loss"] = None
    (line,) = next(curve for curve in curves(run) if curve.key == "loss").lines
    assert math.isnan(line.y[1])
    assert line.y[0] == pytest.approx(0.8)
    assert line.x[:2] == [0.5, 1.0]


def test_evaluations_are_percent_and_the_best_measure_comes_first(run):
    curve = drawn(run)["evaluation"]
    labels = [line.label for line in curve.lines]
    assert labels == ["mean, top 1", "find picture, top 1", "find caption, top 1", "find picture, top 5"]
    assert curve.lines[0].y == pytest.approx([3, 13, 23, 33, 43])
    assert curve.latest == "43 %"


def test_more_measures_than_can_be_told_apart_are_counted(run):
    for record in run.evaluations:
        record["evaluation"] |= {f"task{i}/acc1": 0.5 for i in range(6)}
    curve = curves(run)[0]
    assert len(curve.lines) == 5
    assert "5 more measures are in metrics.jsonl" in curve.caption


def test_the_radius_has_its_goal_and_its_limit(tmp_path):
    levels = drawn(read_run(make_run(tmp_path / "a", **{"loss.rho": 2.5})))["radius"].levels
    assert [(level.label, level.dotted) for level in levels] == [("ρ", False), ("log(B−1)", True)]
    assert [level.value for level in levels] == [2.5, pytest.approx(math.log(BATCH - 1))]


def test_an_algorithm_without_rho_has_the_limit_only(tmp_path):
    levels = drawn(read_run(make_run(tmp_path / "a", "fastclip-v1")))["radius"].levels
    assert [level.label for level in levels] == ["log(B−1)"]


def test_log_u_has_its_band(run):
    band = drawn(run)["log_u"].band
    assert (band.low[0], band.high[0]) == (-3.0, -0.5)


def test_evaluation_and_loss_are_drawn_against_samples_and_time_too(run):
    found = {curve.key: curve for curve in elsewhere(run)}
    assert list(found) == ["evaluation-samples", "loss-samples", "evaluation-time", "loss-time"]
    assert found["evaluation-samples"].lines[0].x == [step * BATCH for step in (0, 10, 20, 30, 40)]
    assert found["loss-samples"].lines[0].x[0] == 5 * BATCH
    # 80 seconds are too few for minutes; an evaluation has the clock of the record at its step
    assert found["evaluation-time"].axis == "seconds"
    assert found["evaluation-time"].lines[0].x == [0.0, 20.0, 40.0, 60.0, 80.0]


def test_an_evaluation_between_two_records_has_the_later_clock(run):
    run.evaluations[1]["step"] = 7
    assert curves(run, time_axis(60))[0].lines[0].x[1] == 20.0


def test_a_run_without_a_clock_is_not_drawn_against_time(run):
    for record in run.records:
        del record["time"]
    del run.evaluations[0]
    assert {curve.key for curve in elsewhere(run)} == {"evaluation-samples", "loss-samples"}


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [(90, "seconds"), (600, "minutes"), (3 * 3600, "hours"), (200_000, "days"), (0, "seconds")],
)
def test_time_has_the_unit_that_suits_it(seconds, unit):
    assert time_axis(seconds).label == unit


def test_samples_of_an_evaluation_come_from_its_epoch(run):
    assert curves(run, SAMPLES)[0].lines[0].x[-1] == 40 * BATCH
