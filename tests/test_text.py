import pytest

from fastclip.text import did_you_mean, duration


def test_the_closest_name_is_suggested_if_any_is_close():
    assert did_you_mean("adam", ["adamw", "lion"]) == " Did you mean adamw?"
    assert did_you_mean("zzz", ["adamw", "lion"]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (130, "2 min 10 s"),
        (11_100, "3 h 5 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text
