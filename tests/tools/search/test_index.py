"""Search by text and by image; the index in the run's folder is rebuilt when it is out of date."""

import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastclip.cli import main
from fastclip.data.contact_sheet import CELL, TEXT
from fastclip.data.pairs import Columns
from fastclip.errors import InputError, OptionError, PathError
from fastclip.evaluation.features import Encoder
from fastclip.run.load import load
from fastclip.text import one_line
from fastclip.tools.search.index import Index, list_pictures
from fastclip.tools.search.search_command import search
from tests.damage import flip, positions
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
    """Eight images in a folder and its subfolders, one in a tar; a damaged image and a text file."""
    folder = tmp_path / "photos"
    (folder / "deep" / "er").mkdir(parents=True)
    for i in range(8):
        place = (folder, folder / "deep", folder / "deep" / "er")[i % 3]
        (place / f"{i}.png").write_bytes(replica.png(i))
    write_tar(folder / "deep" / "more.tar", [("8.png", replica.png(8)), ("8.txt", b"eight")])
    (folder / "damaged.jpg").write_bytes(b"\xff\xd8 and no more")
    (folder / "notes.txt").write_text("not an image")
    return folder


@pytest.fixture
def find(tmp_path, capsys, monkeypatch):
    """Runs `fastclip search … --json` and returns its output; with `fails`, the last line of stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, fails=False):
        capsys.readouterr()
        code = main(["search", *map(str, arguments), "--workers", "0", "--json"])
        printed = capsys.readouterr()
        assert code == (1 if fails else 0), printed.err
        return printed.err.splitlines()[-1] if fails else json.loads(printed.out)

    return call


@pytest.fixture
def encoded(monkeypatch):
    """The number of images in each call of the encoder."""
    calls, original = [], Encoder.images

    def spy(self, images, progress=None):
        calls.append(len(images))
        return original(self, images, progress)

    monkeypatch.setattr(Encoder, "images", spy)
    return calls


def scores(output):
    return {match["name"]: match["score"] for match in output["matches"]}


@pytest.mark.slow
def test_a_text_finds_images_in_the_order_of_their_cosines(run, photos, find):
    model = load(run)
    found = scores(find(run, photos, "a red heart", "--top", "20"))
    files = {f"{path.relative_to(photos)}": path for path in photos.rglob("*.png")}
    expected = {name: model.similarity(path, "a red heart").item() for name, path in files.items()}
    expected["deep/more.tar/8.png"] = model.similarity(
        Image.open(io.BytesIO(replica.png(8))), "a red heart"
    ).item()
    assert found == pytest.approx(expected, abs=1e-5)
    assert [*found] == sorted(expected, key=expected.get, reverse=True)
    assert len(found) == 9  # without the damaged one


@pytest.mark.slow
def test_an_image_finds_itself_first(run, photos, find):
    output = find(run, photos, "--image", photos / "deep" / "4.png", "--top", "3")
    assert output["matches"][0]["name"] == "deep/4.png"
    assert output["matches"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert len(output["matches"]) == 3


@pytest.mark.slow
def test_names_are_printed_without_control_characters(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["\x1b[2Jcat.png", "dog\n 1.000  fake.png", "\u202egnp.bird.png", os.fsdecode(b"\xff.png")]
    (tmp_path / "odd").mkdir()
    for number, name in enumerate(names):
        (tmp_path / "odd" / name).write_bytes(replica.png(number))
    assert main(["search", str(run), "odd", "a cat", "--workers=0"]) == 0
    found = capsys.readouterr().out
    assert sorted(line.split("  ", 1)[1] for line in found.splitlines()[:-1]) == sorted(map(one_line, names))
    assert main(["search", str(run), "odd", "--image", "odd/\x1b[2Jcat.png", "--json", "--workers=0"]) == 0
    matches = json.loads(capsys.readouterr().out)["matches"]
    assert {match["name"] for match in matches} == {*names}  # exactly
    assert main(["search", str(run), "odd/\x1b[2J-gone", "a cat"]) == 1
    assert r"\x1b[2J-gone" in capsys.readouterr().err


@pytest.mark.slow
def test_images_of_further_formats_are_found_if_they_are_asked_for(run, photos, find):
    avif = photos / "avif.png"
    avif.write_bytes(replica.png(4, "AVIF"))
    assert "--formats avif" in find(run, photos, "--image", avif, fails=True)
    assert "avif.png" not in scores(find(run, photos, "a cat", "--top", "20"))
    found = scores(find(run, photos, "--image", avif, "--formats", "avif", "--top", "20"))
    assert next(iter(found)) == "avif.png"
    config = run / "config.yaml"  # a run's own formats need no option
    config.write_text(config.read_text().replace("\ndata:\n", "\ndata:\n  formats: avif\n"))
    assert scores(find(run, photos, "--image", avif, "--top", "20")) == pytest.approx(found, abs=1e-5)


@pytest.mark.slow
def test_matches_are_printed_one_per_line_with_their_score(run, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["search", str(run), str(photos), "a cat", "--top", "2", "--workers=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    matches = [line.split() for line in lines[:2]]
    assert float(matches[0][0]) >= float(matches[1][0])
    assert all(name.endswith(".png") for _, name in matches)
    assert lines[2].endswith(" found.png")
    assert len(lines) == 3


@pytest.mark.slow
def test_the_contact_sheet_shows_the_matches(run, photos, find):
    output = find(run, photos, "a cat", "--top", "8", "--sheet", "sheets/cats.png")
    assert output["sheet"] == "sheets/cats.png"
    sheet = Image.open("sheets/cats.png")
    assert sheet.size == (6 * CELL, 2 * (CELL + TEXT))
    best = Image.open(photos / output["matches"][0]["name"]).convert("RGB")
    assert best.size == (20, 18)
    shown = sheet.crop((6, 13, 154, 146))  # the first cell without margins of 6 and 13 pixels
    assert np.array_equal(shown, best.resize((148, 133), Image.Resampling.BICUBIC))
    find(run, photos, "a cat", "--top", "2")
    assert Image.open("found.png").size == (2 * CELL, CELL + TEXT)


@pytest.mark.slow
def test_the_index_is_cached_in_the_run(run, photos, find, encoded):
    first = find(run, photos, "a cat")
    assert len(list((run / "search").glob("*.safetensors"))) == 1
    assert find(run, photos, "a cat") == first
    assert find(run, "photos", "a cat") == first  # the same folder by another path
    find(run, photos, "--image", photos / "0.png")
    assert encoded == [10]


def change_an_image(photos):
    (photos / "0.png").write_bytes(replica.png(77))


def add_an_image(photos):
    (photos / "new.png").write_bytes(replica.png(77))


def remove_an_image(photos):
    (photos / "0.png").unlink()


def rename_an_image(photos):
    (photos / "0.png").rename(photos / "z.png")


def change_a_tar(photos):
    write_tar(photos / "deep" / "more.tar", [("8.png", replica.png(77))])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [change_an_image, add_an_image, remove_an_image, rename_an_image, change_a_tar]
)
def test_the_index_is_rebuilt_when_a_file_changes(run, photos, find, encoded, change):
    find(run, photos, "a cat")
    change(photos)
    changed = scores(find(run, photos, "a cat", "--top", "20"))
    assert len(encoded) == 2
    shutil.rmtree(run / "search")
    assert scores(find(run, photos, "a cat", "--top", "20")) == changed
    assert len(list((run / "search").iterdir())) == 1


@pytest.mark.slow
def test_the_index_is_rebuilt_when_the_model_changes(run, photos, find, encoded, tmp_path):
    before = find(run / "model", photos, "a cat")
    assert not (run / "model" / "search").exists()  # nothing is written into an export
    find(run / "model", photos, "a cat")
    assert encoded == [10]
    other = replica.tiny_export(tmp_path / "other", seed=1)
    assert scores(find(other, photos, "a cat")) != scores(before)
    find(run / "model", photos, "a cat")
    assert encoded == [10, 10]  # each model has its own index
    shutil.rmtree(run / "model")
    shutil.copytree(other, run / "model")
    find(run / "model", photos, "a cat")
    assert encoded == [10, 10, 10]


@pytest.mark.slow
def test_a_damaged_index_is_rebuilt(run, photos, find, encoded):
    first = find(run, photos, "a cat")
    (file,) = (run / "search").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert find(run, photos, "a cat") == first
    assert len(encoded) == 2


@pytest.mark.slow
def test_no_flipped_bit_of_the_index_changes_a_result(run, photos, find, encoded):
    expected = find(run, photos, "a heart")
    (file,) = (run / "search").iterdir()
    content = file.read_bytes()
    for position in positions(file, most=12):
        file.write_bytes(content)
        flip(file, position)
        assert find(run, photos, "a heart") == expected


def test_an_index_that_cannot_be_kept_is_searched_with_a_warning(
    trained, photos, find, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "file" / "cache"))
    assert find(trained / "model", photos, "a heart")
    (record,) = [record for record in caplog.records if "feature_cache" in record.name]
    assert str(tmp_path / "file" / "cache") in record.getMessage()


def test_pairs_and_shards_can_be_searched(run, tmp_path, find):
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


def test_a_changed_image_of_a_table_changes_the_fingerprint(tmp_path):
    (tmp_path / "0.png").write_bytes(replica.png(0))
    (tmp_path / "pairs.csv").write_text("filepath,title\n0.png,a\n")
    before = list_pictures(str(tmp_path / "pairs.csv")).fingerprint
    os.utime(tmp_path / "0.png", (1, 1))
    assert list_pictures(str(tmp_path / "pairs.csv")).fingerprint != before


def test_a_damaged_tar_is_reported_and_its_first_images_are_used(tmp_path, caplog):
    shards = write_shards(tmp_path / "shards", 6, 1)
    os.truncate(shards / "00000.tar", (shards / "00000.tar").stat().st_size // 2)
    assert 0 < len(list_pictures(str(shards))) < 6
    (record,) = caplog.records
    assert (record.levelname, record.args[0]) == ("WARNING", shards / "00000.tar")


@pytest.mark.slow
def test_ties_keep_the_order_of_the_images(run, tmp_path):
    (tmp_path / "same").mkdir()
    for name in "dbca":
        (tmp_path / "same" / f"{name}.png").write_bytes(replica.png(1))
    index = Index.open(str(run), str(tmp_path / "same"), workers=0)
    assert torch.equal(index.features.image_bd[0], index.features.image_bd[3])
    assert [match.name for match in index.by_text("x", 3)] == ["a.png", "b.png", "c.png"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["a cat", "--top", "0"], ["top=0", "12"]),
        ([], ["--image"]),
        ([" "], ["--image"]),
        (["a cat", "--image", "photos/0.png"], ["--image"]),
        (["--image", "nowhere.png"], ["image=nowhere.png"]),
        (["--image", "photos/damaged.jpg"], ["photos/damaged.jpg"]),
    ],
)
def test_an_error_is_one_line_on_stderr(run, photos, find, arguments, facts):
    line = find(run, photos, *arguments, fails=True)
    assert all(fact in line for fact in facts)


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        ({"text": "a cat", "top": 0}, "top", 0),
        ({"image": Path("nowhere.png")}, "image", Path("nowhere.png")),
    ],
)
def test_invalid_options_are_rejected(run, photos, arguments, option, value):
    with pytest.raises(OptionError) as caught:
        search(str(run), str(photos), **arguments)
    assert (caught.value.option, caught.value.value) == (option, value)


@pytest.mark.parametrize("arguments", [{}, {"text": " "}, {"text": "a cat", "image": Path("0.png")}])
def test_either_a_text_or_an_image_is_required(run, photos, arguments):
    with pytest.raises(InputError) as caught:
        search(str(run), str(photos), **arguments)
    assert caught.value.argument == "text"


def test_missing_images_are_reported_before_a_model_is_loaded(tmp_path, find):
    """The model does not exist either, which would be the error if it were loaded first."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    write_tar(tmp_path / "texts" / "0.tar", [("a.txt", b"a")])
    for images in ("empty", "no_images", "texts/0.tar"):
        line = find("no_model", images, "a cat", fails=True)
        assert images in line
        assert "no_model" not in line
    with pytest.raises(PathError) as caught:
        list_pictures("texts")
    assert caught.value.path == "texts/0.tar"


@pytest.mark.slow
def test_only_damaged_images_are_an_error(run, tmp_path, find):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.png").write_bytes(b"junk")
    line = find(run, "damaged", "a cat", fails=True)
    assert "a.png" in line
    assert "1 images" in line


@pytest.mark.slow
def test_captions_are_found_beside_images_and_in_tars(run, photos, tmp_path):
    (photos / "0.txt").write_text("zero\n  nought \n\n")
    index = Index.open(str(run), str(photos), workers=0)
    assert set(index.captions) == {"zero", "nought", "eight"}  # in a file beside the image, and in the tar
    matches = index.captions_for(photos / "0.png", 2)
    expected = index.model.similarity(photos / "0.png", index.captions)[0]
    assert [match.score for match in matches] == pytest.approx(
        expected.sort(descending=True).values[:2].tolist()
    )
    assert matches[0].text == index.captions[expected.argmax()]


@pytest.mark.slow
def test_captions_are_found_in_tables(run, tmp_path):
    folder = tmp_path / "captioned"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.png").write_bytes(replica.png(i))
    (folder / "metadata.jsonl").write_text(
        "".join(json.dumps({"file_name": f"{i}.png", "text": f"number {i}"}) + "\n" for i in range(3))
    )
    (folder / "pairs.csv").write_text("filepath,title\n0.png,nothing\n2.png,two\n")
    assert Index.open(str(run), str(folder), workers=0).captions == ["number 0", "number 1", "number 2"]
    assert Index.open(str(run), str(folder / "pairs.csv"), workers=0).captions == ["nothing", "two"]


@pytest.mark.slow
def test_images_without_captions_have_no_matching_captions(run, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "0.png").write_bytes(replica.png(0))
    index = Index.open(str(run), str(tmp_path / "bare"), workers=0)
    assert index.captions == []
    assert index.captions_for(tmp_path / "bare" / "0.png", 5) == []


@pytest.mark.slow
def test_images_beside_a_table_without_captions_can_be_searched(run, tmp_path):
    folder = tmp_path / "labelled"
    folder.mkdir()
    (folder / "0.png").write_bytes(replica.png(0))
    (folder / "metadata.csv").write_text("file_name,label\n0.png,3\n")
    index = Index.open(str(run), str(folder), workers=0)
    assert len(index.by_text("a red heart", 5)) == 1
    assert index.captions == []


@pytest.mark.slow
def test_columns_with_unusual_names_are_found(run, tmp_path):
    (tmp_path / "0.png").write_bytes(replica.png(0))
    (tmp_path / "odd.csv").write_text("bild,worte\n0.png,null\n")
    index = Index.open(str(run), [str(tmp_path / "odd.csv")], workers=0, columns=Columns("bild", "worte"))
    assert index.captions == ["null"]
