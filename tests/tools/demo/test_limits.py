"""What is typed and uploaded, and the sentences about what cannot be used."""

import os

import pytest

from fastclip.tools.demo.limits import (
    MAX_BYTES,
    MAX_LABELS,
    MAX_LETTERS,
    MAX_TOP,
    Refused,
    check_labels,
    check_query,
    check_top,
    open_upload,
)
from tests.data.collections import encode, picture, png


def upload(folder, data, name="picture.png"):
    path = folder / name
    path.write_bytes(data)
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}}


def test_a_query_loses_the_white_space_around_it():
    assert check_query("  a red heart\n") == "a red heart"
    assert len(check_query("x" * MAX_LETTERS)) == MAX_LETTERS


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "Type what"), (" \n", "Type what"), (None, "Type what"), ("x" * 501, "501 letters")],
)
def test_a_query_that_cannot_be_answered_is_told_why(text, words):
    with pytest.raises(Refused, match=words):
        check_query(text)


def test_labels_are_separated_by_commas_and_line_ends_and_count_once():
    assert check_labels("cat, dog,,\n big   bird \ncat") == ["cat", "dog", "big bird"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least two"),
        (None, "at least two"),
        ("cat, cat", "at least two"),
        (",".join(map(str, range(MAX_LABELS + 1))), "101 labels; 100"),
        ("cat," + "x" * 501, "501 letters"),
    ],
)
def test_labels_that_cannot_be_used_are_told_why(text, words):
    with pytest.raises(Refused, match=words):
        check_labels(text)
    assert len(check_labels(",".join(map(str, range(MAX_LABELS))))) == MAX_LABELS


@pytest.mark.parametrize("top", [0, -1, MAX_TOP + 1, 10**9, None, "12"])
def test_more_results_than_the_page_shows_are_refused(top):
    with pytest.raises(Refused, match="1 to 48"):
        check_top(top)
    assert check_top(MAX_TOP) == MAX_TOP


def test_an_upload_becomes_an_upright_picture(tmp_path):
    sent = upload(tmp_path, encode(picture(1, size=(40, 30)), "JPEG", exif=b"Exif\0\0MM\0*" + ORIENTED))
    assert open_upload(sent, tmp_path).size == (30, 40)


ORIENTED = bytes.fromhex("00000008000101120003000000010006000000000000")  # turned by 90 degrees


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"these are words", "not an image"),
        (b"<html>", "a web page"),
        (b"", "0 bytes"),
        (png(1)[:100], "truncated PNG"),
        (b"\0" * (MAX_BYTES + 1), "10.0 MB; 10 MB is the most"),
    ],
)
def test_an_upload_that_is_no_picture_is_told_why(tmp_path, data, words):
    with pytest.raises(Refused, match=words):
        open_upload(upload(tmp_path, data), tmp_path)


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("fastclip.tools.demo.limits.MAX_PIXELS", 40 * 30 - 1)
    monkeypatch.setattr("fastclip.data.images.turn_upright", lambda *_: pytest.fail("was decoded"))
    with pytest.raises(Refused, match=r"40 x 30 px exceeds"):
        open_upload(upload(tmp_path, png(1)), tmp_path)


def test_files_of_the_machine_are_no_uploads(tmp_path):
    folder, secret = tmp_path / "uploads", tmp_path / "secret.png"
    folder.mkdir()
    secret.write_bytes(png(1))
    (folder / "link.png").symlink_to(secret)
    for path in (secret, folder / ".." / "secret.png", folder / "link.png", os.devnull):
        with pytest.raises(Refused, match="uploaded here"):
            open_upload({"path": str(path)}, folder)


@pytest.mark.parametrize("sent", [{}, [], "x", {"path": None}, {"path": "gone.png"}, {"path": "a\0b"}])
def test_an_upload_that_is_not_there_is_to_be_chosen_again(tmp_path, sent):
    with pytest.raises(Refused, match=r"choose it again|uploaded here"):
        open_upload(sent, tmp_path)


def test_no_upload_at_all_is_asked_for(tmp_path):
    with pytest.raises(Refused, match="Choose a picture first"):
        open_upload(None, tmp_path)
