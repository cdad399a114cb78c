"""A run's folder is read as far as it goes, and what is missing is told."""

import json

import pytest

from fastclip.run.folder import read_run, without_secrets
from tests.tools.report.folders import PAIRS, TOTAL, make_run, record, result, write_results


def append(folder, data):
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(data)


def test_a_finished_run_is_read_and_nothing_is_missing(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    assert run.state() == ("finished", "finished after 40 steps")
    assert (run.name, run.num_samples, run.total_steps, run.step) == ("a", PAIRS, TOTAL, TOTAL)
    assert (len(run.records), len(run.evaluations)) == (8, 5)
    assert run.missing == []
    assert "algorithm: fastclip-v3" in run.config_text


def test_a_run_whose_last_record_is_new_is_in_progress(tmp_path):
    folder = make_run(tmp_path / "a", steps=25, saved=20)
    run = read_run(folder)
    assert run.state(now=run.changed + 30) == ("in progress", "in progress: step 25 of 40")


def test_a_run_that_has_been_silent_for_long_is_called_stopped(tmp_path):
    run = read_run(make_run(tmp_path / "a", steps=25, saved=20))
    words = "stopped at step 25 of 40; the same command goes on from step 20"
    assert run.state(now=run.changed + 3600) == ("stopped", words)


def test_a_run_that_pauses_long_between_records_is_given_as_long(tmp_path):
    folder = make_run(tmp_path / "a", steps=25, saved=20)
    slow = record(30)
    slow["time"]["elapsed"] = 5000.0  # an evaluation of an hour and more lay between
    append(folder, json.dumps(slow).encode() + b"\n")
    run = read_run(folder)
    assert run.state(now=run.changed + 3600).kind == "in progress"


def test_the_last_record_alone_does_not_finish_a_run(tmp_path):
    """Its evaluation and its checkpoint are still to come."""
    run = read_run(make_run(tmp_path / "a", steps=TOTAL, saved=20))
    assert run.state(now=run.changed).kind == "in progress"


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    folder = make_run(tmp_path / "a", steps=5, saved=0)
    run = read_run(folder)
    assert run.num_samples == PAIRS  # from the record
    words = "stopped at step 5 of 40; the same command starts it again"
    assert run.state(now=run.changed + 3600).words == words
    assert "There is no checkpoint yet: what the model finds cannot be shown." in run.missing


def test_a_torn_last_line_is_left_out_and_told(tmp_path):
    folder = make_run(tmp_path / "a")
    append(folder, b'{"step": 45, "epo')
    run = read_run(folder)
    assert len(run.records) == 8
    assert run.missing == ["metrics.jsonl: the last line is torn and was left out."]


def test_lines_that_are_no_records_are_told_by_their_numbers(tmp_path):
    folder = make_run(tmp_path / "a")
    append(folder, b'[1]\n\n{"step": "x", "epoch": 1}\n\x00\xff\n' + json.dumps(record(45)).encode() + b"\n")
    run = read_run(folder)
    assert len(run.records) == 9
    assert run.missing == ["metrics.jsonl: lines 14, 16, 17 are no records and were left out."]


def test_one_line_that_is_no_record_is_told_in_the_singular(tmp_path):
    folder = make_run(tmp_path / "a")
    append(folder, b"garbage\n")
    assert read_run(folder).missing == ["metrics.jsonl: line 14 is no record and was left out."]


def test_many_broken_lines_are_one_sentence(tmp_path):
    folder = make_run(tmp_path / "a")
    append(folder, b"garbage\n" * 100)
    (sentence,) = read_run(folder).missing
    assert "and 95 more are no records" in sentence


def test_a_run_that_has_only_its_config_is_not_started(tmp_path):
    folder = make_run(tmp_path / "a", steps=0, evaluated=False)
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert run.state().kind == "not started"
    assert any("metrics.jsonl cannot be read" in sentence for sentence in run.missing)
    assert any("no checkpoint yet" in sentence for sentence in run.missing)


def test_a_run_without_evaluation_says_how_to_have_one(tmp_path):
    run = read_run(make_run(tmp_path / "a", evaluated=False))
    assert run.evaluations == []
    assert any("--evaluate.pairs" in sentence for sentence in run.missing)


def test_a_config_that_is_not_yaml_is_told_and_the_rest_is_read(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").write_text("a: [1\n")
    run = read_run(folder)
    assert run.config is None
    assert run.total_steps is None
    assert len(run.records) == 8
    assert any(sentence.startswith("config.yaml is not the config of a run") for sentence in run.missing)


def test_a_broken_checkpoint_is_told(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "checkpoints" / "last" / "state.json").write_text("{")
    run = read_run(folder)
    assert run.metadata == {}
    assert any("state.json is missing or broken" in sentence for sentence in run.missing)


def test_the_last_result_of_a_task_counts(tmp_path):
    folder = make_run(tmp_path / "a")
    write_results(folder, result("x", 0.1), result("y", 0.2), result("x", 0.3), b'{"foreign": 1}')
    run = read_run(folder)
    assert [(found.task, found.value) for found in run.results] == [("y", 0.2), ("x", 0.3)]
    assert run.missing == ["evaluation/results.jsonl: line 4 is no result and was left out."]


def test_a_folder_of_runs_names_them(tmp_path):
    make_run(tmp_path / "runs" / "a")
    with pytest.raises(ValueError, match=r"is not the folder of a run.*There are runs in it: \S+runs/a"):
        read_run(tmp_path / "runs")


def test_a_folder_within_a_run_names_the_run(tmp_path):
    folder = make_run(tmp_path / "a")
    with pytest.raises(ValueError, match="It is a part of one"):
        read_run(folder / "checkpoints")


@pytest.mark.parametrize("name", ["empty", "gone"])
def test_a_folder_that_is_no_run_says_what_to_give(tmp_path, name):
    (tmp_path / "deep" / "empty").mkdir(parents=True)
    with pytest.raises(ValueError, match="runs/emoji-fastclip-v3"):
        read_run(tmp_path / "deep" / name)


def test_a_file_is_no_run(tmp_path):
    file = make_run(tmp_path / "a") / "config.yaml"
    with pytest.raises(ValueError, match="is not a folder"):
        read_run(file)


def test_an_evaluation_has_the_samples_of_its_epoch_and_the_first_clock_at_or_after_it(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    first, second = run.evaluations[:2]
    assert (run.samples_at(first), run.seconds_at(first)) == (0, 0.0)
    assert (run.samples_at(second), run.seconds_at(second)) == (640, 20.0)
    assert run.seconds_at(second | {"step": 11}) == 30.0
    assert run.seconds_at(second | {"step": 41}) is None
    assert run.seconds_at(run.records[0]) == 10.0


def test_the_runs_of_a_study_are_read_without_their_settings(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").write_text("a: [1\n")
    run = read_run(folder, settings=False)
    assert (run.config, run.config_text, run.missing) == (None, "", [])


def test_who_logs_in_is_left_out_of_addresses():
    assert without_secrets("train: s3://me:key@host/a.tar?token=1") == "train: s3://host/a.tar"
