"""A run has a curve for each metric that its records have, and no others."""

import math

import pytest

from fastclip.run.folder import read_run
from fastclip.tools.report.curves import SAMPLES, curves, curves_by_samples_and_time, time_axis
from tests.tools.report.folders import BATCH, make_run

ALL = ["evaluation", "loss", "tau", "radius", "log_u", "unvisited", "gamma", "lr", "grad_norm",
       "samples_per_second"]  # fmt: skip


def curves_by_key(run):
    return {curve.key: curve for curve in curves(run)}


@pytest.mark.slow
def test_fastclip_v3_has_every_curve(run):
    assert list(curves_by_key(run)) == ALL


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["openclip", "siglip"])
def test_baseline_algorithms_have_no_curves_of_estimators(tmp_path, algorithm):
    keys = list(curves_by_key(read_run(make_run(tmp_path / "a", algorithm))))
    assert keys == ["evaluation", "loss", "tau", "lr", "grad_norm", "samples_per_second"]


def test_a_run_without_records_and_evaluations_has_no_curves(tmp_path):
    assert curves_by_key(read_run(make_run(tmp_path / "a", steps=0, evaluated=False))) == {}


def test_a_curve_whose_values_are_all_null_is_omitted(run):
    for record in run.records:
        record["grad_norm"] = None
    assert "grad_norm" not in {curve.key for curve in curves(run)}


def test_a_null_among_values_is_a_gap(run):
    run.records[1]["loss"] = None
    (line,) = next(curve for curve in curves(run) if curve.key == "loss").lines
    assert math.isnan(line.y[1])
    assert line.y[0] == pytest.approx(0.8)
    assert line.x[:2] == [0.5, 1.0]


def test_evaluations_are_in_percent_with_the_best_measure_first(run):
    curve = curves_by_key(run)["evaluation"]
    labels = [line.label for line in curve.lines]
    assert labels == ["mean recall@1", "image recall@1", "text recall@1", "image recall@5"]
    assert curve.lines[0].y == pytest.approx([3, 13, 23, 33, 43])
    assert curve.latest == "43 %"


def test_at_most_five_measures_are_drawn_and_the_rest_are_counted(run):
    for record in run.evaluations:
        record["evaluation"] |= {f"task{i}/acc1": 0.5 for i in range(6)}
    curve = curves(run)[0]
    assert len(curve.lines) == 5
    assert "metrics.jsonl has 5 more" in curve.caption


def test_radius_is_compared_with_rho_and_its_limit(tmp_path):
    levels = curves_by_key(read_run(make_run(tmp_path / "a", **{"loss.rho": 2.5})))["radius"].levels
    assert [(level.label, level.dotted) for level in levels] == [("ρ", False), ("log(B−1)", True)]
    assert [level.value for level in levels] == [2.5, pytest.approx(math.log(BATCH - 1))]


def test_radius_of_an_algorithm_without_rho_is_compared_with_its_limit_only(tmp_path):
    levels = curves_by_key(read_run(make_run(tmp_path / "a", "fastclip-v1")))["radius"].levels
    assert [level.label for level in levels] == ["log(B−1)"]


def test_log_u_has_a_band_from_its_5th_to_95th_percentile(run):
    band = curves_by_key(run)["log_u"].band
    assert (band.low[0], band.high[0]) == (-3.0, -0.5)


def test_evaluation_and_loss_are_also_drawn_against_samples_and_time(run):
    found = {curve.key: curve for curve in curves_by_samples_and_time(run)}
    assert list(found) == ["evaluation-samples", "loss-samples", "evaluation-time", "loss-time"]
    assert found["evaluation-samples"].lines[0].x == [step * BATCH for step in (0, 10, 20, 30, 40)]
    assert found["loss-samples"].lines[0].x[0] == 5 * BATCH
    # 80 seconds are too short for minutes; an evaluation has the time of the record at its step
    assert found["evaluation-time"].axis == "seconds"
    assert found["evaluation-time"].lines[0].x == [0.0, 20.0, 40.0, 60.0, 80.0]


def test_an_evaluation_between_two_records_has_the_time_of_the_later(run):
    run.evaluations[1]["step"] = 7
    assert curves(run, time_axis(60))[0].lines[0].x[1] == 20.0


def test_a_run_without_times_is_not_drawn_against_time(run):
    for record in run.records:
        del record["time"]
    del run.evaluations[0]
    assert {curve.key for curve in curves_by_samples_and_time(run)} == {"evaluation-samples", "loss-samples"}


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [(90, "seconds"), (600, "minutes"), (3 * 3600, "hours"), (200_000, "days"), (0, "seconds")],
)
def test_the_unit_of_the_time_axis_suits_the_duration(seconds, unit):
    assert time_axis(seconds).label == unit


def test_samples_of_an_evaluation_are_computed_from_its_epoch(run):
    assert curves(run, SAMPLES)[0].lines[0].x[-1] == 40 * BATCH
