"""Cached features equal encoded ones, and never come from another model, other images or a damaged file."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastclip.distributed.world import World
from fastclip.evaluation.feature_cache import cached_features, model_key
from fastclip.evaluation.features import Encoder
from fastclip.evaluation.task_layout import open_task
from fastclip.run.load import load_towers
from tests.damage import flip, positions
from tests.evaluation import replica


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    return load_towers(replica.tiny_export(tmp_path_factory.mktemp("export")))


@pytest.fixture
def encoder(towers):
    return CountingEncoder(towers, World.alone(), batch_size=8)


class CountingEncoder(Encoder):
    encoded = 0

    def images(self, images, progress=None):
        self.encoded += 1
        return super().images(images, progress)


@pytest.fixture
def photos(tmp_path):
    """Ten images of two classes; the third is damaged."""
    for i in range(10):
        path = tmp_path / "photos" / ("cat", "dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(replica.png(i)[: 60 if i == 2 else None])
    return open_task("photos", tmp_path / "photos")


def test_cached_features_equal_the_encoded_ones(encoder, photos, tmp_path):
    first = cached_features(photos, encoder, tmp_path / "f.safetensors", "key")
    second = cached_features(photos, encoder, tmp_path / "f.safetensors", "key")
    assert encoder.encoded == 1
    assert torch.equal(first.image_bd, second.image_bd)
    assert torch.equal(first.kept_b, second.kept_b)
    assert first.bad == second.bad
    assert [bad.file for bad in second.bad] == [str(tmp_path / "photos" / "cat" / "2.png")]
    assert [path.name for path in tmp_path.iterdir()].count("f.safetensors") == 1
    assert not list(tmp_path.glob("*.part"))


def test_features_in_another_precision_are_encoded_again(encoder, photos, tmp_path):
    for precision, encoded in (("float32", 1), ("bfloat16", 2), ("bfloat16", 2), ("float32", 3)):
        encoder.precision = precision
        cached_features(photos, encoder, tmp_path / "f.safetensors", "key")
        assert encoder.encoded == encoded


def test_images_are_encoded_again_when_their_format_is_allowed(encoder, photos, tmp_path):
    (tmp_path / "photos" / "cat" / "2.png").write_bytes(replica.png(2, "AVIF"))
    for formats, encoded, kept in (((), 1, 9), (("avif",), 2, 10), (("avif",), 2, 10), ((), 3, 9)):
        encoder.formats = formats
        assert len(cached_features(photos, encoder, tmp_path / "f.safetensors", "key").kept_b) == kept
        assert encoder.encoded == encoded


def test_features_under_another_key_are_replaced(encoder, photos, tmp_path):
    for key in ("one", "two", "two"):
        cached_features(photos, encoder, tmp_path / "f.safetensors", key)
    assert encoder.encoded == 2


@pytest.mark.parametrize("content", [b"", b"junk", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_damaged_file_is_reported_and_replaced(encoder, photos, tmp_path, caplog, content):
    file = tmp_path / "f.safetensors"
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        cached_features(photos, encoder, file, "key")
    (record,) = [record for record in caplog.records if "feature_cache" in record.name]
    assert (record.levelname, record.args[0]) == ("WARNING", file)
    cached_features(photos, encoder, file, "key")
    assert encoder.encoded == 1


@pytest.mark.slow
def test_every_flipped_bit_is_reported_or_harmless(encoder, photos, tmp_path, caplog):
    file = tmp_path / "f.safetensors"
    expected = cached_features(photos, encoder, file, "key")
    content, encoded = file.read_bytes(), encoder.encoded
    reported = 0
    for position in positions(file, most=60):
        caplog.clear()
        file.write_bytes(content)
        flip(file, position)
        found = cached_features(photos, encoder, file, "key")
        assert torch.equal(found.image_bd, expected.image_bd)
        assert torch.equal(found.kept_b, expected.kept_b)
        assert found.bad == expected.bad
        records = [record for record in caplog.records if "feature_cache" in record.name]
        assert len(records) == encoder.encoded - encoded <= 1
        encoded, reported = encoder.encoded, reported + len(records)
    assert reported >= 50  # the others are in the padding of the header


def test_features_without_a_digest_are_encoded_again(encoder, photos, tmp_path):
    file = tmp_path / "f.safetensors"
    cached_features(photos, encoder, file, "key")
    tensors = load_file(file)
    about = json.loads(bytes(tensors["about"].tolist()))
    del about["digest"]
    save_file(tensors | {"about": torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)}, file)
    cached_features(photos, encoder, file, "key")
    assert encoder.encoded == 2


def test_features_are_returned_even_if_they_cannot_be_written(encoder, photos, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    file = tmp_path / "file" / "f.safetensors"
    assert len(cached_features(photos, encoder, file, "key").image_bd) == 9
    (record,) = [record for record in caplog.records if "feature_cache" in record.name]
    assert (record.levelname, record.args[0]) == ("WARNING", file)


def test_the_key_of_a_model_changes_with_everything_that_features_depend_on(towers, tmp_path):
    again = load_towers(replica.tiny_export(tmp_path / "again"))
    key = model_key(towers, None)
    assert model_key(again, None) == key
    assert model_key(again, torch.bfloat16) != key
    with torch.no_grad():
        again.clip.logit_scale.add_(1)  # the temperature changes no feature
        assert model_key(again, None) == key
        again.clip.visual.conv1.weight[0, 0, 0, 0] += 1e-3
    assert model_key(again, None) != key
    other = load_towers(replica.tiny_export(tmp_path / "other"))
    other.clip.visual.preprocess_cfg["mean"] = (0.1, 0.2, 0.3)
    assert model_key(other, None) != key


def test_the_fingerprint_of_images_does_not_depend_on_templates(tmp_path):
    folder = replica.write_classification(tmp_path / "task", 1)
    before = open_task("task", folder)
    (folder / "zeroshot_classification_templates.txt").write_text("a {c}\n")
    after = open_task("task", folder)
    assert before.images_fingerprint == after.images_fingerprint
    assert before.fingerprint != after.fingerprint
    shutil.copy(folder / "test" / "0.tar", folder / "test" / "1.tar")
    assert open_task("task", folder).images_fingerprint != after.images_fingerprint


def test_the_order_of_images_is_part_of_their_fingerprint(tmp_path):
    """The order of the cues determines the numbers of the images."""
    folder = replica.write_winogavil(tmp_path / "winogavil")
    before = open_task("winogavil", folder)
    lines = (folder / "associations.jsonl").read_text().splitlines()
    (folder / "associations.jsonl").write_text("\n".join(reversed(lines)))
    assert open_task("winogavil", folder).images_fingerprint != before.images_fingerprint
