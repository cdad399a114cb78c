"""The big numbers say what the records say, in words."""

from fastclip.run.folder import read_run
from fastclip.tools.report.key_figures import headline, in_words
from tests.tools.report.folders import PAIRS, make_run


def figure(run, name):
    return next(found for found in headline(run) if found.name == name)


def test_the_best_score_is_the_highest_of_the_best_measure(run):
    run.evaluations[2]["evaluation"]["mean_recall@1"] = 0.75
    found = figure(run, "best score")
    assert found.value == "75.0 %"
    assert "find their own partner first (mean_recall@1), at epoch 2" in found.note


def test_a_score_before_training_is_no_best(run):
    run.evaluations[0]["evaluation"]["mean_recall@1"] = 0.99
    assert figure(run, "best score").value == "43.0 %"


def test_an_untrained_model_has_a_score_before_training(run):
    del run.evaluations[1:]
    assert figure(run, "score before training").value == "3.0 %"


def test_the_measure_of_the_config_counts_before_any_checkpoint(tmp_path):
    options = {"evaluate.best": "text_retrieval_recall@1"}
    run = read_run(make_run(tmp_path / "a", steps=10, saved=0, **options))
    assert "of pictures find their own caption first" in figure(run, "best score").note


def test_time_speed_and_losses_come_from_the_records(run):
    assert figure(run, "time trained").value == "1 min 20 s"
    assert "on 2 workers" in figure(run, "time trained").note
    assert figure(run, "samples a second").value == "52"  # the median of 35, 40 … 70
    assert figure(run, "bad pairs").note == f"all of {PAIRS} could be used"
    assert not any(found.alarming for found in headline(run))


def test_skipped_steps_and_bad_pairs_alarm(run):
    run.records[-1] |= {"skipped": 3, "bad": 2}
    note = "their loss or gradient was not finite"
    assert figure(run, "skipped steps") == ("skipped steps", "3", note, True)
    assert figure(run, "bad pairs").alarming
    assert figure(run, "bad pairs").note == f"of {PAIRS} could not be used, and were replaced"


def test_a_run_without_records_has_no_figures_of_them(tmp_path):
    run = read_run(make_run(tmp_path / "a", steps=0, evaluated=False))
    assert headline(run) == []


def test_measures_are_told_in_words():
    assert in_words("image_retrieval_recall@5") == "of captions find their own picture among the first 5"
    assert in_words("twemoji_words/acc1") == "of pictures are given the right class, in twemoji_words"
