"""Limits on queries, labels, numbers of results, and uploads."""

import os
import re

import pytest

from fastclip.data.images import UnusableSample
from fastclip.tools.demo.limits import (
    MAX_BYTES,
    MAX_CHARACTERS,
    MAX_LABELS,
    MAX_TOP,
    NOT_UPLOADED,
    RejectedInput,
    check_labels,
    check_query,
    check_top,
    open_upload,
)
from tests.data.collections import encode, picture, png
from tests.data.hostile_images import scans


def rejected(call, *arguments, **options):
    with pytest.raises(RejectedInput) as caught:
        call(*arguments, **options)
    return caught.value


def upload(folder, data, name="image.png"):
    path = folder / name
    path.write_bytes(data)
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}}


@pytest.mark.slow
def test_white_space_around_a_query_is_removed():
    assert check_query("  a red heart\n") == "a red heart"
    assert len(check_query("x" * MAX_CHARACTERS)) == MAX_CHARACTERS


@pytest.mark.parametrize(
    ("text", "numbers"), [("", ()), (" \n", ()), (None, ()), ("x" * 501, ("501", "500"))]
)
def test_an_empty_or_long_query_is_rejected(text, numbers):
    error = rejected(check_query, text)
    assert error.field == "query"
    assert (*re.findall(r"\d+", str(error)),) == numbers


@pytest.mark.parametrize(("check", "field"), [(check_query, "query"), (check_labels, "labels")])
def test_half_a_character_is_rejected(check, field):
    assert rejected(check, "a \ud800 cat, dog").field == field


def test_an_image_that_would_take_minutes_is_rejected(tmp_path):
    error = rejected(open_upload, upload(tmp_path, scans(5_000, 2_000, 2_000)), tmp_path)
    assert error.field == "upload"
    assert "100 scans" in str(error)


def test_labels_are_separated_by_commas_and_line_breaks_and_count_once():
    assert check_labels("cat, dog,,\n big   bird \ncat") == ["cat", "dog", "big bird"]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", ()),
        (None, ()),
        ("cat, cat", ()),
        (",".join(map(str, range(MAX_LABELS + 1))), ("101", "100")),
        ("cat," + "x" * 501, ("501", "500")),
    ],
)
def test_too_few_too_many_or_long_labels_are_rejected(text, numbers):
    error = rejected(check_labels, text)
    assert error.field == "labels"
    assert (*re.findall(r"\d+", str(error)),) == numbers
    assert len(check_labels(",".join(map(str, range(MAX_LABELS))))) == MAX_LABELS


@pytest.mark.parametrize("top", [0, -1, MAX_TOP + 1, 10**9, None, "12"])
def test_a_number_of_results_out_of_range_is_rejected(top):
    error = rejected(check_top, top)
    assert error.field == "top"
    assert "1 to 48" in str(error)
    assert check_top(MAX_TOP) == MAX_TOP


def test_an_upload_becomes_an_upright_image(tmp_path):
    sent = upload(tmp_path, encode(picture(1, size=(40, 30)), "JPEG", exif=b"Exif\0\0MM\0*" + ORIENTED))
    assert open_upload(sent, tmp_path).size == (30, 40)


ORIENTED = bytes.fromhex("00000008000101120003000000010006000000000000")  # rotated by 90 degrees


@pytest.mark.parametrize("data", [b"this is text", b"<html>", b"", png(1)[:100]])
def test_an_upload_that_is_not_an_image_is_rejected_with_the_reason(tmp_path, data):
    error = rejected(open_upload, upload(tmp_path, data), tmp_path)
    assert error.field == "upload"
    assert isinstance(error.__cause__, UnusableSample)
    assert str(error.__cause__) in str(error)


def test_a_large_file_is_rejected(tmp_path):
    error = rejected(open_upload, upload(tmp_path, b"\0" * (MAX_BYTES + 1)), tmp_path)
    assert (error.field, error.__cause__) == ("upload", None)  # it is not read as an image
    assert "10 MiB" in str(error)


def test_an_image_with_too_many_pixels_is_rejected_before_it_is_decoded(tmp_path):
    truncated = upload(tmp_path, png(1)[:100])  # decoding it would fail for another reason
    error = rejected(open_upload, truncated, tmp_path, max_pixels=40 * 30 - 1)
    assert error.field == "upload"
    assert "40 x 30" in str(error)


def test_only_uploaded_files_are_opened(tmp_path):
    folder, secret = tmp_path / "uploads", tmp_path / "secret.png"
    folder.mkdir()
    secret.write_bytes(png(1))
    (folder / "link.png").symlink_to(secret)
    for path in (secret, folder / ".." / "secret.png", folder / "link.png", os.devnull):
        error = rejected(open_upload, {"path": str(path)}, folder)
        assert (error.field, str(error)) == ("upload", NOT_UPLOADED)


@pytest.mark.parametrize("sent", [{}, [], "x", {"path": None}, {"path": "gone.png"}, {"path": "a\0b"}])
def test_an_upload_without_a_file_is_rejected(tmp_path, sent):
    error = rejected(open_upload, sent, tmp_path)
    assert error.field == "upload"
    assert str(error) == NOT_UPLOADED or isinstance(error.__cause__, OSError | ValueError)
    assert not isinstance(error.__cause__, UnusableSample)


def test_an_image_is_required(tmp_path):
    error = rejected(open_upload, None, tmp_path)
    assert (error.field, error.__cause__) == ("upload", None)
