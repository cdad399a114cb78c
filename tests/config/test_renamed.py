"""Old names of options keep working on the command line, in files and in run folders."""

import logging

import pytest

from fastclip.config import renamed
from fastclip.config.options import as_dict, from_dict
from fastclip.config.parse import parse
from fastclip.config.renamed import RENAMED, current_name, with_current_names
from fastclip.errors import OptionError


@pytest.fixture(autouse=True)
def _report_again():
    renamed.report_new_name.cache_clear()


def value_of(config, option):
    section, _, name = option.partition(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
@pytest.mark.parametrize("form", ["two words", "one word"])
def test_an_old_name_on_the_command_line_sets_the_new_option_and_is_reported(old, new, form, caplog):
    words = [f"--{old}=7"] if form == "one word" else [f"--{old}", "7"]
    with caplog.at_level(logging.WARNING):
        assert value_of(parse(words), new) == 7
    (record,) = caplog.records
    assert record.args == (old, new)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_in_a_file_sets_the_new_option(old, new, tmp_path):
    section, _, name = old.partition(".")
    file = tmp_path / "mine.yaml"
    file.write_text(f"epochs: 3\n{section}:\n  {name}: 7\n")
    config = parse(["--config", "emoji", "--config", str(file)])
    assert value_of(config, new) == 7
    assert config.epochs == 3
    assert config.out == "runs/mine-fastclip-v3"


def test_an_option_wins_over_a_file_whichever_name_either_uses(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("log: {every: 7}\n")
    assert parse(["--log.every_steps", "9", "--config", str(file)]).log.every_steps == 9
    assert parse(["--log.every", "9", "--config", str(file)]).log.every_steps == 9


def test_the_config_of_an_older_run_folder_is_read():
    written = as_dict(parse(["--config", "emoji"]))
    assert "every_steps" in written["log"]
    written["log"] = {"every": 7}
    written["evaluate"] = {"every": 0.5}
    written["checkpoint"] = {"minutes": 2, "steps": 3}
    config = from_dict(written)
    assert config.log.every_steps == 7
    assert config.evaluate.every_epochs == 0.5
    assert (config.checkpoint.every_minutes, config.checkpoint.every_steps) == (2, 3)


def test_both_names_at_once_are_refused():
    with pytest.raises(OptionError) as caught:
        with_current_names({"log": {"every": 5, "every_steps": 6}})
    assert (caught.value.option, caught.value.value) == ("log.every", 5)


def test_a_name_is_reported_once(caplog):
    with caplog.at_level(logging.WARNING):
        assert [current_name("log.every") for _ in range(3)] == ["log.every_steps"] * 3
    assert len(caplog.records) == 1


def test_hyphens_are_read_as_underscores(caplog):
    with caplog.at_level(logging.WARNING):
        assert parse(["--data.max-bad", "0.2"]).data.max_bad == 0.2
    assert caplog.records[0].args == ("--data.max-bad", "--data.max_bad")


def test_current_names_are_not_reported(caplog):
    with caplog.at_level(logging.WARNING):
        parse(["--log.every_steps", "3", "--config", "emoji"])
    assert not caplog.records
