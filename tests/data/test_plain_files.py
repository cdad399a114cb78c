"""Only plain files are opened, and whatever else a name leads to is said."""

import os

import pytest

from fastclip.data.images import UnusableSample
from fastclip.data.plain_files import BAD_NAME, NotAFile, open_plain, read_image_file


def test_a_plain_file_is_read_and_a_link_to_one(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to("a")
    assert read_image_file(tmp_path / "b") == b"content"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a FIFO"), (os.mkdir, "a folder")])
def test_anything_else_is_not_opened(tmp_path, make, kind):
    path = tmp_path / "x"
    make(path)
    with pytest.raises(NotAFile) as caught:
        open_plain(path)
    assert (caught.value.path, caught.value.reason) == (str(path), f"{kind}, not a file")
    with pytest.raises(UnusableSample) as unusable:
        read_image_file(path)
    assert str(unusable.value) == caught.value.reason


@pytest.mark.timeout(30)
def test_a_file_that_becomes_a_fifo_before_it_is_opened_does_not_block(tmp_path, monkeypatch):
    (tmp_path / "plain").touch()
    os.mkfifo(tmp_path / "fifo")
    looked = os.stat(tmp_path / "plain")
    monkeypatch.setattr(os, "stat", lambda path: looked)
    with pytest.raises(NotAFile):
        open_plain(tmp_path / "fifo")


@pytest.mark.parametrize("name", ["a\0b", "\ud83d", "n" * 5000])
def test_a_name_that_cannot_be_is_the_samples_fault(tmp_path, name):
    with pytest.raises(UnusableSample) as caught:
        read_image_file(os.path.join(tmp_path, name))
    assert (str(caught.value) == BAD_NAME) == (len(name) < 5000)


def test_a_missing_file_is_an_error_that_readers_count(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_image_file(tmp_path / "none")
