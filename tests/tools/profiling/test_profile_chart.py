"""The chart of a profile."""

import io
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from fastclip.tools.profiling.profile_chart import _COMMUNICATION, _STEP, draw
from tests.tools.profiling.profiles import profile, rank_profile, times


def measured(ranks):
    step = times(100, computation=60, pure=20 * (ranks > 1), overlap=10 * (ranks > 1))
    return [
        profile(name, [rank_profile(rank, [step]) for rank in range(ranks)], batch=32 * ranks)
        for name in ("openclip", "fastclip-v3")
    ]


def pixels_of(profiles):
    return np.asarray(Image.open(io.BytesIO(draw(profiles))).convert("RGB")) / 255


def area(pixels, colour):
    return int((np.abs(pixels - np.array(to_rgb(colour))).max(axis=2) < 0.02).sum())


def test_areas_of_bars_are_proportional_to_their_times():
    pixels = pixels_of(measured(1))
    others, _, computation = (area(pixels, part.colour) for part in _STEP)
    assert 1.2 < computation / others < 1.8  # 60 ms and 40 ms; the legend has a little of each


@pytest.mark.slow
def test_a_single_rank_has_no_overlap_in_the_chart():
    overlap = _COMMUNICATION[1].colour
    alone, several = (area(pixels_of(measured(ranks)), overlap) for ranks in (1, 2))
    assert several > alone == 0


@pytest.mark.slow
def test_several_numbers_of_ranks_add_a_panel_with_the_speed_up():
    one, both = pixels_of(measured(1)), pixels_of([*measured(1), *measured(2)])
    assert both.shape[0] == one.shape[0]
    assert both.shape[1] > 2 * one.shape[1]


def test_adjacent_parts_differ_without_colour():
    for parts in (_STEP, _COMMUNICATION):
        for lower, upper in pairwise(parts):
            greys = [np.dot(to_rgb(part.colour), (0.299, 0.587, 0.114)) for part in (lower, upper)]
            assert abs(greys[0] - greys[1]) > 0.1 or lower.hatch != upper.hatch


@pytest.mark.slow
def test_the_same_profile_gives_the_same_bytes():
    assert draw(measured(2)) == draw(measured(2))
