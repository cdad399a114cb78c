"""Parts of batches: each has its rows of a rank's batch, and images alone go through shared memory."""

import numpy as np
import pytest
import torch

from fastclip.data.batch_parts import Labels, Part, PartDataset
from fastclip.data.decode import Augment, decoder
from fastclip.data.manifest import open_manifest
from fastclip.data.order import Order
from tests.data.collections import write_shards


def tokenizer(captions):
    return torch.tensor([[len(caption)] for caption in captions])


@pytest.fixture
def manifest(tmp_path):
    return open_manifest(str(write_shards(tmp_path / "data", 30, 3)))


def dataset(manifest, pairs, rank=0, world_size=1, batch=10):
    order = Order(len(manifest), batch, 3)
    decoding = decoder("fast", Augment(image_size=16)), tokenizer, None, None
    return PartDataset(manifest, order, *decoding, rank, world_size, None, 0, pairs)


@pytest.mark.parametrize("pairs", [1, 3, 4, 5])
def test_the_parts_of_a_step_are_its_samples_in_order(manifest, pairs):
    for rank in (0, 1):
        parts = dataset(manifest, pairs, rank, world_size=2)
        assert parts.parts == -(-5 // pairs)
        for step in (0, 4):
            samples = Order(30, 10, 3).local_batch(step, rank, 2).ids
            found = [parts[step * parts.parts + i].labels.index_p for i in range(parts.parts)]
            assert np.array_equal(np.concatenate(found), samples)
            assert all(len(one) == pairs for one in found[:-1])


def test_images_have_the_form_that_the_decoder_promises(manifest):
    for name in ("fast", "exact"):
        ready = decoder(name, Augment(image_size=16))
        image = ready.train(manifest.read(0).image, 0)
        assert (image.shape, image.dtype, image.nbytes) == (*ready.form, ready.form.nbytes)


def test_images_are_pinned_for_a_gpu_and_labels_are_not_tensors(manifest, monkeypatch):
    part, pinned = dataset(manifest, 4)[1], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    assert part.pin_memory() == Part(part.images, part.labels)
    assert pinned == [part.images]
    assert not any(isinstance(value, torch.Tensor) for value in part.labels)
    assert isinstance(part.labels, Labels)
