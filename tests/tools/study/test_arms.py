"""Grids and the names of arms."""

from hypothesis import given
from hypothesis import strategies as st

from fastclip.tools.study.arms import grid, identity, name_arms, number_or_as_it_is, slug

OPTIONS = ("algorithm", "batch.size", "optim.lr", "loss.tau", "data.train", "model.pretrained", "log.every")
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


def test_names_say_what_varies():
    assert slug({"algorithm": "openclip", "batch.size": 32}) == "openclip-b32"
    assert (
        slug({"algorithm": "fastclip-v3", "optim.lr": 1e-5, "loss.tau": 0.1}) == "fastclip-v3-lr1e-5-tau0.1"
    )
    assert slug({"evaluate.every": 2.0}) == "evaluate.every2.0"  # log.every is another
    assert slug({"data.keep_decoded": True}) == "keep_decodedtrue"


def test_a_name_with_replaced_signs_has_a_hash():
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


def test_numbers_that_yaml_takes_for_text_are_numbers():
    assert number_or_as_it_is("5e-4") == 5e-4
    assert number_or_as_it_is("64") == 64
    assert isinstance(number_or_as_it_is("64"), int)
    assert number_or_as_it_is("fastclip-v3") == "fastclip-v3"
    assert number_or_as_it_is("nan") == "nan"
