"""Pictures by words and by pictures; an index beside the run that knows when it is out of date."""

import io
import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from fastclip.cli import main
from fastclip.data.contact_sheet import CELL, TEXT
from fastclip.evaluation.features import Encoder
from fastclip.run.load import load
from fastclip.tools.search import index as search_module
from fastclip.tools.search.index import Index, list_pictures
from tests.data.collections import write_shards, write_tar
from tests.evaluation import replica


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return replica.tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(trained, tmp_path):
    """A run without an index."""
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.fixture
def photos(tmp_path):
    """Eight pictures in a folder and in folders within, one in a tar; one file is broken, one no picture."""
    folder = tmp_path / "photos"
    (folder / "deep" / "er").mkdir(parents=True)
    for i in range(8):
        place = (folder, folder / "deep", folder / "deep" / "er")[i % 3]
        (place / f"{i}.png").write_bytes(replica.png(i))
    write_tar(folder / "deep" / "more.tar", [("8.png", replica.png(8)), ("8.txt", b"eight")])
    (folder / "broken.jpg").write_bytes(b"\xff\xd8 and no more")
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture
def find(tmp_path, capsys, monkeypatch):
    """Calls `fastclip search … --json` and gives its answer; with `fails`, its last line instead."""
    monkeypatch.chdir(tmp_path)

    def call(*words, fails=False):
        capsys.readouterr()
        code = main(["search", *map(str, words), "--workers", "0", "--json"])
        said = capsys.readouterr()
        assert code == (1 if fails else 0), said.err
        return said.err.splitlines()[-1] if fails else json.loads(said.out)

    return call


@pytest.fixture
def encoded(monkeypatch):
    seen, original = [], Encoder.images

    def spy(self, pictures, progress=None):
        seen.append(len(pictures))
        return original(self, pictures, progress)

    monkeypatch.setattr(Encoder, "images", spy)
    return seen


def scores(answer):
    return {match["name"]: match["score"] for match in answer["matches"]}


def test_words_find_the_pictures_in_the_order_of_their_cosines(run, photos, find):
    model = load(run)
    found = scores(find(run, photos, "a red heart", "--top", "20"))
    files = {f"{path.relative_to(photos)}": path for path in photos.rglob("*.png")}
    expected = {name: model.similarity(path, "a red heart").item() for name, path in files.items()}
    expected["deep/more.tar/8.png"] = model.similarity(
        Image.open(io.BytesIO(replica.png(8))), "a red heart"
    ).item()
    assert found == pytest.approx(expected, abs=1e-5)
    assert [*found] == sorted(expected, key=expected.get, reverse=True)
    assert len(found) == 9  # the broken one is left out


def test_a_picture_finds_itself_first(run, photos, find):
    answer = find(run, photos, "--image", photos / "deep" / "4.png", "--top", "3")
    assert answer["matches"][0]["name"] == "deep/4.png"
    assert answer["matches"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert len(answer["matches"]) == 3


def test_lines_for_a_person(run, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["search", str(run), str(photos), "a cat", "--top", "2", "--workers=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines[:2]] == [2, 2]
    assert lines[2:] == ["contact sheet: found.png"]


def test_the_contact_sheet_shows_the_matches(run, photos, find):
    answer = find(run, photos, "a cat", "--top", "8", "--sheet", "sheets/cats.png")
    assert answer["sheet"] == "sheets/cats.png"
    sheet = Image.open("sheets/cats.png")
    assert sheet.size == (6 * CELL, 2 * (CELL + TEXT))
    best = Image.open(photos / answer["matches"][0]["name"]).convert("RGB")
    assert best.size == (20, 18)
    shown = sheet.crop((6, 13, 154, 146))  # the first cell, but for margins of 6 and 13 pixels
    assert np.array_equal(shown, best.resize((148, 133), Image.Resampling.BICUBIC))
    find(run, photos, "a cat", "--top", "2")
    assert Image.open("found.png").size == (2 * CELL, CELL + TEXT)


def test_the_index_is_kept_beside_the_run(run, photos, find, encoded):
    first = find(run, photos, "a cat")
    assert len(list((run / "search").glob("*.safetensors"))) == 1
    assert find(run, photos, "a cat") == first
    assert find(run, "photos", "a cat") == first  # the same folder by another path
    find(run, photos, "--image", photos / "0.png")
    assert encoded == [10]


def change_a_picture(photos):
    (photos / "0.png").write_bytes(replica.png(77))


def add_a_picture(photos):
    (photos / "new.png").write_bytes(replica.png(77))


def remove_a_picture(photos):
    (photos / "0.png").unlink()


def rename_a_picture(photos):
    (photos / "0.png").rename(photos / "z.png")


def change_a_tar(photos):
    write_tar(photos / "deep" / "more.tar", [("8.png", replica.png(77))])


@pytest.mark.parametrize(
    "change", [change_a_picture, add_a_picture, remove_a_picture, rename_a_picture, change_a_tar]
)
def test_the_index_is_made_anew_when_a_file_changes(run, photos, find, encoded, change):
    find(run, photos, "a cat")
    change(photos)
    found = scores(find(run, photos, "a cat", "--top", "20"))
    assert len(encoded) == 2
    shutil.rmtree(run / "search")
    assert scores(find(run, photos, "a cat", "--top", "20")) == found
    assert len(list((run / "search").iterdir())) == 1


def test_the_index_is_made_anew_when_the_model_changes(run, photos, find, encoded, tmp_path):
    before = find(run / "model", photos, "a cat")
    assert not (run / "model" / "search").exists()  # an export holds nothing but the model
    find(run / "model", photos, "a cat")
    assert encoded == [10]
    other = replica.tiny_export(tmp_path / "other", seed=1)
    assert scores(find(other, photos, "a cat")) != scores(before)
    find(run / "model", photos, "a cat")
    assert encoded == [10, 10]  # each model has its own
    shutil.rmtree(run / "model")
    shutil.copytree(other, run / "model")
    find(run / "model", photos, "a cat")
    assert encoded == [10, 10, 10]


def test_a_broken_index_is_made_anew(run, photos, find, encoded):
    first = find(run, photos, "a cat")
    (file,) = (run / "search").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert find(run, photos, "a cat") == first
    assert len(encoded) == 2


def test_pairs_and_shards_are_searched_too(run, tmp_path, find):
    shards = write_shards(tmp_path / "shards", 6, 2)
    of_folder = scores(find(run, shards, "a cat"))
    assert {name.split("/")[0] for name in of_folder} == {"00000.tar", "00001.tar"}
    assert scores(find(run, f"{shards}/*.tar", "a cat")) == of_folder
    assert len(scores(find(run, shards / "00000.tar", "a cat"))) == 3
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(replica.png(i))
    (tmp_path / "pairs.csv").write_text("filepath,title\n0.png,a\n1.png,b\n2.png,c\n")
    of_table = scores(find(run, tmp_path / "pairs.csv", "a cat"))
    assert {os.path.basename(name) for name in of_table} == {"0.png", "1.png", "2.png"}


def test_a_changed_picture_of_a_table_changes_what_is_kept(tmp_path):
    (tmp_path / "0.png").write_bytes(replica.png(0))
    (tmp_path / "pairs.csv").write_text("filepath,title\n0.png,a\n")
    before = list_pictures(str(tmp_path / "pairs.csv")).fingerprint
    os.utime(tmp_path / "0.png", (1, 1))
    assert list_pictures(str(tmp_path / "pairs.csv")).fingerprint != before


def test_a_damaged_tar_is_told_and_its_first_pictures_are_used(tmp_path, caplog):
    shards = write_shards(tmp_path / "shards", 6, 1)
    os.truncate(shards / "00000.tar", (shards / "00000.tar").stat().st_size // 2)
    pictures = list_pictures(str(shards))
    assert 0 < len(pictures) < 6
    assert "the pictures before it are used" in caplog.text


def test_equal_scores_keep_the_order_of_the_pictures(run, tmp_path):
    (tmp_path / "same").mkdir()
    for name in "dbca":
        (tmp_path / "same" / f"{name}.png").write_bytes(replica.png(1))
    index = Index.open(str(run), str(tmp_path / "same"), workers=0)
    assert torch.equal(index.features.image_bd[0], index.features.image_bd[3])
    assert [match.name for match in index.by_text("x", 3)] == ["a.png", "b.png", "c.png"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a cat", "--top", "0"], "--top 0 must be at least 1; try 12."),
        ([], "Give words, as in"),
        ([" "], "Give words, as in"),
        (["a cat", "--image", "photos/0.png"], "Give words, as in"),
        (["--image", "nowhere.png"], "--image nowhere.png is not a file."),
        (["--image", "photos/broken.jpg"], "photos/broken.jpg cannot be used: damaged JPEG."),
    ],
)
def test_bad_input_is_one_line(run, photos, find, words, message):
    assert message in find(run, photos, *words, fails=True)


def test_a_place_without_pictures_is_told_before_a_model_is_loaded(run, tmp_path, find, monkeypatch):
    monkeypatch.setattr(search_module, "load", None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "words").mkdir()
    write_tar(tmp_path / "words" / "0.tar", [("a.txt", b"a")])
    assert "empty holds no tar shards, no tables and no images" in find(run, "empty", "a cat", fails=True)
    assert "nowhere does not exist" in find(run, "nowhere", "a cat", fails=True)
    assert "words/0.tar holds no pictures (jpg, jpeg, png, webp)." in find(run, "words", "a cat", fails=True)


def test_only_broken_pictures_are_an_error(run, tmp_path, find):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"junk")
    assert "None of the 1 images" in find(run, "broken", "a cat", fails=True)


def test_captions_are_found_for_a_picture_wherever_they_stand(run, photos, tmp_path):
    (photos / "0.txt").write_text("zero\n  nought \n\n")
    index = Index.open(str(run), str(photos), workers=0)
    assert set(index.captions) == {"zero", "nought", "eight"}  # a file beside it, and one in the tar
    found = index.captions_for(photos / "0.png", 2)
    expected = index.model.similarity(photos / "0.png", index.captions)[0]
    assert [match.score for match in found] == pytest.approx(
        expected.sort(descending=True).values[:2].tolist()
    )
    assert found[0].text == index.captions[expected.argmax()]


def test_captions_come_from_tables_too(run, tmp_path):
    folder = tmp_path / "told"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.png").write_bytes(replica.png(i))
    (folder / "metadata.jsonl").write_text(
        "".join(json.dumps({"file_name": f"{i}.png", "text": f"number {i}"}) + "\n" for i in range(3))
    )
    (folder / "pairs.csv").write_text("filepath,title\n0.png,nothing\n2.png,two\n")
    assert Index.open(str(run), str(folder), workers=0).captions == ["number 0", "number 1", "number 2"]
    assert Index.open(str(run), str(folder / "pairs.csv"), workers=0).captions == ["nothing", "two"]


def test_pictures_without_captions_have_none(run, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "0.png").write_bytes(replica.png(0))
    index = Index.open(str(run), str(tmp_path / "bare"), workers=0)
    assert index.captions == []
    assert index.captions_for(tmp_path / "bare" / "0.png", 5) == []


def test_a_table_without_captions_does_not_keep_pictures_from_being_searched(run, tmp_path):
    folder = tmp_path / "labelled"
    folder.mkdir()
    (folder / "0.png").write_bytes(replica.png(0))
    (folder / "metadata.csv").write_text("file_name,label\n0.png,3\n")
    index = Index.open(str(run), str(folder), workers=0)
    assert len(index.by_text("a red heart", 5)) == 1
    assert index.captions == []


def test_columns_with_unusual_names_are_found(run, tmp_path):
    (tmp_path / "0.png").write_bytes(replica.png(0))
    (tmp_path / "odd.csv").write_text("bild,worte\n0.png,null\n")
    index = Index.open(str(run), [str(tmp_path / "odd.csv")], workers=0, columns=("bild", "worte"))
    assert index.captions == ["null"]
