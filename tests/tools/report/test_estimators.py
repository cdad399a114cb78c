"""The age of estimators is told from the order and γ."""

import pytest

from fastclip.run.folder import read_run
from fastclip.tools.report.estimators import about_estimators
from tests.tools.report.folders import make_run


def told(folder):
    return " ".join(about_estimators(read_run(folder)))


def test_a_visit_comes_once_an_epoch_and_gamma_says_how_much_it_brings(tmp_path):
    found = told(make_run(tmp_path / "a"))
    assert "waits 10 steps for the next visit on average" in found
    assert "At most it waits 20 steps" in found
    assert "At γ = 0.2 each visit brings 20 % of an estimator" in found
    assert "halves in 3.1 visits, which are about 31 steps" in found
    assert "Every pair has been visited." in found


def test_what_was_not_visited_is_told(tmp_path):
    assert "50 % of the pairs have not been visited yet" in told(make_run(tmp_path / "a", steps=5))


def test_at_gamma_1_only_the_last_visit_counts(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    run.records[-1]["gamma"] = 1.0
    assert "nothing but its last visit" in " ".join(about_estimators(run))


@pytest.mark.parametrize("algorithm", ["openclip", "mbcl"])
def test_algorithms_without_estimators_say_nothing(tmp_path, algorithm):
    assert told(make_run(tmp_path / "a", algorithm)) == ""


def test_a_run_without_config_says_nothing(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").unlink()
    assert told(folder) == ""
