"""Which captions are equal."""

import pytest

from fastclip import caption_group


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("A red  car ", "a red car"),
        ("ＲＥＤ car", "red car"),
        ("cafe\u0301", "café"),
        ("STRASSE", "straße"),
        ("a\tred\ncar", "a red car"),
        ("ﬁre", "fire"),
    ],
)
def test_case_white_space_and_unicode_form_do_not_matter(one, other):
    assert caption_group(one) == caption_group(other)


def test_other_captions_are_in_other_groups_of_64_signed_bits():
    groups = {caption_group(f"icon number {i}") for i in range(10_000)}
    assert len(groups) == 10_000
    assert min(groups) < 0 < max(groups)
    assert -(2**63) <= min(groups) <= max(groups) < 2**63
    assert caption_group("a red car") != caption_group("a red, car")


def test_a_lone_surrogate_has_a_group():
    assert caption_group("\ud800") != caption_group("")
