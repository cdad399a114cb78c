"""The picture of a profile."""

import io
from itertools import pairwise

import numpy as np
from matplotlib.colors import to_rgb
from PIL import Image

from fastclip.tools.profiling.profile_chart import _COMMUNICATION, _STEP, draw
from tests.tools.profiling.profiles import profile, times, worker


def measured(size):
    step = times(100, computation=60, pure=20 * (size > 1), overlap=10 * (size > 1))
    return [
        profile(name, [worker(rank, [step]) for rank in range(size)], batch=32 * size)
        for name in ("openclip", "fastclip-v3")
    ]


def picture(profiles):
    return np.asarray(Image.open(io.BytesIO(draw(profiles))).convert("RGB")) / 255


def area(pixels, colour):
    return int((np.abs(pixels - np.array(to_rgb(colour))).max(axis=2) < 0.02).sum())


def test_parts_of_a_step_are_as_large_as_their_times():
    pixels = picture(measured(1))
    others, _, computation = (area(pixels, part.colour) for part in _STEP)
    assert 1.2 < computation / others < 1.8  # 60 ms and 40 ms; the legend has a little of each


def test_what_does_not_happen_is_not_drawn():
    overlap = _COMMUNICATION[1].colour
    alone, several = (area(picture(measured(size)), overlap) for size in (1, 2))
    assert several > alone == 0


def test_several_sizes_bring_a_panel_with_the_speed_up():
    one, both = picture(measured(1)), picture([*measured(1), *measured(2)])
    assert both.shape[0] == one.shape[0]
    assert both.shape[1] > 2 * one.shape[1]


def test_parts_that_touch_are_told_apart_without_colours():
    for parts in (_STEP, _COMMUNICATION):
        for lower, upper in pairwise(parts):
            greys = [np.dot(to_rgb(part.colour), (0.299, 0.587, 0.114)) for part in (lower, upper)]
            assert abs(greys[0] - greys[1]) > 0.1 or lower.hatch != upper.hatch


def test_the_same_profile_gives_the_same_bytes():
    assert draw(measured(2)) == draw(measured(2))
