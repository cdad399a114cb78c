"""`fastclip data check`: every problem is counted."""

import pytest
from open_clip import SimpleTokenizer
from PIL import Image

from fastclip.data.check_collection import check, contact_sheet, state_memory
from fastclip.data.decode import Augment
from fastclip.data.manifest import Manifest, open_manifest
from tests.data.collections import encode, pair_members, picture, png, write_shards, write_tar


@pytest.fixture
def manifest(tmp_path):
    pairs = [
        (png(0), b"a cat"),
        (png(1), b"a cat"),  # the same caption
        (png(0), b"a cat"),  # the same pair
        (png(0), b"another cat"),  # the same image
        (encode(picture(2, size=(100, 50)), "JPEG"), b"word " * 90),  # too long for the tokenizer
        (png(3)[:60], b"truncated"),
        (png(4), b"  "),
    ]
    members = [m for i, (image, text) in enumerate(pairs) for m in ((f"{i}.png", image), (f"{i}.txt", text))]
    return open_manifest(str(write_tar(tmp_path / "s.tar", [*members, ("no_caption.png", png(5))])))


def test_all_problems_are_counted(manifest):
    report = check(manifest, SimpleTokenizer(), jobs=1)
    assert (report.pairs, report.looked_at) == (7, 7)
    assert report.left_out == {"no caption": 1}
    assert sum(report.unreadable.values()) == 2
    assert report.unreadable["empty caption"] == 1
    assert report.worst_files == {manifest.files[0]: 3}  # with the one that the index skipped
    assert [line.rpartition(": ")[2] for line in report.first_bad][::2] == ["no caption", "empty caption"]
    assert all(line.startswith(f"{manifest.files[0]}, byte ") for line in report.first_bad)
    assert (report.same_image, report.same_pair, report.same_caption) == (2, 1, 2)
    assert (report.truncated_captions, report.context_length) == (1, 77)
    assert report.caption_tokens["max"] == 77
    assert 0 < report.padding < 1
    assert (report.width["min"], report.width["max"]) == (40, 100)
    assert report.formats == {"PNG": 4, "JPEG": 1}
    assert report.images_per_second_per_core > 0


def test_several_captions_are_counted_in_tars_and_tables(tmp_path):
    tar = write_tar(
        tmp_path / "s.tar", [("0.png", png(0)), ("0.txt", b"one\ntwo\n\nthree"), *pair_members([1])]
    )
    (tmp_path / "0.png").write_bytes(png(0))
    (tmp_path / "t.csv").write_text("image,caption\n0.png,\"['a cat', 'a dog']\"\n0.png,a cat\n")
    report = check(open_manifest([str(tar), str(tmp_path / "t.csv")]), SimpleTokenizer(), jobs=1)
    assert report.extra_captions == {"pairs": 2, "captions": 3}


@pytest.mark.slow
def test_limited_check_is_spread_evenly(tmp_path):
    read = []

    class RecordingManifest(Manifest):
        def read(self, sample):
            read.append(sample)
            return super().read(sample)

    manifest = RecordingManifest(open_manifest(str(write_shards(tmp_path / "data", 40, 2))).folder)
    assert check(manifest, SimpleTokenizer(), limit=4, jobs=1).looked_at == 4
    assert read == [0, 13, 26, 39]


@pytest.mark.slow
def test_many_pairs_are_checked_in_several_processes(tmp_path):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 40, 2)))
    done = []
    report = check(manifest, SimpleTokenizer(), jobs=2, chunk=8, progress=lambda *counts: done.append(counts))
    assert report.formats == {"PNG": 40}
    assert done == [(8, 40), (16, 40), (24, 40), (32, 40), (40, 40)]


def test_truncated_captions_are_unknown_for_a_tokenizer_without_encode(manifest):
    class Opaque:
        context_length = 16

    report = check(manifest, Opaque(), jobs=1)
    assert (report.truncated_captions, report.padding, report.caption_tokens) == (None, None, {})


def test_further_formats_are_counted_if_they_are_asked_for(tmp_path):
    members = [("a.png", encode(picture(0), "AVIF")), ("a.txt", b"x"), ("b.png", png(1)), ("b.txt", b"y")]
    manifest = open_manifest(str(write_tar(tmp_path / "s.tar", members)))
    (reason,) = check(manifest, SimpleTokenizer(), jobs=1).unreadable
    assert "--formats avif" in reason
    report = check(manifest, SimpleTokenizer(), jobs=1, augment=Augment(formats=("avif",)))
    assert (report.unreadable, report.formats) == ({}, {"AVIF": 1, "PNG": 1})
    contact_sheet(manifest, tmp_path / "sheet.png", formats=("avif",))


def test_contact_sheet_shows_usable_and_unusable_pairs(manifest, tmp_path):
    contact_sheet(manifest, tmp_path / "sheet.png")
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.size == (6 * 160, 2 * 206)  # no more rows than needed
    assert len(set(sheet.getdata())) > 1000


def test_state_memory_equals_what_the_loss_allocates():
    from fastclip import ALGORITHMS, GlobalContrastiveLoss

    n = 1 << 20
    memory = state_memory(n)
    for name, row in ALGORITHMS.items():
        if row.peer:
            assert memory[name] == 0
            continue
        state = GlobalContrastiveLoss(name, n).sample_state
        allocated = sum(c[:n].numel() * c.element_size() for c in state.columns.values()) if state else 0
        assert memory[name] == allocated / 2**20
