"""Everything readable in a run's folder is read, and the rest is listed in `missing`."""

import json
import re

import pytest

from fastclip.errors import PathError
from fastclip.run.folder import read_run, without_secrets
from tests.tools.report.folders import PAIRS, TOTAL, make_run, record, result, write_results


def append(folder, data):
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(data)


def numbers(sentence):
    return [int(number) for number in re.findall(r"\d+", sentence)]


def about(run, *names):
    """The sentences of `missing` that mention one of these."""
    return [sentence for sentence in run.missing if any(name in sentence for name in names)]


@pytest.mark.slow
def test_a_finished_run_is_read_completely(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    assert run.state().kind == "finished"
    assert numbers(run.state().words) == [40]
    assert (run.name, run.num_samples, run.total_steps, run.step) == ("a", PAIRS, TOTAL, TOTAL)
    assert (len(run.records), len(run.evaluations)) == (8, 5)
    assert run.missing == []
    assert "algorithm: fastclip-v3" in run.config_text


def test_a_run_with_a_recent_record_is_in_progress(tmp_path):
    run = read_run(make_run(tmp_path / "a", steps=25, saved=20))
    kind, phrase = run.state(now=run.changed + 30)
    assert kind == "in progress"
    assert numbers(phrase) == [25, 40]


@pytest.mark.slow
def test_a_run_without_a_recent_record_is_stopped(tmp_path):
    run = read_run(make_run(tmp_path / "a", steps=25, saved=20))
    kind, phrase = run.state(now=run.changed + 3600)
    assert kind == "stopped"
    assert numbers(phrase) == [25, 40, 20]  # it resumes from the checkpoint at step 20


@pytest.mark.slow
def test_a_run_with_long_pauses_between_records_is_stopped_later(tmp_path):
    folder = make_run(tmp_path / "a", steps=25, saved=20)
    slow = record(30)
    slow["time"]["elapsed"] = 5000.0  # after an evaluation of more than an hour
    append(folder, json.dumps(slow).encode() + b"\n")
    run = read_run(folder)
    assert run.state(now=run.changed + 3600).kind == "in progress"


@pytest.mark.slow
def test_the_last_record_alone_does_not_finish_a_run(tmp_path):
    """Its evaluation and its checkpoint are still to come."""
    run = read_run(make_run(tmp_path / "a", steps=TOTAL, saved=20))
    assert run.state(now=run.changed).kind == "in progress"


def test_a_run_killed_before_its_first_checkpoint_restarts(tmp_path):
    run = read_run(make_run(tmp_path / "a", steps=5, saved=0))
    assert run.num_samples == PAIRS  # from the record
    kind, phrase = run.state(now=run.changed + 3600)
    assert kind == "stopped"
    assert numbers(phrase) == [5, 40]  # no step to resume from
    assert len(about(run, "checkpoint")) == 1


@pytest.mark.slow
def test_an_incomplete_last_line_is_skipped_and_reported(tmp_path):
    folder = make_run(tmp_path / "a")
    append(folder, b'{"step": 45, "epo')
    run = read_run(folder)
    assert len(run.records) == 8
    (sentence,) = run.missing
    assert sentence.startswith("metrics.jsonl: ")
    assert "last line" in sentence


@pytest.mark.slow
def test_lines_that_are_not_records_are_listed_by_number(tmp_path):
    folder = make_run(tmp_path / "a")
    append(folder, b'[1]\n\n{"step": "x", "epoch": 1}\n\x00\xff\n' + json.dumps(record(45)).encode() + b"\n")
    run = read_run(folder)
    assert len(run.records) == 9
    (sentence,) = run.missing
    assert sentence.startswith("metrics.jsonl: lines ")
    assert numbers(sentence) == [14, 16, 17]


@pytest.mark.slow
def test_a_single_line_that_is_not_a_record_is_in_the_singular(tmp_path):
    folder = make_run(tmp_path / "a")
    append(folder, b"garbage\n")
    (sentence,) = read_run(folder).missing
    assert sentence.startswith("metrics.jsonl: line 14 ")


@pytest.mark.slow
def test_many_damaged_lines_are_counted(tmp_path):
    folder = make_run(tmp_path / "a")
    append(folder, b"garbage\n" * 100)
    (sentence,) = read_run(folder).missing
    assert numbers(sentence) == [14, 15, 16, 17, 18, 95]


@pytest.mark.slow
def test_a_run_with_only_a_config_is_not_started(tmp_path):
    folder = make_run(tmp_path / "a", steps=0, evaluated=False)
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert run.state().kind == "not started"
    assert about(run, "metrics.jsonl")
    assert about(run, "checkpoint")


@pytest.mark.slow
def test_a_run_without_evaluation_names_the_option_for_it(tmp_path):
    run = read_run(make_run(tmp_path / "a", evaluated=False))
    assert run.evaluations == []
    assert len(about(run, "--evaluate.pairs")) == 1


def test_a_config_that_is_not_yaml_is_reported_and_the_rest_is_read(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").write_text("a: [1\n")
    run = read_run(folder)
    assert run.config is None
    assert run.total_steps == TOTAL  # the checkpoint has it
    assert len(run.records) == 8
    assert len(about(run, "config.yaml")) == 1


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "checkpoints" / "last" / "state.json").write_text("{")
    run = read_run(folder)
    assert run.metadata == {}
    assert len(about(run, "state.json")) == 1


@pytest.mark.slow
def test_the_last_result_of_a_task_counts(tmp_path):
    folder = make_run(tmp_path / "a")
    write_results(folder, result("x", 0.1), result("y", 0.2), result("x", 0.3), b'{"foreign": 1}')
    run = read_run(folder)
    assert [(found.task, found.value) for found in run.results] == [("y", 0.2), ("x", 0.3)]
    (sentence,) = run.missing
    assert sentence.startswith("evaluation/results.jsonl: line 4 ")


def rejected(folder):
    with pytest.raises(PathError) as caught:
        read_run(folder)
    assert caught.value.path == str(folder)
    return caught.value.problem


def test_the_error_for_a_folder_of_runs_names_them(tmp_path):
    folder = make_run(tmp_path / "runs" / "a")
    assert str(folder) in rejected(tmp_path / "runs")


def test_the_error_for_a_folder_within_a_run_names_the_run(tmp_path):
    folder = make_run(tmp_path / "a")
    assert str(folder) in rejected(folder / "checkpoints")


@pytest.mark.parametrize("name", ["empty", "gone"])
def test_the_error_for_another_folder_has_an_example(tmp_path, name):
    (tmp_path / "deep" / "empty").mkdir(parents=True)
    assert "runs/emoji-fastclip-v3" in rejected(tmp_path / "deep" / name)


def test_a_file_is_not_a_run(tmp_path):
    rejected(make_run(tmp_path / "a") / "config.yaml")


def test_an_evaluation_has_the_samples_of_its_epoch_and_the_first_time_at_or_after_it(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    first, second = run.evaluations[:2]
    assert (run.samples_at(first), run.seconds_at(first)) == (0, 0.0)
    assert (run.samples_at(second), run.seconds_at(second)) == (640, 20.0)
    assert run.seconds_at(second | {"step": 11}) == 30.0
    assert run.seconds_at(second | {"step": 41}) is None
    assert run.seconds_at(run.records[0]) == 10.0


def test_settings_need_not_be_read(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").write_text("a: [1\n")
    run = read_run(folder, settings=False)
    assert (run.config, run.config_text, run.missing) == (None, "", [])


def test_credentials_and_tokens_are_removed_from_urls():
    assert without_secrets("train: s3://me:key@host/a.tar?token=1") == "train: s3://host/a.tar"
