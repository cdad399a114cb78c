"""Grids and the names of arms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.config.renamed import RENAMED
from fastclip.tools.study.arms import (
    Arm,
    find_baselines,
    grid,
    identity,
    name_arms,
    parse_number,
    shown,
    slug,
)

OPTIONS = (
    "algorithm",
    "batch.size",
    "optim.lr",
    "loss.tau",
    "data.train",
    "model.pretrained",
    "log.every_steps",
)
VALUES = st.one_of(
    st.integers(0, 10**6),
    st.floats(1e-9, 10, allow_nan=False),
    st.booleans(),
    st.none(),
    st.text(max_size=120),
    st.lists(st.floats(0, 1), max_size=2),
)
ARMS = st.lists(
    st.dictionaries(st.sampled_from(OPTIONS), VALUES, max_size=4), min_size=1, max_size=8, unique_by=identity
)


def test_names_contain_the_varied_values():
    assert slug({"algorithm": "openclip", "batch.size": 32}) == "openclip-b32"
    assert (
        slug({"algorithm": "fastclip-v3", "optim.lr": 1e-5, "loss.tau": 0.1}) == "fastclip-v3-lr1e-5-tau0.1"
    )
    assert slug({"data.timeout": 2.0}) == "data.timeout2.0"  # there is another timeout
    assert slug({"data.keep_decoded": True}) == "keep_decodedtrue"


@pytest.mark.parametrize("old", RENAMED)
def test_a_renamed_option_keeps_its_label_for_existing_folders(old):
    before = {"log.every": "log.every", "evaluate.every": "evaluate.every",
              "checkpoint.minutes": "minutes", "checkpoint.steps": "steps"}  # fmt: skip
    assert slug({RENAMED[old]: 2.0}) == f"{before[old]}2.0"


def test_a_name_with_replaced_characters_has_a_hash():
    one, other = slug({"data.train": "a/b"}), slug({"data.train": "a*b"})
    assert one != other
    assert one.startswith("traina_b-")
    assert other.startswith("traina_b-")


@given(ARMS)
def test_names_are_unique_safe_and_deterministic(arms):
    named = name_arms([(None, values) for values in arms], alone="emoji")
    names = [arm.name.lower() for arm in named]
    assert len({*names}) == len(names)
    assert names == [arm.name.lower() for arm in name_arms([(None, values) for values in arms], "emoji")]
    for name in names:
        assert 0 < len(name) < 120
        assert not set(name) & set('/\\:*?"<>| \n\0')
        assert name not in (".", "..")


@given(ARMS, ARMS)
def test_an_arm_keeps_its_name_when_others_are_added(arms, more):
    before = [arm.name for arm in name_arms([(None, values) for values in arms], "emoji")]
    known = {identity(values) for values in arms}
    both = [*arms, *(values for values in more if identity(values) not in known)]
    assert [arm.name for arm in name_arms([(None, values) for values in both], "emoji")][
        : len(arms)
    ] == before


@given(
    st.dictionaries(st.sampled_from(OPTIONS), st.lists(st.integers(), min_size=1, max_size=3, unique=True))
)
def test_a_grid_has_each_combination_once(choices):
    arms, size = grid(choices), 1
    for values in choices.values():
        size *= len(values)
    assert len({identity(arm) for arm in arms}) == len(arms) == size
    assert all(arm[option] in choices[option] for arm in arms for option in choices)


def test_the_last_option_changes_fastest():
    arms = grid({"algorithm": ["a", "b"], "batch.size": [16, 64]})
    assert [tuple(arm.values()) for arm in arms] == [("a", 16), ("a", 64), ("b", 16), ("b", 64)]


def test_strings_that_are_numbers_are_parsed():
    assert parse_number("5e-4") == 5e-4
    assert parse_number("64") == 64
    assert isinstance(parse_number("64"), int)
    assert parse_number("fastclip-v3") == "fastclip-v3"
    assert parse_number("nan") == "nan"


def test_baselines_match_in_all_their_other_values():
    arms = [
        Arm("a", {"algorithm": "openclip", "batch.size": 1}),
        Arm("b", {"algorithm": "mbcl", "batch.size": 1, "loss.tau": 0.1}),
        Arm("c", {"algorithm": "mbcl", "batch.size": True}),
        Arm("d", {"algorithm": "mbcl", "batch.size": 1}),
        Arm("e", {"algorithm": "mbcl"}),
    ]
    found = find_baselines(arms, {"algorithm": "openclip"})
    assert found == {"a": None, "b": "a", "c": None, "d": "a", "e": None}


def test_the_closest_of_several_matching_baselines_is_taken():
    arms = [
        Arm("a", {"algorithm": "openclip"}),
        Arm("b", {"algorithm": "openclip", "batch.size": 1}),
        Arm("c", {"algorithm": "mbcl", "batch.size": 1, "loss.tau": 0.1}),
        Arm("d", {"algorithm": "mbcl", "batch.size": 2}),
    ]
    found = find_baselines(arms, {"algorithm": "openclip"})
    assert found == {"a": None, "b": None, "c": "b", "d": "a"}


@pytest.mark.parametrize(
    ("value", "text"), [(5e-4, "0.0005"), (1e-5, "1e-5"), (True, "true"), (None, "null"), ([1, 2], "[1, 2]")]
)
def test_values_are_shown_in_their_usual_notation(value, text):
    assert shown(value) == text
