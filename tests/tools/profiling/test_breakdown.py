"""The paper's table, from what each worker found."""

import io
from dataclasses import asdict

import pytest
from rich.console import Console

from fastclip.tools.profiling.breakdown import AlgorithmProfile, as_table, rows, speed_up
from tests.tools.profiling.profiles import profile, times, worker


def test_a_worker_has_means_and_spreads_over_its_steps():
    found = worker(0, [times(10, computation=4), times(14, computation=8)])
    assert found.mean("computation") == 6
    assert found.spread("computation") == pytest.approx(8**0.5)
    assert worker(0, [times(10)]).spread("total") == 0


def test_the_slowest_worker_is_the_one_that_waits_least():
    """All take the same time: who is late has the least pure communication."""
    waits = [5.0, 1.0, 7.0, 3.0]
    found = profile("openclip", [worker(rank, [times(10, pure=wait)]) for rank, wait in enumerate(waits)])
    assert found.slowest.rank == 1
    assert found.median.rank == 0  # 7, 5 | 3, 1: of the two in the middle the one that is less late


def test_pairs_a_second_are_those_of_all_workers():
    found = profile("openclip", [worker(0, [times(100)]), worker(1, [times(200)])], batch=64)
    assert found.samples_per_second == pytest.approx(64 / 0.2)


def test_the_speed_up_is_over_the_fewest_workers():
    one, two, other = (
        profile("openclip", [worker(0, [times(100)])], batch=32),
        profile("openclip", [worker(r, [times(125)]) for r in range(2)], batch=64),
        profile("fastclip-v3", [worker(r, [times(125)]) for r in range(2)], batch=64),
    )
    profiles = [one, two, other]
    assert speed_up(one, profiles) == 1
    assert speed_up(two, profiles) == pytest.approx(1.6)
    assert speed_up(other, profiles) is None


def test_a_profile_comes_back_from_its_json():
    found = profile("openclip", [worker(0, [times(10, computation=3)], sent={"all_reduce": 5.0})])
    assert AlgorithmProfile.from_dict(asdict(found)) == found


def table_of(*profiles):
    return {(category, algorithm): cells for category, algorithm, cells in rows(list(profiles))}


def test_one_worker_has_one_column_and_no_speed_up():
    found = table_of(profile("openclip", [worker(0, [times(10, computation=4), times(12, computation=4)])]))
    assert found["total", "openclip"] == ["11.00 (1.41)"]
    assert found["computation", "openclip"] == ["4.00 (0.00)"]
    assert found["others", "openclip"] == ["7.00 (1.41)"]
    assert found["peak memory, MiB", "openclip"] == ["3"]
    assert not [category for category, _ in found if "speed-up" in category or "sent" in category]


def test_several_sizes_have_the_median_and_the_slowest_worker_side_by_side():
    one = profile("openclip", [worker(0, [times(100)])], batch=32)
    sent = {"all_reduce": 2.0 * 2**20}
    two = profile(
        "openclip", [worker(r, [times(125, pure=50 - 30 * r)], sent=sent) for r in range(2)], batch=64
    )
    found = table_of(one, two)
    assert found["pure communication", "openclip"] == ["0.00 (0.00)", "50.00 (0.00)", "20.00 (0.00)"]
    assert found["samples/s", "openclip"] == ["320.0", "512.0", ""]
    assert found["speed-up over 1 worker", "openclip"] == ["1.00 ×", "1.60 ×", ""]
    assert found["KiB sent, all_reduce", "openclip"] == ["", "2,048.0", "2,048.0"]


def test_an_algorithm_that_sends_nothing_of_a_kind_has_no_line_of_it():
    one, other = (
        profile(name, [worker(r, [times(9)], sent=sent) for r in range(2)])
        for name, sent in (("openclip", {"scatter": 2.0**20}), ("fastclip-v3", {}))
    )
    found = table_of(one, other)
    assert ("KiB sent, scatter", "openclip") in found
    assert ("KiB sent, scatter", "fastclip-v3") not in found


def test_the_table_names_a_category_once_and_all_algorithms_under_it():
    profiles = [profile(name, [worker(0, [times(9)])]) for name in ("openclip", "fastclip-v3")]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(as_table(profiles))
    lines = [line.split() for line in console.export_text().splitlines()]
    at = next(number for number, line in enumerate(lines) if line[:1] == ["computation"])
    assert lines[at][1] == "openclip"
    assert lines[at + 1][0] == "fastclip-v3"
