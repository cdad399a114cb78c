"""Errors carry their fields, state the rule, and cross process boundaries."""

import pickle
from pathlib import Path

import pytest

from fastclip.errors import InputError, OptionError, PathError, UnknownOption


def test_an_option_error_names_the_option_the_value_the_rule_and_an_example():
    error = OptionError("data.max_bad", 2, "must be in [0, 1)", example=0.01)
    assert (error.option, error.value, error.example) == ("data.max_bad", 2, 0.01)
    assert str(error) == "data.max_bad=2 must be in [0, 1), e.g. 0.01."


def test_an_option_that_was_not_given_is_named_without_a_value():
    assert str(OptionError("data.train", None, "must be set")) == "data.train must be set."


def test_advice_follows_the_rule():
    error = OptionError("optim.eps", 1, "has no effect with sgd", advice="Leave it out.")
    assert str(error) == "optim.eps=1 has no effect with sgd. Leave it out."


def test_an_unknown_name_is_answered_with_the_nearest_choice():
    error = OptionError.unknown("algorithm", "fastclip-v4", ["openclip", "fastclip-v3"])
    assert error.option == "algorithm"
    assert error.advice == "Did you mean fastclip-v3?"
    assert OptionError.unknown("algorithm", "zzz", ["openclip"]).advice == ""


def test_an_option_of_a_section_has_its_full_name():
    error = OptionError("gamma", 2, "must be in (0, 1]", example=0.2).within("loss")
    assert (error.option, error.value, error.example) == ("loss.gamma", 2, 0.2)


def test_an_unknown_option_gets_suggestions_or_advice():
    assert str(UnknownOption("lr", ["optim.lr"])) == "There is no option lr. Did you mean optim.lr?"
    assert str(UnknownOption("lr", otherwise="See --help.")).endswith("See --help.")


def test_a_path_error_reads_on_from_the_path():
    error = PathError(Path("a.csv"), "has no rows.")
    assert (error.path, str(error)) == ("a.csv", "a.csv has no rows.")
    assert str(PathError("a.csv", ", line 3: too long.")) == "a.csv, line 3: too long."


@pytest.mark.parametrize(
    "error",
    [
        OptionError("seed", -1, "must be positive", example=0, advice="Or leave it out."),
        PathError("a.tar", "is empty."),
        InputError("index", "has shape (3,)."),
        UnknownOption("lr", ["optim.lr"]),
    ],
)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__
