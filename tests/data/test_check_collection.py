"""The doctor's page."""

import pytest
from open_clip import SimpleTokenizer
from PIL import Image

from fastclip.data import check_collection as module
from fastclip.data.check_collection import check, contact_sheet, state_memory
from fastclip.data.manifest import open_manifest
from tests.data.collections import encode, picture, png, write_shards, write_tar


@pytest.fixture
def manifest(tmp_path):
    pairs = [
        (png(0), b"a cat"),
        (png(1), b"a cat"),  # the same caption
        (png(0), b"a cat"),  # the same pair
        (png(0), b"another cat"),  # the same image
        (encode(picture(2, size=(100, 50)), "JPEG"), b"word " * 90),  # too long for the tokenizer
        (png(3)[:60], b"broken"),
        (png(4), b"  "),
    ]
    members = [m for i, (image, text) in enumerate(pairs) for m in ((f"{i}.png", image), (f"{i}.txt", text))]
    return open_manifest(str(write_tar(tmp_path / "s.tar", [*members, ("lost.png", png(5))])))


def test_every_finding_is_counted(manifest):
    report = check(manifest, SimpleTokenizer(), jobs=1)
    assert (report.pairs, report.looked_at) == (7, 7)
    assert report.left_out == {"no caption": 1}
    assert sum(report.unreadable.values()) == 2
    assert report.unreadable["empty caption"] == 1
    assert sum(report.worst_files.values()) == 3  # with the one that the index left out
    assert (report.same_image, report.same_pair, report.same_caption) == (2, 1, 2)
    assert (report.truncated_captions, report.context_length) == (1, 77)
    assert (report.width["min"], report.width["max"]) == (40, 100)
    assert report.formats == {"PNG": 4, "JPEG": 1}
    assert report.images_per_second_per_core > 0


def test_a_part_of_the_collection_is_spread_over_it(tmp_path, monkeypatch):
    manifest = open_manifest(str(write_shards(tmp_path / "data", 40, 2)))
    seen = []
    look = module._look_at
    monkeypatch.setattr(
        module, "_look_at", lambda m, t, samples: (seen.extend(samples), look(m, t, samples))[1]
    )
    assert check(manifest, SimpleTokenizer(), most=4, jobs=1).looked_at == 4
    assert seen == [0, 13, 26, 39]


def test_many_pairs_are_looked_at_on_several_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 8)
    manifest = open_manifest(str(write_shards(tmp_path / "data", 40, 2)))
    assert check(manifest, SimpleTokenizer(), jobs=2).formats == {"PNG": 40}


def test_a_tokenizer_that_cannot_count_says_so(manifest):
    class Opaque:
        context_length = 16

    assert check(manifest, Opaque(), jobs=1).truncated_captions is None


def test_the_contact_sheet_shows_good_and_bad_pairs(manifest, tmp_path):
    contact_sheet(manifest, tmp_path / "sheet.png")
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.size == (6 * 160, 2 * 206)  # as many rows as it takes
    assert len(set(sheet.getdata())) > 1000


def test_state_memory_is_what_the_loss_allocates():
    from fastclip import ALGORITHMS, GlobalContrastiveLoss

    n = 1 << 20
    memory = state_memory(n)
    for name, row in ALGORITHMS.items():
        if row.peer:
            assert memory[name] == 0
            continue
        state = GlobalContrastiveLoss(name, n).sample_state
        held = sum(c[:n].numel() * c.element_size() for c in state.columns.values()) if state else 0
        assert memory[name] == held / 2**20
