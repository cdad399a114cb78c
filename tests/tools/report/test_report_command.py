"""`fastclip report` from a folder to a page: with the run's own pictures, with others, and without."""

import os
import re
import shutil
from dataclasses import replace

import pytest

from fastclip.evaluation.feature_cache import model_key
from fastclip.run.load import load_towers
from fastclip.run.results import Result, append_result
from fastclip.tools.report import output as output_module
from fastclip.tools.report.report_command import report
from tests.evaluation import replica
from tests.tools.report.folders import make_run
from tests.tools.study.studies import make_study


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return replica.tiny_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """Plots have tests of their own. Where PNGs were to be written."""
    written = []
    monkeypatch.setattr(output_module, "draw", lambda curve: "<svg></svg>")
    monkeypatch.setattr(
        output_module,
        "write_pictures",
        lambda curves, folder: written.extend(folder / f"{curve.key}.png" for curve in curves),
    )
    return written


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs" / "tiny", symlinks=True)
    return tmp_path / "runs" / "tiny"


@pytest.fixture
def made(capsys):
    """Calls the verb, and gives the page and what was printed."""

    def call(run, **options):
        report(run, workers=0, **options)
        return (options.get("out") or run / "report.html").read_text(), capsys.readouterr().out

    return call


def rename_pairs(run, path, out="runs/tiny"):
    """As if the run had been trained with relative paths."""
    lines = (run / "config.yaml").read_text().splitlines()
    lines = [f"  pairs: {path}" if line.startswith("  pairs:") else line for line in lines]
    lines = [f"out: {out}" if line.startswith("out:") else line for line in lines]
    (run / "config.yaml").write_text("\n".join(lines))


def test_the_runs_own_pictures_are_searched(run, made):
    page, said = made(run)
    assert said == f"The report is in {run / 'report.html'}\n"
    assert page.count('<ol class="row">') == 5
    assert page.count('<ol class="captions">') == 6
    assert page.count("data:image/webp;base64,") >= 5 * 8 + 6 + 12
    assert "In 60 pictures with" in page
    assert len(page) < 2_000_000


def test_words_of_ones_own_are_searched_for(run, made):
    page, _ = made(run, search="a red heart; ; <b>bold</b> ;a red heart")
    assert page.count('<ol class="row">') == 2
    assert "“a red heart”" in page
    assert "“&lt;b&gt;bold&lt;/b&gt;”" in page
    assert "It is no picture's caption." in page.replace("&#39;", "'")


def test_other_pictures_and_another_file(run, made, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        (photos / f"{number}.png").write_bytes(replica.png(number))
    page, said = made(run, images=str(photos), out=tmp_path / "pages" / "a.html", checkpoint="best")
    assert said == f"The report is in {tmp_path / 'pages' / 'a.html'}\n"
    assert "In 3 pictures with 0 different captions" in page
    assert "The pictures have no captions to look for" in page
    assert not (run / "report.html").exists()


def test_pictures_are_found_from_where_the_run_was_trained(run, trained, made, tmp_path, monkeypatch):
    shutil.copy(trained.parent / "train.tar", tmp_path / "held-out.tar")
    rename_pairs(run, "held-out.tar")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    page, _ = made(run)
    assert "In 60 pictures" in page


def test_a_list_of_pairs_is_searched_as_one(run, trained, made, tmp_path, monkeypatch):
    for name in ("a.tar", "b.tar"):
        shutil.copy(trained.parent / "train.tar", tmp_path / name)
    rename_pairs(run, "[a.tar, b.tar]")
    monkeypatch.chdir(tmp_path)
    page, _ = made(run)
    assert "In 120 pictures" in page


def test_pictures_that_are_gone_are_told_and_the_rest_is_shown(run, made, caplog):
    rename_pairs(run, "nowhere/*.tar")
    page, _ = made(run)
    assert "There are no pictures to search in. nowhere/*.tar matches no file." in page
    assert "nowhere" in caplog.text
    assert "<svg" in page


def test_a_run_without_pictures_says_how_to_give_them(tmp_path, made):
    page, _ = made(make_run(tmp_path / "a", **{"evaluate.pairs": "null"}))
    assert "names no pictures (evaluate.pairs)" in page
    assert "--images" in page


def test_a_run_without_a_checkpoint_has_a_page(trained, tmp_path, made):
    pairs = trained.parent / "train.tar"
    folder = make_run(tmp_path / "a", steps=5, saved=0, **{"evaluate.pairs": pairs})
    page, _ = made(folder, images=str(pairs))
    assert "There is no checkpoint yet" in page
    assert "<svg" in page


def test_given_pictures_that_are_not_there_are_an_error(run):
    with pytest.raises(ValueError, match="nowhere"):
        report(run, images="nowhere/*.tar", workers=0)
    assert not (run / "report.html").exists()


def test_a_best_checkpoint_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no best checkpoint"):
        report(make_run(tmp_path / "a"), checkpoint="best")


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="is not the folder of a run"):
        report(tmp_path)
    assert os.listdir(tmp_path) in ([], ["cache"])


@pytest.mark.parametrize(
    ("search", "says"), [(" ; ", "holds no words"), (";".join(map(str, range(41))), "room for 40")]
)
def test_a_search_that_is_not_possible_is_refused(tmp_path, search, says):
    with pytest.raises(ValueError, match=says):
        report(make_run(tmp_path / "a"), search=search)


def test_scores_of_an_earlier_checkpoint_are_told(run, made):
    (run / "evaluation").mkdir(exist_ok=True)
    model = model_key(load_towers(run), None)
    lines = [Result(task, "key", "classification", "acc1", {"acc1": 0.5}, 10, model=model) for task in "ab"]
    for result in lines:
        append_result(run / "evaluation" / "results.jsonl", result)
    assert "scores are of other weights" not in made(run)[0]
    append_result(run / "evaluation" / "results.jsonl", replace(lines[0], model="another"))
    assert "1 of 2 scores are of other weights than the last checkpoint&#39;s" in made(run)[0]


def test_old_scores_are_told_where_there_are_no_pictures(run, made):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(?m)^  pairs: .*$", "  pairs: null", config))
    (run / "evaluation").mkdir(exist_ok=True)
    result = Result("a", "key", "classification", "acc1", {"acc1": 0.5}, 10, model="another")
    append_result(run / "evaluation" / "results.jsonl", result)
    assert "1 of 1 scores are of other weights" in made(run)[0]


def test_hard_pairs_are_shown_with_their_pictures(run, made):
    page, _ = made(run)
    assert "What it finds hard" in page
    shown = page[page.index("Hardest pairs") : page.index("Likely false negatives")]
    assert shown.count("<img") == 12


def test_every_curve_lies_beside_the_page_as_a_picture(tmp_path, made, pictures):
    made(make_run(tmp_path / "a"))
    assert {path.parent for path in pictures} == {tmp_path / "a" / "report"}
    assert {"evaluation.png", "loss-time.png", "log_u.png"} <= {path.name for path in pictures}


def test_several_runs_have_one_page_where_they_all_are(tmp_path, capsys):
    folders = [make_run(tmp_path / "runs" / name) for name in "ab"]
    report(folders)
    assert "2 runs side by side" in (tmp_path / "runs" / "report.html").read_text()
    assert capsys.readouterr().out == f"The report is in {tmp_path / 'runs' / 'report.html'}\n"


def test_a_study_has_a_page_of_its_own(tmp_path, made):
    study = make_study(tmp_path / "study", vary={"algorithm": ["openclip", "fastclip-v3"]})
    page, said = made(study)
    assert said == f"The report is in {study / 'report.html'}\n"
    assert "all 6 runs are done" in page


def test_a_study_among_runs_is_refused(tmp_path):
    study = make_study(tmp_path / "study", done=lambda arm, seed: False)
    with pytest.raises(ValueError, match="is a study"):
        report([study, make_run(tmp_path / "a")])


@pytest.mark.parametrize("option", [{"images": "x"}, {"search": "x"}, {"checkpoint": "best"}])
def test_options_of_one_run_are_refused_for_several(tmp_path, option):
    with pytest.raises(ValueError, match=f"--{next(iter(option))} is for the page of one run"):
        report([make_run(tmp_path / "a"), make_run(tmp_path / "b")], **option)


def test_who_logs_in_where_stays_out_of_the_page(run, made):
    with (run / "config.yaml").open("a") as file:
        file.write("# https://me:secret@host/data.tar?token=abc\n")
    page, _ = made(run)
    assert "https://host/data.tar" in page
    assert "secret" not in page
    assert "abc" not in page
