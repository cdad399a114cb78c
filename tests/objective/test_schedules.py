"""The inner schedule of the paper."""

from itertools import pairwise
from math import cos, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.objective.schedules import cosine


@given(epoch=st.integers(0, 60), decay=st.integers(1, 40), end=st.floats(0.01, 1.0))
def test_gamma_follows_the_papers_cosine_and_then_stays(epoch, decay, end):
    gamma = cosine(epoch, decay, start=1.0, end=end)
    if epoch >= decay:
        assert gamma == end
    else:
        assert gamma == pytest.approx(0.5 * (1 + cos(pi * epoch / decay)) * (1 - end) + end)


@given(decay=st.integers(1, 40), end=st.floats(0.01, 1.0))
def test_gamma_starts_at_one_and_never_rises(decay, end):
    gammas = [cosine(epoch, decay, start=1.0, end=end) for epoch in range(decay + 2)]
    assert gammas[0] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(gammas))
