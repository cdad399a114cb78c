"""Key figures are computed from the records, each with a note that explains it."""

from fastclip.run.folder import read_run
from fastclip.tools.report.key_figures import describe, key_figures
from tests.tools.report.folders import PAIRS, make_run


def figure(run, name):
    return next(figure for figure in key_figures(run) if figure.name == name)


def test_best_score_is_the_highest_of_the_best_measure(run):
    run.evaluations[2]["evaluation"]["mean_recall@1"] = 0.75
    found = figure(run, "best score")
    assert found.value == "75.0 %"
    assert "mean_recall@1" in found.note
    assert found.note.endswith("epoch 2")


def test_a_score_before_training_is_not_the_best(run):
    run.evaluations[0]["evaluation"]["mean_recall@1"] = 0.99
    assert figure(run, "best score").value == "43.0 %"


def test_an_untrained_model_has_a_score_before_training(run):
    del run.evaluations[1:]
    assert figure(run, "score before training").value == "3.0 %"


def test_before_the_first_checkpoint_the_config_names_the_measure(tmp_path):
    options = {"evaluate.best": "text_retrieval_recall@1"}
    run = read_run(make_run(tmp_path / "a", steps=10, saved=0, **options))
    assert "(text_retrieval_recall@1)" in figure(run, "best score").note


def test_time_speed_and_bad_pairs_come_from_the_records(run):
    assert figure(run, "training time").value == "1 min 20 s"
    assert "2 ranks" in figure(run, "training time").note
    assert figure(run, "samples/s").value == "52"  # the median of 35, 40 … 70
    assert figure(run, "bad pairs").value == "0"
    assert f"{PAIRS} pairs" in figure(run, "bad pairs").note
    assert not any(figure.alarming for figure in key_figures(run))


def test_skipped_steps_and_bad_pairs_are_alarming(run):
    run.records[-1] |= {"skipped": 3, "bad": 2}
    skipped, bad = figure(run, "skipped steps"), figure(run, "bad pairs")
    assert (skipped.value, skipped.alarming) == ("3", True)
    assert (bad.value, bad.alarming) == ("2", True)
    assert f"{PAIRS} pairs" in bad.note


def test_a_run_without_records_has_no_key_figures(tmp_path):
    run = read_run(make_run(tmp_path / "a", steps=0, evaluated=False))
    assert key_figures(run) == []


def test_a_description_names_the_cutoff_and_the_task():
    assert describe("image_retrieval_recall@5").endswith("top 5")
    assert describe("image_retrieval_recall@5") != describe("text_retrieval_recall@5")
    assert describe("twemoji_words/acc1") == f"{describe('acc1')}, on twemoji_words"
    assert describe("acc1") != describe("acc5") != describe("not a known measure")
