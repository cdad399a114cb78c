"""Damaged and hostile files: a reader raises an error of ours, or none. `make fuzz` searches longer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.errors import PathError
from tests.fuzzing import CHANGES, CHUNKS, READERS, damaged, is_ours, read_both

EXAMPLES = {"checkpoint tensors": 50, "yaml": 50}  # the slow ones; the others: 200

_CHUNKS = st.one_of(st.binary(max_size=20), st.sampled_from(CHUNKS))
_CHANGES = st.lists(
    st.tuples(st.sampled_from(CHANGES), st.floats(0, 1), st.floats(0, 1), _CHUNKS), min_size=1, max_size=4
)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_damaged_files_raises_errors_of_ours_or_none(name, tmp_path_factory):
    reader, folder = READERS[name], tmp_path_factory.mktemp("fuzz")
    seeds = reader.seeds(folder)

    @settings(max_examples=EXAMPLES.get(name, 200), derandomize=True, deadline=None, database=None)
    @given(st.sampled_from(seeds), _CHANGES)
    def check(seed, changes):
        read_both(reader, damaged(seed, changes), folder)

    check()


@pytest.mark.parametrize("name", READERS)
def test_the_files_that_are_damaged_are_valid(name, tmp_path):
    for seed in READERS[name].seeds(tmp_path):
        READERS[name].read(seed, tmp_path)
        if repair := READERS[name].repair:
            READERS[name].read(repair(seed), tmp_path)


def test_errors_of_ours_are_told_from_others():
    assert is_ours(PathError("a.tar", "is damaged."))
    assert not any(is_ours(error) for error in (OSError(), ValueError(), KeyError("a"), RecursionError()))
