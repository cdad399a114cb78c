"""`fastclip report` from a folder to a page: with the run's own images, with others, and without."""

import os
import re
import shutil
from dataclasses import replace
from html import unescape

import pytest

from fastclip.errors import InputError, OptionError, PathError
from fastclip.evaluation.feature_cache import model_key
from fastclip.run.folder import MissingCheckpoint, read_run
from fastclip.run.load import load_towers
from fastclip.run.results import Result, append_result
from fastclip.tools.report.report_command import report
from fastclip.tools.report.study_page import progress_of
from tests.evaluation import replica
from tests.tools.report.folders import make_run
from tests.tools.study.studies import make_study, read_study


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return replica.tiny_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture(autouse=True)
def pngs(monkeypatch, _quick_plots):
    """The paths of the PNGs, which are not drawn."""
    written = []
    monkeypatch.setattr(
        "fastclip.tools.report.output.write_plots",
        lambda curves, folder: written.extend(folder / f"{curve.key}.png" for curve in curves),
    )
    return written


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs" / "tiny", symlinks=True)
    return tmp_path / "runs" / "tiny"


@pytest.fixture
def made(capsys):
    """Call the command; return the page and the output."""

    def call(run, **options):
        report(run, workers=0, **options)
        return (options.get("out") or run / "report.html").read_text(), capsys.readouterr().out

    return call


def rename_pairs(run, path, out="runs/tiny"):
    """As if the run had been trained with these relative paths."""
    lines = (run / "config.yaml").read_text().splitlines()
    lines = [f"  pairs: {path}" if line.startswith("  pairs:") else line for line in lines]
    lines = [f"out: {out}" if line.startswith("out:") else line for line in lines]
    (run / "config.yaml").write_text("\n".join(lines))


@pytest.mark.slow
def test_the_runs_own_images_are_searched(run, made):
    page, output = made(run)
    assert output.split()[-1] == str(run / "report.html")
    assert page.count('<ol class="row">') == 5
    assert page.count('<ol class="captions">') == 6
    assert page.count("data:image/webp;base64,") >= 5 * 8 + 6 + 12
    assert "60 images" in page
    assert len(page) < 2_000_000


def test_given_queries_are_searched(run, made):
    page, _ = made(run, search="a red heart; ; <b>bold</b> ;a red heart")
    assert page.count('<ol class="row">') == 2
    assert "“a red heart”" in page
    assert "“&lt;b&gt;bold&lt;/b&gt;”" in page
    assert 'class="own"' not in page  # neither is a caption


def test_other_images_and_another_output_file(run, made, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        (photos / f"{number}.png").write_bytes(replica.png(number))
    out = tmp_path / "pages" / "a.html"
    page, output = made(run, images=str(photos), out=out, checkpoint="best")
    assert output.split()[-1] == str(out)
    assert "3 images" in page
    assert '<ol class="row">' not in page
    assert "--search" in page
    assert not (run / "report.html").exists()


@pytest.mark.slow
def test_relative_paths_are_those_of_the_folder_the_run_was_trained_in(
    run, trained, made, tmp_path, monkeypatch
):
    shutil.copy(trained.parent / "train.tar", tmp_path / "held-out.tar")
    rename_pairs(run, "held-out.tar")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    page, _ = made(run)
    assert "60 images" in page


@pytest.mark.slow
def test_a_list_of_pairs_is_searched_as_one(run, trained, made, tmp_path, monkeypatch):
    for name in ("a.tar", "b.tar"):
        shutil.copy(trained.parent / "train.tar", tmp_path / name)
    rename_pairs(run, "[a.tar, b.tar]")
    monkeypatch.chdir(tmp_path)
    page, _ = made(run)
    assert "120 images" in page


def test_missing_images_are_reported_and_the_rest_is_shown(run, made, caplog):
    rename_pairs(run, "nowhere/*.tar")
    page, _ = made(run)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    (reason,) = warning.args
    assert "nowhere/*.tar" in reason
    assert reason in unescape(page)
    assert "--images" in page
    assert "<svg" in page


def test_a_run_without_images_names_the_options_for_them(tmp_path, made):
    page, _ = made(make_run(tmp_path / "a", **{"evaluate.pairs": "null"}))
    assert "evaluate.pairs" in page
    assert "--images" in page


@pytest.mark.slow
def test_a_run_without_a_checkpoint_has_a_page(trained, tmp_path, made):
    pairs = trained.parent / "train.tar"
    folder = make_run(tmp_path / "a", steps=5, saved=0, **{"evaluate.pairs": pairs})
    page, _ = made(folder, images=str(pairs))
    assert read_run(folder).missing
    assert all(sentence in unescape(page) for sentence in read_run(folder).missing)
    assert "<svg" in page


def test_given_images_that_do_not_exist_are_an_error(run):
    with pytest.raises(ValueError, match=r"nowhere/\*\.tar"):
        report(run, images="nowhere/*.tar", workers=0)
    assert not (run / "report.html").exists()


def test_a_missing_best_checkpoint_is_an_error(tmp_path):
    run = make_run(tmp_path / "a")
    with pytest.raises(MissingCheckpoint) as caught:
        report(run, checkpoint="best")
    assert caught.value.path == str(run)


def test_a_folder_that_is_not_a_run_is_an_error(tmp_path):
    with pytest.raises(PathError) as caught:
        report(tmp_path)
    assert caught.value.path == str(tmp_path)
    assert os.listdir(tmp_path) in ([], ["cache"])


@pytest.mark.parametrize(("queries", "search"), [(0, " ; "), (41, ";".join(map(str, range(41))))])
def test_a_search_with_no_query_or_too_many_is_an_error(tmp_path, queries, search):
    with pytest.raises(OptionError) as caught:
        report(make_run(tmp_path / "a"), search=search)
    assert caught.value.option == "search"
    assert search.startswith(caught.value.value.removesuffix("…"))
    assert re.findall(r"\d+", caught.value.rule) == (["41", "40"] if queries else [])


@pytest.mark.slow
def test_the_most_queries_are_allowed(run, made):
    page, _ = made(run, search=";".join(map(str, range(40))))
    assert page.count('<ol class="row">') == 40


@pytest.mark.slow
def test_scores_of_an_earlier_checkpoint_are_reported(run, made):
    (run / "evaluation").mkdir(exist_ok=True)
    model = model_key(load_towers(run), None)
    lines = [Result(task, "key", "classification", "acc1", {"acc1": 0.5}, 10, model=model) for task in "ab"]
    for result in lines:
        append_result(run / "evaluation" / "results.jsonl", result)
    assert "of 2 scores" not in made(run)[0]
    append_result(run / "evaluation" / "results.jsonl", replace(lines[0], model="another"))
    assert "1 of 2 scores" in made(run)[0]


def test_scores_of_an_earlier_checkpoint_are_reported_without_images(run, made):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(?m)^  pairs: .*$", "  pairs: null", config))
    (run / "evaluation").mkdir(exist_ok=True)
    result = Result("a", "key", "classification", "acc1", {"acc1": 0.5}, 10, model="another")
    append_result(run / "evaluation" / "results.jsonl", result)
    assert "1 of 1 scores" in made(run)[0]


@pytest.mark.slow
def test_hard_pairs_are_shown_with_their_images(run, made):
    page, _ = made(run)
    shown = page[page.index("Hardest pairs") : page.index("Most confused pairs")]
    assert shown.count("<img") == 12


@pytest.mark.slow
def test_every_curve_is_written_as_a_png_beside_the_page(tmp_path, made, pngs):
    made(make_run(tmp_path / "a"))
    assert {path.parent for path in pngs} == {tmp_path / "a" / "report"}
    assert {"evaluation.png", "loss-time.png", "log_u.png"} <= {path.name for path in pngs}


@pytest.mark.slow
def test_several_runs_have_one_page_in_their_common_folder(tmp_path, capsys):
    folders = [make_run(tmp_path / "runs" / name) for name in "ab"]
    report(folders)
    out = tmp_path / "runs" / "report.html"
    assert "2 runs" in out.read_text()
    assert capsys.readouterr().out.split()[-1] == str(out)


def test_a_study_has_its_own_page(tmp_path, made):
    study = make_study(tmp_path / "study", vary={"algorithm": ["openclip", "fastclip-v3"]})
    page, output = made(study)
    assert output.split()[-1] == str(study / "report.html")
    assert progress_of(read_study(study)).words in page


def test_a_study_among_runs_is_an_error(tmp_path):
    study = make_study(tmp_path / "study", done=lambda arm, seed: False)
    with pytest.raises(PathError) as caught:
        report([make_run(tmp_path / "a"), study])
    assert caught.value.path == str(study)


def test_no_run_at_all_is_an_error():
    with pytest.raises(InputError) as caught:
        report([])
    assert caught.value.argument == "runs"


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"images": "x"}, {"search": "x"}, {"checkpoint": "best"}])
def test_options_for_a_single_run_are_an_error_with_several(tmp_path, option):
    with pytest.raises(OptionError) as caught:
        report([make_run(tmp_path / "a"), make_run(tmp_path / "b")], **option)
    assert {caught.value.option: caught.value.value} == option


@pytest.mark.slow
def test_settings_are_shown_without_credentials(run, made):
    with (run / "config.yaml").open("a") as file:
        file.write("# https://me:secret@host/data.tar?token=abc\n")
    page, _ = made(run)
    assert "https://host/data.tar" in page
    assert "secret" not in page
    assert "abc" not in page
