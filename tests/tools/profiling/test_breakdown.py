"""The paper's table, from the profiles of all ranks."""

import io
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from fastclip.tools.profiling.breakdown import AlgorithmProfile, as_table, rows, speed_up
from tests.tools.profiling.profiles import profile, rank_profile, times


def test_a_rank_has_means_and_standard_deviations_over_its_steps():
    measured = rank_profile(0, [times(10, computation=4), times(14, computation=8)])
    assert measured.mean("computation") == 6
    assert measured.spread("computation") == pytest.approx(8**0.5)
    assert rank_profile(0, [times(10)]).spread("total") == 0


def test_the_slowest_rank_is_the_one_that_waits_least():
    """All take the same time: the last to arrive has the least pure communication."""
    waits = [5.0, 1.0, 7.0, 3.0]
    measured = profile(
        "openclip", [rank_profile(rank, [times(10, pure=wait)]) for rank, wait in enumerate(waits)]
    )
    assert measured.slowest.rank == 1
    assert measured.median.rank == 0  # 7, 5 | 3, 1: of the two in the middle, the less late


def test_samples_per_second_are_those_of_all_ranks():
    measured = profile("openclip", [rank_profile(0, [times(100)]), rank_profile(1, [times(200)])], batch=64)
    assert measured.samples_per_second == pytest.approx(64 / 0.2)


def test_the_speed_up_is_over_the_fewest_ranks():
    one, two, other = (
        profile("openclip", [rank_profile(0, [times(100)])], batch=32),
        profile("openclip", [rank_profile(r, [times(125)]) for r in range(2)], batch=64),
        profile("fastclip-v3", [rank_profile(r, [times(125)]) for r in range(2)], batch=64),
    )
    profiles = [one, two, other]
    assert speed_up(one, profiles) == 1
    assert speed_up(two, profiles) == pytest.approx(1.6)
    assert speed_up(other, profiles) is None


def test_a_profile_survives_a_round_trip_through_json():
    measured = profile("openclip", [rank_profile(0, [times(10, computation=3)], sent={"all_reduce": 5.0})])
    assert AlgorithmProfile.from_dict(json.loads(json.dumps(asdict(measured)))) == measured


def table_of(*profiles):
    return {(category, algorithm): cells for category, algorithm, cells in rows(list(profiles))}


def test_one_rank_has_one_column_and_no_speed_up():
    table = table_of(
        profile("openclip", [rank_profile(0, [times(10, computation=4), times(12, computation=4)])])
    )
    assert table["total", "openclip"] == ["11.00 (1.41)"]
    assert table["computation", "openclip"] == ["4.00 (0.00)"]
    assert table["others", "openclip"] == ["7.00 (1.41)"]
    assert table["peak memory, MiB", "openclip"] == ["3"]
    assert not [category for category, _ in table if "speed-up" in category or "sent" in category]


def test_several_ranks_have_columns_for_the_median_and_the_slowest():
    one = profile("openclip", [rank_profile(0, [times(100)])], batch=32)
    sent = {"all_reduce": 2.0 * 2**20}
    two = profile(
        "openclip", [rank_profile(r, [times(125, pure=50 - 30 * r)], sent=sent) for r in range(2)], batch=64
    )
    table = table_of(one, two)
    assert table["pure communication", "openclip"] == ["0.00 (0.00)", "50.00 (0.00)", "20.00 (0.00)"]
    assert table["samples/s", "openclip"] == ["320.0", "512.0", ""]
    assert table["speed-up over 1 rank", "openclip"] == ["1.00 ×", "1.60 ×", ""]
    assert table["KiB sent, all_reduce", "openclip"] == ["", "2,048.0", "2,048.0"]


def test_an_algorithm_without_a_kind_of_collective_has_no_row_for_it():
    one, other = (
        profile(name, [rank_profile(r, [times(9)], sent=sent) for r in range(2)])
        for name, sent in (("openclip", {"scatter": 2.0**20}), ("fastclip-v3", {}))
    )
    table = table_of(one, other)
    assert ("KiB sent, scatter", "openclip") in table
    assert ("KiB sent, scatter", "fastclip-v3") not in table


def test_the_table_names_a_category_once_and_all_algorithms_under_it():
    profiles = [profile(name, [rank_profile(0, [times(9)])]) for name in ("openclip", "fastclip-v3")]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(as_table(profiles))
    lines = [line.split() for line in console.export_text().splitlines()]
    at = next(number for number, line in enumerate(lines) if line[:1] == ["computation"])
    assert lines[at][1] == "openclip"
    assert lines[at + 1][0] == "fastclip-v3"
